"""Checkpoints in a real S3 server: what is saved there, and what is said when it is away."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.contract.s3_server import BUCKET, SECRET_KEY, S3Server
from tests.e2e.service.served import BASE_MODEL, START_S, Served
from tests.e2e.service.training_run import API_KEY, WAIT_S

URL = f"s3://{BUCKET}/tinsmith"
OUTAGE_S = 30.0
"""How long the store is away after a save has begun to wait for it."""
DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([1, 2, 3]),
    {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an empty bucket."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.remove()


@pytest.fixture
def served(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service that keeps its checkpoints there; it is to be started."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    served = Served(tmp_path, "--checkpoints", f"{URL}/{tmp_path.name}")
    yield served
    served.end()


def readiness(served: Served) -> tuple[int, str]:
    """What /readyz answers, and the problem that it names."""
    try:
        with urllib.request.urlopen(f"{served.base_url}/readyz", timeout=START_S) as reply:
            status, body = int(reply.status), reply.read()
    except urllib.error.HTTPError as exc:
        status, body = exc.code, exc.read()
    except OSError:
        return 0, ""
    return status, json.loads(body)["problem"] or ""


def wait_until(is_so: Callable[[], bool], served: Served) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline, f"{readiness(served)}\n{served.log_text()}"
        time.sleep(0.05)


def test_saved_checkpoints_survive_a_kill(served: Served) -> None:
    served.start()
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1, timeout=WAIT_S)
        training.forward_backward([DATUM], "cross_entropy").result(WAIT_S)
        training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result(WAIT_S)
        path = training.save_state("one").result(WAIT_S).path
        loss = training.forward([DATUM], "cross_entropy").result(WAIT_S).loss
        served.kill()
        served.start()
        resumed = client.create_training_client_from_state_with_optimizer(path, timeout=WAIT_S)
        assert resumed.forward([DATUM], "cross_entropy").result(WAIT_S).loss == loss
        assert training.forward([DATUM], "cross_entropy").result(WAIT_S).loss == loss


def test_a_service_starts_and_warns_while_its_store_is_unreachable(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This endpoint takes connections, and never answers."""
    monkeypatch.setenv("TINSMITH_SERVE_STORE_WAIT_S", "1")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        served.start(wait=False)
        wait_until(lambda: "the checkpoint store is" in readiness(served)[1], served)
        assert readiness(served)[0] == 503
        assert "its endpoint cannot be reached" in readiness(served)[1]
        with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
            training = client.create_lora_training_client(BASE_MODEL, rank=4, timeout=WAIT_S)
            with pytest.raises(tinsmith.RequestFailedError, match="cannot be reached"):
                training.save_state("one").result(WAIT_S)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "another-secret"}, "SignatureDoesNotMatch|signature"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "access key"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "credentials"),
    ],
)
def test_wrong_credentials_are_reported_at_startup(
    served: Served, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], reason: str
) -> None:
    for name, value in changes.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    served.start(wait=False)

    assert served.wait_end() != 0
    log = served.log_text()
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in log
    assert any(word in log for word in reason.split("|"))
    for secret in (SECRET_KEY, "another-secret"):
        assert secret not in log


def test_a_missing_bucket_is_reported_at_startup(s3: S3Server, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        served = Served(tmp_path, "--checkpoints", "s3://not-there/tinsmith")
        served.start(wait=False)
        try:
            assert served.wait_end() != 0
        finally:
            served.end()
    assert "create the bucket not-there" in served.log_text()


def test_saves_and_snapshots_survive_an_outage_of_the_store(
    served: Served, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the store does that is restarted. The save waits, and the client is told why."""
    monkeypatch.setenv("TINSMITH_SERVE_SNAPSHOTS_EVERY_COMMANDS", "2")
    served.start()
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1, timeout=WAIT_S)
        s3.stop()
        try:
            # The snapshot that follows these fails.
            training.forward_backward([DATUM], "cross_entropy").result(WAIT_S)
            training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result(WAIT_S)
            future = training.save_state("one")
            loss = training.forward([DATUM], "cross_entropy")
            wait_until(lambda: readiness(served)[0] == 503, served)
            wait_until(lambda: "retrying: " in served.log_text(), served)
            time.sleep(OUTAGE_S)
            assert not future.done()
        finally:
            s3.start()
        path = future.result(WAIT_S).path
        before = loss.result(WAIT_S).loss
        wait_until(lambda: readiness(served) == (200, ""), served)
        served.kill()
        served.start()
        assert training.forward([DATUM], "cross_entropy").result(WAIT_S).loss == before
        resumed = client.create_training_client_from_state_with_optimizer(path, timeout=WAIT_S)
        assert resumed.forward([DATUM], "cross_entropy").result(WAIT_S).loss == before


def test_a_store_that_becomes_unreachable_is_reported_and_saves_fail(
    served: Served, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_SERVE_STORE_WAIT_S", "3")
    served.start()
    assert readiness(served) == (200, "")
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, timeout=WAIT_S)
        s3.stop()
        try:
            future = training.save_state("one")
            wait_until(lambda: readiness(served)[0] == 503, served)
            problem = readiness(served)[1]
            assert "the checkpoint store is unavailable: its endpoint cannot be reached" in problem
            assert f"AWS_ENDPOINT_URL ({s3.endpoint})" in problem
            with pytest.raises(tinsmith.RequestFailedError) as failed:
                future.result(WAIT_S)
            assert "the checkpoint store is unavailable" in str(failed.value)
            # Training needs no store.
            training.forward_backward([DATUM], "cross_entropy").result(WAIT_S)
        finally:
            s3.start()
        wait_until(lambda: readiness(served) == (200, ""), served)
        training.save_state("two").result(WAIT_S)
    assert "the checkpoint store is available again" in served.log_text()
