"""Commands where nothing is set: they find the service that `ServiceClient()` would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.embedded.programs import ENDS_WITHIN_S, environment, run, running
from tests.e2e.service.served import serving

TRAIN = """
training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=1)
step(training)
say(training.model_id)
say(training.save_state("one").result().path)
"""


def command(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `tinsmith` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tinsmith", *words],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )


def test_commands_show_what_a_program_without_settings_trained(tmp_path: Path) -> None:
    """With no model loaded: one that cannot be had keeps nobody from a listing."""
    model_id, path = run(TRAIN, tmp_path).stdout.split()

    listed = command(
        tmp_path,
        *("run", "list", "-f", "json"),
        TINSMITH_SERVE_ENGINE="embedded",
        TINSMITH_SERVE_MODELS="mine=/no/such/folder",
    )
    found = command(tmp_path, "checkpoint", "list", "-f", "json")
    deleted = command(tmp_path, "checkpoint", "delete", path, "--yes")

    assert listed.returncode == 0, listed.stderr
    assert [one["training_run_id"] for one in json.loads(listed.stdout)["runs"]] == [model_id]
    assert [one["tinker_path"] for one in json.loads(found.stdout)["checkpoints"]] == [path]
    assert deleted.returncode == 0, deleted.stderr
    assert listed.stderr == found.stderr == ""


def test_runs_are_listed_with_their_name_step_and_loss_and_found_by_short_ids(
    tmp_path: Path,
) -> None:
    made = run(
        """
client = tinsmith.ServiceClient(display_name="first try")
training = client.create_lora_training_client(MODEL, rank=8, seed=1)
for _ in range(3):
    step(training)
say(training.model_id)
say(training.save_state("one").result().path)
""",
        tmp_path,
    )
    model_id, path = made.stdout.split()
    short = model_id.removeprefix("session-")[:8] + ":train:0"

    shown = command(tmp_path, "run", "list")
    whole = command(tmp_path, "run", "list", "-c", "id,steps")
    plain = command(tmp_path, "run", "info", short[:6], "-f", "json")
    saved = command(tmp_path, "checkpoint", "list", "--run-id", short, "-f", "json")
    sessions = command(tmp_path, "session", "list", "-f", "json")

    heading, row = shown.stdout.splitlines()[2:]
    assert heading.split()[:2] == ["Run", "ID"]
    assert row.split()[:3] == [short, "first", "try"]
    assert model_id in whole.stdout
    found = json.loads(plain.stdout)
    assert (found["training_run_id"], found["steps"]) == (model_id, 3)
    assert 0 < found["loss_per_token"] < 20
    assert f"{found['loss_per_token']:.6g}" in row
    assert [one["tinker_path"] for one in json.loads(saved.stdout)["checkpoints"]] == [path]
    assert json.loads(sessions.stdout)["sessions"] == [
        {
            "session_id": model_id.partition(":")[0],
            "training_run_ids": [model_id],
            "sampler_ids": [],
            "user_metadata": {},
            "display_name": "first try",
        }
    ]


def test_the_status_of_the_embedded_service_is_shown_without_loading_a_model(
    tmp_path: Path,
) -> None:
    run(TRAIN, tmp_path)

    ended = command(
        tmp_path,
        *("auth", "status", "-f", "json"),
        TINSMITH_SERVE_ENGINE="embedded",
        TINSMITH_SERVE_MODELS="mine=/no/such/folder",
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"credentials_available": False, "tinker_accessible": True}


def test_commands_reach_the_service_of_a_program_that_still_runs(tmp_path: Path) -> None:
    with running(TRAIN + "input()\nsay(step(training))", tmp_path) as program:
        model_id = program.hears()
        program.hears()

        listed = command(tmp_path, "run", "list", "-f", "json")
        program.go_on()

        assert [one["training_run_id"] for one in json.loads(listed.stdout)["runs"]] == [model_id]
        assert listed.stderr == ""
        assert float(program.hears()) > 0
        assert program.ends() == 0


@pytest.mark.parametrize("words", [("run", "list"), ("model", "list"), ("auth", "status")])
def test_a_command_that_trains_nothing_creates_no_data_folder(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Whoever forgot to say where the service is wants to know that, and no model fetched."""
    ended = command(tmp_path, *words)

    assert ended.returncode == 1
    assert "TINKER_BASE_URL" in ended.stderr
    assert not (tmp_path / ".tinsmith").exists()


def _refused(home: Path, base_url: str) -> subprocess.CompletedProcess[str]:
    """What a command without a key ends with, once the service has noticed that there are keys."""
    ends_at = time.monotonic() + 60
    while True:
        ended = command(home, "run", "list", "--base-url", base_url)
        if ended.returncode or time.monotonic() > ends_at:
            return ended


def test_a_local_service_without_keys_needs_no_api_key(tmp_path: Path) -> None:
    """In commands and in programs alike; one that has keys says that it wants one."""
    home = tmp_path / "home"
    home.mkdir()
    with serving(tmp_path / "service") as served:
        listed = command(home, "model", "list", "-f", "json", "--base-url", served.base_url)
        runs = command(home, "run", "list", TINKER_BASE_URL=served.base_url)
        program = run(
            f"""
with tinsmith.ServiceClient(base_url={served.base_url!r}) as client:
    training = client.create_lora_training_client({served_model(listed)!r}, rank=8)
    say(step(training))
""",
            home,
        )
        key = command(
            home, "key", "create", "--name", "mine", "--data", str(served.folder / "data")
        )
        refused = wait_until_refused(home, "run", "list", "--base-url", served.base_url)

    assert runs.returncode == 0, runs.stderr
    assert float(program.stdout) > 0
    assert key.returncode == 0, key.stderr
    assert refused.returncode == 1
    assert "the request has no API key" in refused.stderr
    assert "tinsmith auth login" in refused.stderr


def wait_until_refused(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command until it fails: a service looks for its first key every second."""
    until = time.monotonic() + ENDS_WITHIN_S
    while (ended := command(home, *words)).returncode == 0 and time.monotonic() < until:
        time.sleep(0.1)
    return ended


def served_model(listed: subprocess.CompletedProcess[str]) -> str:
    """The first model of a listing."""
    assert listed.returncode == 0, listed.stderr
    name: str = json.loads(listed.stdout)["models"][0]["model_name"]
    return name


def test_a_data_folder_in_use_by_another_service_is_reported_with_a_fix(tmp_path: Path) -> None:
    with serving(tmp_path / "service") as served:
        ended = command(tmp_path, "run", "list", TINSMITH_HOME=str(served.folder / "data"))

    assert ended.returncode == 1
    assert "TINKER_BASE_URL" in ended.stderr
    assert "Traceback" not in ended.stderr
