"""Engines in processes of their own: how these end, and what crosses over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.odd_engine import BASE, odd_spec
from tinsmith.engine.base import (
    AdapterId,
    AdapterSpec,
    SampleOutcome,
    SampleTokens,
    SampleWork,
    StepWork,
    WeightsId,
)
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import BadRequestError, ClosedError, EngineLostError, ValidationError
from tinsmith.types import AdamOptimizerConfig, AdamParams, LoraConfig, ModelInput, SamplingParams
from tinsmith.types.requests import SampleRequest

WAIT_S = 60.0


def _child(**options: Any) -> ProcessEngine:
    return ProcessEngine(odd_spec(**options))


@contextlib.asynccontextmanager
async def _opened(**options: Any) -> AsyncIterator[ProcessEngine]:
    async with asyncio.timeout(WAIT_S), _child(**options) as engine:
        yield engine


def _spec(what: str) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=AdapterId(what),
        base_model=BASE,
        lora=LoraConfig(rank=4, seed=1),
        optimizer=AdamOptimizerConfig(),
    )


def _step(work_id: str) -> StepWork:
    params = AdamParams(learning_rate=1.0)
    return StepWork(work_id=work_id, adapter_id=AdapterId("a"), params=params)


def _sample(work_id: str, *, weights: str | None = None, max_tokens: int = 8) -> SampleWork:
    request = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=7, stop=[]),
    )
    return SampleWork(
        work_id=work_id,
        base_model=BASE,
        weights_id=None if weights is None else WeightsId(weights),
        request=request,
        is_streamed=True,
    )


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


# How it ends


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("hang", "SIGKILL), probably because the machine ran out of memory"),
        ("crash", "SIGSEGV"),
        ("leave", "status 7"),
    ],
)
def test_all_calls_fail_when_the_process_ends(what: str, told: str) -> None:
    """Those under way and those to come, with the reason; samples are told too."""

    async def test() -> None:
        async with _opened(step_s=0.01) as engine:
            await engine.create_adapter(_spec("a"))
            engine.admit(_sample("s", max_tokens=100_000))
            stepping = asyncio.create_task(_step_on(engine))
            making = asyncio.create_task(engine.create_adapter(_spec(what)))
            await asyncio.sleep(0)
            if what == "hang":
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGKILL)

            for call in (making, stepping):
                with pytest.raises(EngineLostError, match="has ended") as caught:
                    await call
                assert told in str(caught.value)
            assert told in str(await engine.wait_lost())
            with pytest.raises(EngineLostError):
                await engine.train([])
            with pytest.raises(EngineLostError):
                engine.admit(_sample("t"))
            engine.cancel("s")
            assert not engine.has_adapter(AdapterId("a"))
            assert await engine.step_sampler() == []

    asyncio.run(test())


def test_the_last_output_of_a_dead_process_is_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with _opened() as engine:
            with pytest.raises(EngineLostError) as caught:
                await engine.create_adapter(_spec("crash"))
            assert "service's log" in str(caught.value.remedy)
            assert "Segmentation fault" not in str(caught.value)  # it is for the operator alone

    asyncio.run(test())
    [told] = [one.getMessage() for one in caplog.records if "has ended" in one.getMessage()]
    assert "SIGSEGV" in told
    assert "Segmentation fault" in told
    assert "Segmentation fault" in capfd.readouterr().err


def test_a_dead_process_is_noticed_though_its_child_still_holds_its_stderr(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with _opened() as engine:
            with pytest.raises(EngineLostError):
                await engine.create_adapter(_spec("leave a child"))

    asyncio.run(test())
    left = int(caplog.text.partition("\nleft ")[2].split()[0])
    assert _is_alive(left)
    os.kill(left, signal.SIGKILL)


async def _step_on(engine: ProcessEngine) -> None:
    while True:
        await engine.step_sampler()


def test_a_lost_engine_can_be_reopened() -> None:
    """As an empty one, in a new process."""

    async def test() -> None:
        async with _opened() as engine:
            first = engine.pid
            assert first is not None
            await engine.create_adapter(_spec("a"))
            os.kill(first, signal.SIGKILL)
            await engine.wait_lost()
            await engine.close()
            await engine.open()
            held = engine.capacity().adapters
            await engine.create_adapter(_spec("a"))

            assert held == 0
            assert engine.has_adapter(AdapterId("a"))
            assert engine.pid != first

    asyncio.run(test())


def test_closing_ends_the_process_and_its_waiters() -> None:
    """At once, whatever it is doing."""

    async def test() -> None:
        async with _opened() as engine:
            pid = engine.pid
            assert pid is not None
            making = asyncio.create_task(engine.create_adapter(_spec("hang")))
            await asyncio.sleep(0)
            await engine.close()

            with pytest.raises(ClosedError, match="is closed"):
                await making
            assert not _is_alive(pid)
            assert engine.pid is None

    asyncio.run(test())


PARENT = """\
import asyncio, os, sys, threading
from tests.integration.engine.odd_engine import odd_spec
from tinsmith.engine.process.process_engine import ProcessEngine

async def main():
    async with ProcessEngine(odd_spec()) as engine:
        {before}
        print(engine.pid, flush=True)
        await asyncio.sleep(3600)

