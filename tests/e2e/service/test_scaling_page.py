"""Each stage of docs/scaling.md starts as printed.

Only what must differ on this machine is replaced: ports, folders, other servers' addresses, and
models, by a small one of the same name or by the fake engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.contract import postgres_server
from tests.e2e.service.served import START_S, free_port
from tests.e2e.service.several_servers import ready_status, until
from tests.e2e.service.training_run import train
from tests.numerics.small_models import make_model
from tinsmith.engine.fleet.replica_settings import EVERY_GPU
from tinsmith.service.run.settings_loading import load_settings

PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-0.6B"


def blocks(stage: str, language: str) -> list[str]:
    """The blocks in the section of a stage."""
    [section] = re.findall(rf"^## {stage}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def put_here(shown: str, replaced: dict[str, str]) -> str:
    """A block with what must differ on this machine."""
    for old, new in replaced.items():
        assert old in shown
        shown = shown.replace(old, new)
    return shown


def small_model(folder: Path) -> str:
    """The folder of a model that the embedded engine loads at once."""
    make_model(folder / "model", "Llama", vocab_size=1000, hidden_size=32)
    return str(folder / "model")


class StageServer:
    """`tinsmith serve` with a settings file and as few flags as the page has."""

    def __init__(self, folder: Path, config: Path, port: int, *flags: str) -> None:
        folder.mkdir(exist_ok=True)
        self.base_url = f"http://127.0.0.1:{port}"
        self._log = folder / "serve.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith", "serve", "--config", str(config), *flags],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Return when `/readyz` says so."""

        def is_ready() -> bool:
            assert self._process.poll() is None, self.log_text()
            return ready_status(self.base_url).get("status") == "ready"

        until(is_ready, self.log_text)

    def log_text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """Stop it, and with it the processes of its engine."""
        self._process.terminate()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def started(folder: Path, shown: str) -> Iterator[tuple[StageServer, Path]]:
    """A server with these settings, on another port; and its file."""
    port = free_port()
    config = folder / "tinsmith.toml"
    config.write_text(
        put_here(shown, {"8000": str(port), f'"{MODEL}"': f'"{MODEL}={small_model(folder)}"'})
    )
    server = StageServer(folder, config, port)
    try:
        server.wait_ready()
        yield server, config
    finally:
        server.end()


def test_the_embedded_program_runs_as_printed(tmp_path: Path) -> None:
    """With a small model in place of the one that would be downloaded."""
    [program] = blocks("Embedded", "python")
    [name] = re.findall(r'create_lora_training_client\("(.*?)"', program)

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "TINSMITH_HOME": str(tmp_path / "home"),
            "TINSMITH_SERVE_MODELS": f"{name}={small_model(tmp_path)}",
        },
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.0


def test_the_settings_file_of_one_server_works_as_printed(tmp_path: Path) -> None:
    [shown] = blocks("One server", "toml")
    with started(tmp_path, shown) as (server, _):
        assert train(server.base_url, 1, 2, base_model=MODEL)
        assert (tmp_path / "data").is_dir()


def test_the_settings_file_of_replicas_works_as_printed(tmp_path: Path) -> None:
    shown, _ = blocks("Several GPUs on one machine", "toml")
    with started(tmp_path, shown) as (server, config):

        def states() -> list[str]:
            told = subprocess.run(
                [
                    *(sys.executable, "-m", "tinsmith", "fleet", "--config", str(config)),
                    *("--format", "json"),
                ],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
            )
            assert told.returncode == 0, told.stderr
            return [one["state"] for one in json.loads(told.stdout)["replicas"]]

        until(lambda: states() == ["running"] * 2, server.log_text)
        assert train(server.base_url, 1, 2, base_model=MODEL)


def test_the_printed_replicas_on_gpus_are_valid_settings(tmp_path: Path) -> None:
    """They are not started: there may be no GPU."""
    whole, on_gpus = blocks("Several GPUs on one machine", "toml")
    config = tmp_path / "tinsmith.toml"
    config.write_text(whole.partition("[[replica]]")[0] + on_gpus)

    [replica] = load_settings(config=config, environment={}).settings.fleet

    assert replica.device == EVERY_GPU


def test_the_settings_file_of_several_servers_works_as_printed(tmp_path: Path) -> None:
    """Two schedulers and two API servers, as many as the page starts."""
    [shown] = blocks("Several servers", "toml")
    replaced = {
        "postgresql://tinsmith@db/tinsmith": postgres_server.new_database(),
        "s3://bucket/tinsmith": (tmp_path / "checkpoints").as_uri(),
    }
    config = tmp_path / "tinsmith.toml"
    config.write_text(f'engine = "fake"\n{put_here(shown, replaced)}')
    roles = [
        role
        for block in blocks("Several servers", "sh")
        for role in re.findall(r"^tinsmith serve .*--role (\w+)$", block, re.MULTILINE)
    ]
    assert roles == ["scheduler", "scheduler", "api", "api"]
    servers = []
    try:
        for number, role in enumerate(roles):
            port = free_port()
            flags = ("--role", role, "--port", str(port))
            servers.append(StageServer(tmp_path / str(number), config, port, *flags))
        for server in servers[2:]:
            server.wait_ready()
            assert train(server.base_url, 1, 2, base_model=MODEL)

        def schedulers() -> set[str]:
            return {str(ready_status(one.base_url).get("status")) for one in servers[:2]}

        until(lambda: schedulers() == {"ready", "standby"}, servers[0].log_text)
    finally:
        for server in servers:
            server.end()


def test_nothing_is_printed_for_what_is_not_built() -> None:
    assert blocks("A Ray cluster", "(?:python|toml|sh)") == []
