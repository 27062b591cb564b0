"""A service whose machine is lost: only its database and its bucket are left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.contract import postgres_server
from tests.contract.s3_server import BUCKET, S3Server
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S, Runs
from tinsmith.checkpoints.url_store import UrlStore
from tinsmith.service.ledger.payloads import INLINE_BYTES

CLIENTS, STEPS = 2, 20
TOKENS = list(range(1, 1001))
LARGE = [
    tinsmith.Datum(
        tinsmith.ModelInput.from_ints(TOKENS),
        {"target_tokens": TOKENS, "weights": [float(number) for number in TOKENS]},
    )
] * 64
"""Encoded, it is larger than what any ledger would keep beside its rows."""


@pytest.fixture
def bucket(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        server.make_bucket()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/tinsmith"
    finally:
        server.remove()


@pytest.fixture
def served(bucket: str, tmp_path: Path) -> Iterator[Served]:
    """It snapshots often, so that a restart needs both snapshots and a replay."""
    with serving(
        tmp_path / "machine",
        *("--checkpoints", bucket, "--database", postgres_server.new_database()),
        *("--lease-s", "2", "--snapshots-every-commands", "7"),
    ) as served:
        yield served


def lose_machine(served: Served) -> None:
    """Start it elsewhere: the process and its folder are gone, the address is the same."""
    served.kill()
    shutil.rmtree(served.folder / "data")
    served.start()


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_runs_continue_bit_identically_on_an_empty_machine(served: Served, tmp_path: Path) -> None:
    with serving(tmp_path / "undisturbed") as other:
        undisturbed = Runs(other.base_url, CLIENTS, STEPS).results()

    runs = Runs(served.base_url, CLIENTS, STEPS)
    for steps in (2 * CLIENTS, STEPS * CLIENTS // 2, STEPS * CLIENTS - 4):
        _wait(lambda steps=steps: runs.steps_done >= steps or runs.are_over)  # type: ignore[misc]
        lose_machine(served)

    assert runs.results() == undisturbed
    log = served.log_text()
    assert "could not restore" not in log
    assert log.count("commands run again)") >= 2


def test_large_requests_snapshots_and_checkpoints_are_all_found_again(
    served: Served, bucket: str, tmp_path: Path
) -> None:
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1, timeout=WAIT_S)
        for _ in range(8):  # one snapshot
            training.forward_backward(LARGE[:1], "cross_entropy").result(WAIT_S)
        assert len(LARGE) * len(TOKENS) * 4 > INLINE_BYTES
        training.forward_backward(LARGE, "cross_entropy").result(WAIT_S)  # after it
        training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result(WAIT_S)
        path = training.save_state("one").result(WAIT_S).path
        sampler = training.save_weights_and_get_sampling_client()
        prompt, params = (
            tinsmith.ModelInput.from_ints([1, 2]),
            tinsmith.SamplingParams(max_tokens=5, seed=3),
        )
        tokens = sampler.sample(prompt, 1, params).result(WAIT_S).sequences[0].tokens
        loss = training.forward(LARGE, "cross_entropy").result(WAIT_S).loss

        kinds = {path.kind for path in UrlStore(bucket, tmp_path / "elsewhere").paths()}
        assert kinds == {"snapshots", "samplers", "weights"}
        lose_machine(served)

        assert training.forward(LARGE, "cross_entropy").result(WAIT_S).loss == loss
        again = sampler.sample(prompt, 1, params).result(WAIT_S).sequences[0].tokens
        assert list(again) == list(tokens)
        resumed = client.create_training_client_from_state_with_optimizer(path, timeout=WAIT_S)
        assert resumed.forward(LARGE, "cross_entropy").result(WAIT_S).loss == loss