# As in a notebook: on a thread, and with no guard around it.
thread = threading.Thread(target=lambda: asyncio.run(main()))
thread.start()
thread.join()
"""
FORK = "os.fork() or __import__('time').sleep(3600)"


@contextlib.contextmanager
def _parent(folder: Path, before: str = "pass") -> Any:
    """A program with an engine, and the pid of the engine's process."""
    script = folder / "parent.py"
    script.write_text(PARENT.format(before=before))
    path = os.pathsep.join(place for place in sys.path if place)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("before", ["pass", FORK], ids=["alone", "forked"])
def test_the_process_ends_when_its_parent_is_killed(tmp_path: Path, before: str) -> None:
    """Also where a fork of the parent still has the other end of the socket."""
    with _parent(tmp_path, before) as (parent, child):
        assert _is_alive(child)
        os.kill(parent.pid, signal.SIGKILL)

        _until(lambda: not _is_alive(child))


def test_ctrl_c_reaches_only_the_parent(tmp_path: Path) -> None:
    """It decides what ends, and in which order."""
    with _parent(tmp_path) as (parent, child):
        assert os.getpgid(parent.pid) == parent.pid
        assert os.getpgid(child) != parent.pid
        assert os.getsid(child) != os.getsid(parent.pid)


# What crosses over


def test_errors_keep_their_class_message_and_remedy_across_processes() -> None:
    """A fault that only the other process knows says where it was raised."""

    async def test() -> None:
        async with _opened() as engine:
            with pytest.raises(BadRequestError, match="no good; do it otherwise") as caught:
                await engine.create_adapter(_spec("user error"))
            assert caught.value.remedy == "do it otherwise"
            with pytest.raises(RuntimeError, match="ForeignError: something broke") as fault:
                await engine.create_adapter(_spec("fault"))
            assert "odd_engine.py" in "".join(fault.value.__notes__)
            with pytest.raises(ValidationError, match="type function"):
                await engine.train([_step("unsendable")])
            await engine.create_adapter(_spec("a"))

    asyncio.run(test())


def test_an_engine_that_cannot_be_opened_says_why() -> None:
    """With the error that its process met; and no process is left."""

    async def test() -> None:
        engine = _child(fails_to_open=True)
        with pytest.raises(BadRequestError, match="not to be had; choose another"):
            await engine.open()
        assert engine.pid is None

    asyncio.run(test())


def test_log_records_of_the_process_are_logged_in_the_parent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From any thread, with their fields and their traces; what is below the level is not made."""

    async def test() -> None:
        async with _opened() as engine:
            await engine.create_adapter(_spec("log"))
            await engine.create_adapter(_spec("a"))

    with caplog.at_level(logging.INFO):
        asyncio.run(test())

    ours = [record for record in caplog.records if record.name == "tinsmith.odd"]
    assert [record.getMessage() for record in ours] == ["from a thread", "with a trace"]
    assert ours[0].levelname == "WARNING"
    assert vars(ours[0])["model"] == "m"
    assert "ValueError: of the child" in str(ours[1].stack_info)


def test_a_user_s_log_filter_that_raises_does_not_end_the_engine() -> None:
    """The call whose lines it was goes on, and so do later ones."""
    told: list[str] = []

    def fail(_: logging.LogRecord) -> bool:
        raise RuntimeError("on purpose")

    async def test() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        async with _opened() as engine:
            await engine.create_adapter(_spec("log"))
            await engine.create_adapter(_spec("a"))

    logging.getLogger("tinsmith.odd").addFilter(fail)
    try:
        asyncio.run(test())
    finally:
        logging.getLogger("tinsmith.odd").removeFilter(fail)
    assert told == ["on purpose", "on purpose"]


def test_a_malformed_answer_loses_the_engine() -> None:
    """Else whoever waits for it, or for a later one, would wait for ever."""

    async def test() -> None:
        async with _opened() as engine:
            with pytest.raises(EngineLostError, match="header of an engine's message exceeds"):
                await engine.train([_step("unreadable")])
            assert "invalid message" in str(await engine.wait_lost())

    asyncio.run(test())


def test_a_rejected_sample_settles_with_its_error() -> None:
    """Others go on."""

    async def test() -> None:
        async with _opened() as engine:
            engine.admit(_sample("good"))
            engine.admit(_sample("bad", weights="w"))
            ended: dict[str, SampleOutcome] = {}
            while len(ended) < 2:
                for event in await engine.step_sampler():
                    if isinstance(event, SampleOutcome):
                        ended[event.work_id] = event

            assert isinstance(ended["bad"].error, BadRequestError)
            assert ended["good"].result is not None
            assert engine.capacity().samples == 0

    asyncio.run(test())


def test_events_for_a_cancelled_caller_go_to_the_next_one() -> None:
    """The next one gets them."""

    async def test() -> None:
        async with _opened(step_s=0.05) as engine:
            engine.admit(_sample("s", max_tokens=5))
            told: list[int] = []
            drawn = None
            while drawn is None:
                given_up = asyncio.create_task(engine.step_sampler())
                await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                for event in await engine.step_sampler():
                    if isinstance(event, SampleTokens):
                        told += event.tokens
                    elif event.result is not None:
                        drawn = event.result.sequences[0].tokens

            assert told == drawn

    asyncio.run(test())
