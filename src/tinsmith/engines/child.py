"""Any engine in a process of its own, itself an engine.

Computing there takes no time from this process's event loop, and a crash or the lack of memory
there ends that process alone: whatever was under way fails with `EngineLostError`, which says why,
and the engine can be opened anew, empty.

The process is started as `python -m`, with a socket passed on to it, and shares nothing with this
one: it may be started from threads, from asyncio and from notebooks, and needs no `__main__` guard.
It is in a session of its own, so that Ctrl-C reaches this process alone, which decides what is to
end. It ends with this one, however this one ends. What it logs is logged here, and what it writes
to stderr goes to ours (`child_stderr.py`).

What has to be told at once (`capacity`, `has_adapter`, …) is kept here as the answers have left it.
`child_messages.py` has what is said, `child_program.py` the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engines.base import (
    AdapterId,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    SampleEvent,
    SampleOutcome,
    SampleWork,
    Saved,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engines.child_messages import (
    Answer,
    Call,
    LogLine,
    Opened,
    Order,
    packed,
    receive,
    tell_log,
)
from tinsmith.engines.child_stderr import Stderr
from tinsmith.errors import ClosedError, EngineLostError, TinkerError

_log = logging.getLogger(__name__)

PROGRAM = "tinsmith.engines.child_program"
END_S = 5.0
"""How long the process may take to end after its socket is closed; then it is killed."""
LOOK_IN_LOG = "the service's log has the last lines that it wrote"
MORE_MEMORY = "serve a smaller model, or give the engine less at once (--limits-batch-tokens)"
NOTHING = EngineCapacity(most_adapters=0, adapters=0, most_samples=0, samples=0, batch_tokens=1)


class _Waiting(msgspec.Struct, frozen=True):
    """A call that has not been answered."""

    future: asyncio.Future[Any]
    note: Callable[[], object]
    """Called when it has ended well, also if nobody waits for it any more."""


class ChildEngine(Engine):
    """See the top of the module.

    Args:
        make: Makes the engine, in its process. It is pickled: a function or a class of a module, or
            a `functools.partial` of one.
        name: What settings call the engine.
    """

    def __init__(self, make: Callable[[], Engine], name: str) -> None:
        self.name = name
        self._make = make
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stderr: Stderr | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._lost: asyncio.Future[TinkerError] | None = None
        self._models: tuple[BaseModel, ...] = ()
        self._forget()

    def _forget(self) -> None:
        self._capacity = NOTHING
        self._adapters: set[AdapterId] = set()
        self._weights: set[WeightsId] = set()
        self._samples: set[str] = set()
        self._stepping: asyncio.Task[list[SampleEvent]] | None = None

    # Life

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if there is one."""
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        """`Engine.open`. After `close` it may be opened again, as a new and empty engine."""
        assert self._process is None, "it is open"
        self._forget()
        self._lost = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _started(theirs)
        assert self._process.stderr is not None
        self._stderr = Stderr(self._process.stderr)
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._reading = asyncio.create_task(self._read(reader))
            opened: Opened = await self._call("open", self._make, _log_levels())
        except BaseException:
            await self.close()
            raise
        self.name, self.samples_apart, self._models = opened

    async def close(self) -> None:
        """`Engine.close`."""
        self._forget()
        self._fail_waiting(ClosedError("the engine is closed"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        process, self._process, self._writer, self._reading = self._process, None, None, None
        if process is not None:
            await asyncio.to_thread(_ended, process)
        if self._stderr is not None:
            await self._stderr.close()

    async def wait_lost(self) -> TinkerError:
        """`Engine.wait_lost`."""
        assert self._lost is not None, "it is not open"
        return await asyncio.shield(self._lost)

    def base_models(self) -> tuple[BaseModel, ...]:
        """`Engine.base_models`."""
        return self._models

    def capacity(self) -> EngineCapacity:
        """`Engine.capacity`."""
        return msgspec.structs.replace(self._capacity, samples=len(self._samples))

    # Out and back

    async def _call(self, method: str, *arguments: Any, note: Callable[[], object] = bool) -> Any:
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(Call(number, method, arguments))
        self._waiting[number] = _Waiting(future, note)
        return await future

    def _send(self, message: Call | Order) -> None:
        if self._writer is None:
            raise ClosedError("the engine is closed")
        if self._lost is not None and self._lost.done():
            raise _again(self._lost.result())
        self._writer.write(packed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._process is not None
        try:
            while (message := await receive(reader)) is not None:
                if isinstance(message, LogLine):
                    _tell(message)
                else:
                    self._take(message)
            code = await asyncio.to_thread(_ended, self._process)
            reason, is_killed = _reason(code), code == -signal.SIGKILL
        except Exception as exc:  # noqa: BLE001 - else whoever waits would wait for ever
            _log.exception("what the engine's process said was not understood")
            self._process.kill()
            await asyncio.to_thread(_ended, self._process)
            reason, is_killed = f"what it said was not understood ({exc!r})", False
        error = EngineLostError(
            f"the process of the engine {self.name!r} has ended: {reason}",
            remedy=MORE_MEMORY if is_killed else LOOK_IN_LOG,
        )
        assert self._lost is not None
        assert self._stderr is not None
        last_lines = await self._stderr.last_lines()
        last_words = f"; the last lines that it wrote:\n{last_lines}" if last_lines else ""
        _log.error("%s%s", error.args[0], last_words)
        self._lost.set_result(error)
        self._forget()
        self._fail_waiting(error)

    def _take(self, answer: Answer) -> None:
        if answer.capacity is not None:
            self._capacity = answer.capacity
        waiting = self._waiting.pop(answer.number)
        if answer.error is None:
            waiting.note()
        if waiting.future.done():
            return  # whoever waited was cancelled
        if answer.error is None:
            waiting.future.set_result(answer.result)
        else:
            waiting.future.set_exception(answer.error)

    def _fail_waiting(self, error: TinkerError) -> None:
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.future.done():
                one.future.set_exception(_again(error))

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """`Engine.create_adapter`."""
        note = self._added(self._adapters, spec.adapter_id)
        await self._call("create_adapter", spec, note=note)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: Saved) -> None:
        """`Engine.load_adapter`."""
        note = self._added(self._adapters, spec.adapter_id)
        await self._call("load_adapter", spec, folder, parts, note=note)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: Saved) -> None:
        """`Engine.save_adapter`."""
        await self._call("save_adapter", adapter_id, folder, parts)

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """`Engine.drop_adapter`."""
        note = self._removed(self._adapters, adapter_id)
        await self._call("drop_adapter", adapter_id, note=note)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """`Engine.has_adapter`."""
        return adapter_id in self._adapters

    def _added(self, known: set[Any], id_: str) -> Callable[[], object]:
        return lambda: known.add(id_)

    def _removed(self, known: set[Any], id_: str) -> Callable[[], object]:
        return lambda: known.discard(id_)

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """`Engine.train`."""
        outcomes: list[TrainingOutcome] = await self._call("train", tuple(batch))
        return outcomes

    # Sampling

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """`Engine.load_weights`."""
        note = self._added(self._weights, weights_id)
        await self._call("load_weights", weights_id, base_model, folder, note=note)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """`Engine.drop_weights`."""
        note = self._removed(self._weights, weights_id)
        await self._call("drop_weights", weights_id, note=note)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """`Engine.has_weights`."""
        return weights_id in self._weights

    def admit(self, sample: SampleWork) -> None:
        """`Engine.admit`. A sample that the engine refuses has that as its outcome."""
        if sample.work_id not in self._samples:
            self._send(Order("admit", (sample,)))
            self._samples.add(sample.work_id)

    def cancel(self, work_id: str) -> None:
        """`Engine.cancel`."""
        if work_id in self._samples:
            self._samples.discard(work_id)
            with contextlib.suppress(ClosedError):
                self._send(Order("cancel", (work_id,)))

    async def step_sampler(self) -> list[SampleEvent]:
        """`Engine.step_sampler`."""
        if self._stepping is None:
            if not self._samples:
                return []
            self._stepping = asyncio.create_task(self._call("step_sampler"))
            self._stepping.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: events that come after a caller has given up are the next caller's.
        stepping = self._stepping
        try:
            events = await asyncio.shield(stepping)
        except Exception:
            self._stepping = None
            raise
        self._stepping = None
        return [event for event in events if self._is_wanted(event)]

    def _is_wanted(self, event: SampleEvent) -> bool:
        """Whether a sample was not cancelled while its event was on the way."""
        is_wanted = event.work_id in self._samples
        if isinstance(event, SampleOutcome):
            self._samples.discard(event.work_id)
        return is_wanted


def _started(connection: socket.socket) -> subprocess.Popen[bytes]:
    """The process, with its end of the socket."""
    # The same places for imports in the same order, and not the current folder before them.
    path = [str(Path(place).absolute()) for place in sys.path]
    descriptor = connection.fileno()
    return subprocess.Popen(  # noqa: S603 - this program itself
        [sys.executable, "-P", "-m", PROGRAM, str(descriptor), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # what a command prints is its own alone
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait until a process has ended that ends by itself; its code, as `Popen` has it."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _reason(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), most likely because the machine ran out of memory"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it died of {signal.Signals(-code).name}"
    return f"it left with status {code}"


def _again(error: TinkerError) -> TinkerError:
    """The error for one more caller: each adds its own traceback to what it raises."""
    return type(error)(*error.args, remedy=error.remedy)


def _tell(line: LogLine) -> None:
    try:
        tell_log(line)
    except Exception as exc:  # noqa: BLE001 - of a filter that the user has set; it is told as such
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a line of the engine's process could not be logged", "exception": exc}
        )


def _log_levels() -> dict[str, int]:
    """Of the root logger and ours, so that the child makes no lines that nobody wants."""
    return {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "tinsmith")}
