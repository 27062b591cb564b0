"""Keys, certificates, logs, metrics and settings of a service that runs as its own process."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

import tinsmith
from tests.e2e.service.served import Served, serving
from tests.e2e.service.training_run import API_KEY, train
from tinsmith.cli.main import main
from tinsmith.errors import AuthenticationError, NotFoundError
from tinsmith.observe.log_fields import FIELDS
from tinsmith.observe.metrics import ServiceMetrics

WAIT_S = 60.0


def page(served: Served, path: str) -> str:
    with urllib.request.urlopen(served.base_url + path, timeout=30.0) as reply:
        text: str = reply.read().decode()
        return text


def key_command(served: Served, *words: str) -> str:
    """What `tinsmith key …` prints, run on the data of a service."""
    command = [sys.executable, "-m", "tinsmith", "key", *words]
    done = subprocess.run(
        [*command, "--data", str(served.folder / "data")],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    return done.stdout.strip()


def runs_of(served: Served, key: str) -> list[str]:
    """The ids of the training runs that a key sees."""
    client = tinsmith.RestClient(base_url=served.base_url, api_key=key)
    listed = client.list_training_runs().result(WAIT_S)
    return [run.training_run_id for run in listed.training_runs]


def is_refused(served: Served, key: str) -> bool:
    try:
        runs_of(served, key)
    except AuthenticationError:
        return True
    return False


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_keys_secure_a_running_service_separate_tenants_and_can_be_revoked(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        train(served.base_url, 0, 1)
        [run] = runs_of(served, API_KEY)

        of_default = key_command(served, "create")
        of_other = key_command(served, "create", "--tenant", "other", "--quota", "models=0")
        wait_until(lambda: is_refused(served, API_KEY))

        assert runs_of(served, of_default) == [run]
        assert runs_of(served, of_other) == []
        client = tinsmith.RestClient(base_url=served.base_url, api_key=of_other)
        with pytest.raises(NotFoundError):
            client.get_training_run(run).result(WAIT_S)
        with (
            tinsmith.ServiceClient(base_url=served.base_url, api_key=of_other) as other,
            pytest.raises(tinsmith.APIStatusError, match="the maximum is 0"),
        ):
            other.create_lora_training_client("Qwen/Qwen3-8B:fake", rank=4).result()

        listed = json.loads(key_command(served, "list", "-f", "json"))["keys"]
        ids = {key["shown"]: key["id"] for key in listed}
        key_command(served, "revoke", ids[of_other[:8]])
        wait_until(lambda: is_refused(served, of_other))
        assert runs_of(served, of_default) == [run]

        log = served.log_text()
        assert not [key for key in (of_default, of_other, API_KEY) if key in log]


def test_metrics_are_documented_updated_and_valid_prometheus_text(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        train(served.base_url, 0, 6)

        def value(name: str) -> float:
            return sum(
                sample.value
                for family in text_string_to_metric_families(page(served, "/metrics"))
                for sample in family.samples
                if sample.name == name
            )

        known = {instrument.name for instrument in ServiceMetrics().registry}
        exposed = set(re.findall(r"^# TYPE (\w+)", page(served, "/metrics"), re.MULTILINE))
        assert exposed == known
        # Figures of the scheduler and the ledger are brought up to date every few seconds.
        fed = (
            "tinsmith_commands_done_total",
            "tinsmith_samples_done_total",
            "tinsmith_batches_total",
            "tinsmith_trained_tokens_total",
            "tinsmith_sampled_tokens_total",
            "tinsmith_training_seconds_total",
            "tinsmith_checkpoints_saved_total",
            "tinsmith_ledger_commits_total",
            "tinsmith_ledger_bytes",
            "tinsmith_http_received_bytes_total",
            "tinsmith_http_sent_bytes_total",
        )
        for name in fed:
            wait_until(lambda name=name: value(name) > 0)  # type: ignore[misc]


def test_json_logs_name_request_tenant_and_model(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json", "--log-level", "debug") as served:
        train(served.base_url, 0, 1)
        assert served.stop() == 0

        lines = [json.loads(line) for line in served.log_text().splitlines()]
        [step] = [line for line in lines if line.get("endpoint") == "optim_step"]
        assert step["model"] == f"{step['session']}:train:0"
        assert (step["tenant"], step["status"], step["level"]) == ("default", 200, "debug")
        exchanges = [line["request"] for line in lines if line["logger"] == "tinsmith.access"]
        assert step["request"] in exchanges
        assert len(set(exchanges)) == len(exchanges)
        usual = {"time", "level", "logger", "message", "traceback"}
        assert not {name for line in lines for name in line} - usual - FIELDS.keys()
        assert API_KEY not in served.log_text()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The files of a certificate, its key, and who vouches for it."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    files = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    for blob in made.cert_chain_pems:
        blob.write_to_path(files[0], append=True)
    made.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    return files


class TlsServed(Served):
    """As `Served`, over TLS."""

    trusted: ssl.SSLContext

    def is_ready(self) -> bool:
        try:
            address = f"{self.base_url}/api/v1/healthz"
            with urllib.request.urlopen(address, timeout=5.0, context=self.trusted) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def test_the_service_serves_over_tls(tmp_path: Path, certificate: tuple[Path, Path, Path]) -> None:
    cert, key, authority = certificate
    served = TlsServed(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key))
    served.base_url = f"https://127.0.0.1:{served.port}"
    served.trusted = ssl.create_default_context(cafile=str(authority))
    try:
        served.start()

        with tinsmith.ServiceClient(
            base_url=served.base_url, api_key=API_KEY, ca_file=str(authority)
        ) as service:
            models = service.get_server_capabilities().supported_models

        assert [model.model_name for model in models] == ["Qwen/Qwen3-8B:fake"]
        assert served.stop() == 0
    finally:
        served.end()


def test_a_tls_key_that_does_not_match_its_certificate_is_reported(
    tmp_path: Path, certificate: tuple[Path, Path, Path]
) -> None:
    cert, _, authority = certificate
    served = Served(tmp_path, "--tls-cert", str(cert), "--tls-key", str(authority))
    served.start(wait=False)

    assert served.wait_end() != 0
    assert "cannot be used with its key" in served.log_text()


class FileServed(Served):
    """As `Served`, from a folder with a settings file that says all but the port."""

    def start(self, *, wait: bool = True) -> None:
        command = [sys.executable, "-m", "tinsmith", "serve", "--config", "serve.toml"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=log, cwd=self.folder
            )
        if wait:
            self.wait_ready()


def test_the_settings_file_from_the_docs_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.toml").write_text(shown, encoding="utf-8")
    served = FileServed(tmp_path)
    try:
        served.start()

        with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
            models = service.get_server_capabilities().supported_models
        monkeypatch.setenv("TINKER_API_KEY", API_KEY)
        assert main(["model", "list", "--base-url", served.base_url]) == 0
        assert served.stop() == 0
    finally:
        served.end()

    own, alias = "Qwen/Qwen3-8B:fake", "Qwen/Qwen3-8B"
    assert [(model.model_name, model.alias_of) for model in models] == [(own, None), (alias, own)]
    assert re.search(rf"^{alias} .* {own}$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "data" / "ledger" / "ledger.sqlite3").is_file()
    assert json.loads(served.log_text().splitlines()[-1])["message"] == "stopped"


def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    served = Served(tmp_path, "--unix-socket", str(path))
    served.start(wait=False)
    try:
        wait_until(lambda: "serving on the Unix socket" in served.log_text())
        second = Served(tmp_path / "second", "--unix-socket", str(path))
        second.folder.mkdir()
        second.start(wait=False)
        assert second.wait_end() != 0
        assert "another program listens" in second.log_text()
        with tinsmith.ServiceClient(
            base_url="http://localhost", api_key=API_KEY, unix_socket=str(path)
        ) as service:
            assert service.get_server_capabilities().supported_models
        assert served.stop() == 0
    finally:
        served.end()


def test_a_stale_unix_socket_is_replaced_but_a_regular_file_is_not(tmp_path: Path) -> None:
    left, file = tmp_path / "left", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    file.write_text("mine")

    served = Served(tmp_path, "--unix-socket", str(left))
    served.start(wait=False)
    try:
        wait_until(lambda: "serving on the Unix socket" in served.log_text())
    finally:
        served.end()
    refused = Served(tmp_path, "--unix-socket", str(file))
    refused.start(wait=False)

    assert refused.wait_end() != 0
    assert file.read_text() == "mine"
