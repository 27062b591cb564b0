"""How each public method of futures is called; the functions have the methods' names."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.compatibility.caller import Caller
from tests.compatibility.stage import RESULT_TIMEOUT_S, Stage


def _future(stage: Stage) -> Any:
    return stage.trainer.forward(stage.data, "cross_entropy")


def result(stage: Stage, call: Caller) -> None:
    assert len(call(_future(stage), timeout=RESULT_TIMEOUT_S).loss_fn_outputs) == 2


def future(stage: Stage, call: Caller) -> None:
    waited = stage.trainer.optim_step(stage.types.AdamParams())

    assert call(waited) is waited.result(timeout=RESULT_TIMEOUT_S)


# Of our client alone


def coroutine(stage: Stage, call: Caller) -> None:
    waited = _future(stage)

    assert asyncio.run(call(waited)) is waited.result()


def exception(stage: Stage, call: Caller) -> None:
    assert call(_future(stage), timeout=RESULT_TIMEOUT_S) is None


def add_done_callback(stage: Stage, call: Caller) -> None:
    _check_callback(stage, call)


def when_settled(stage: Stage, call: Caller) -> None:
    _check_callback(stage, call)


def _check_callback(stage: Stage, call: Caller) -> None:
    settled = threading.Event()

    call(_future(stage), lambda _: settled.set())

    assert settled.wait(RESULT_TIMEOUT_S)


def cancel(stage: Stage, call: Caller) -> None:
    waited = _future(stage)

    assert call(waited) == waited.cancelled()


def stop_work_with(stage: Stage, call: Caller) -> None:
    stopped = threading.Event()
    waited = stage.sdk.APIFuture("a test")

    call(waited, stopped.set)

    waited.cancel()
    assert stopped.is_set()


def settle(stage: Stage, call: Caller) -> None:
    waited = stage.sdk.APIFuture("a test")

    call(waited, 3)

    assert waited.result() == 3


def fail(stage: Stage, call: Caller) -> None:
    waited = stage.sdk.APIFuture("a test")

    call(waited, ValueError("why"))

    assert isinstance(waited.exception(), ValueError)
