"""An error that is stored keeps no frame, and so nothing of the request that it ended."""

from __future__ import annotations

import contextlib
import gc
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service.api.calls import post
from tests.integration.service.api.managed import ManagedServer
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIStatusError, TinkerError
from tinsmith.testing import running_service
from tinsmith.types import AdamParams

ROUNDS = 30
FRAMES = (types.FrameType, types.TracebackType, types.CoroutineType)


@contextlib.contextmanager
def left_to_collector() -> Iterator[Counter[str]]:
    """What the block leaves in cycles: filled at its end with the types that hold on to frames."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(one).__name__ for one in gc.garbage if isinstance(one, FRAMES))
        found.update(type(one).__name__ for one in gc.garbage if isinstance(one, TinkerError))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("ledger", ["memory", "sqlite"])
def test_a_rejected_request_leaves_no_frames_for_the_garbage_collector(
    tmp_path: Path, ledger: str
) -> None:
    with ManagedServer(tmp_path, ledger) as server, server.http() as http:
        bodies = [
            ("optim_step", {"model_id": "none", "seq_id": 1}),
            ("optim_step", {"model_id": "none"}),
            ("retrieve_future", {"request_id": "none"}),
            ("create_model", {"session_id": "none", "model_seq_id": 1, "base_model": "none"}),
            ("asample", {"prompt": {"chunks": [{"tokens": [-1]}]}}),
            ("session_heartbeat", {"session_id": "none"}),
        ]

        def refuse() -> None:
            statuses = {post(http, name, body).status_code for name, body in bodies}
            assert all(400 <= status < 500 for status in statuses)
            server.reports.clear()

        refuse()
        with left_to_collector() as found:
            for _ in range(ROUNDS):
                refuse()

    # Threads of earlier tests in this process may leave some too, but not with every request.
    assert found.total() < ROUNDS, found


def test_a_future_s_error_has_the_traceback_of_its_caller_only() -> None:
    with (
        running_service() as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add("optim_step", times=None, status=400)
        future = training.optim_step(AdamParams(learning_rate=1e-4))

        error = future.exception(30)

        assert isinstance(error, APIStatusError)
        chain: list[BaseException] = [error]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(before)
        assert [one.__traceback__ for one in chain] == [None] * len(chain)
        with pytest.raises(APIStatusError) as raised:
            future.result(30)
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert "test_a_future_s_error_has_the_traceback_of_its_caller_only" in names
