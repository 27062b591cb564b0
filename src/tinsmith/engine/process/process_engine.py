"""Runs any engine in another process; is itself an engine.

Computation there does not block this process's event loop, and a crash or running out of memory
ends only that process: running calls fail with `EngineLostError`, which has the reason, and the
engine can be opened again, empty.

State that must be available at once (`capacity`, `has_adapter`, …) is mirrored here from the
replies. Logs of the process are replayed here. `messages.py` has the protocol, `connection.py` how
the process is started and reached, `program.py` its side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    SampleEvent,
    SampleOutcome,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.process import messages
from tinsmith.engine.process.connection import ChildConnection, EngineConnection, ProcessEnd
from tinsmith.engine.process.encoding import BodyDecoder, BodyEncoder
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.engine.process.messages import CallReply, ChildLogLine, EngineCall, ToParent
from tinsmith.errors import ClosedError, EngineLostError, TinkerError

_log = logging.getLogger(__name__)

LOOK_IN_LOG = "the service's log has its last output"
MORE_MEMORY = "serve a smaller model, or give the engine less at once (--limits-batch-tokens)"
NOTHING = EngineCapacity(most_adapters=0, adapters=0, most_samples=0, samples=0, batch_tokens=1)


class _PendingCall(msgspec.Struct, frozen=True):
    """A call without a reply yet."""

    future: asyncio.Future[CallReply]
    note: Callable[[], object]
    """Called after success, even if the caller has been cancelled."""


class ProcessEngine(Engine):
    """An engine in another process.

    Args:
        spec: What the engine is made of.
        connect: Starts the process, each time that the engine is opened.
    """

    def __init__(
        self,
        spec: EngineSpec,
        connect: Callable[[], Awaitable[EngineConnection]] = ChildConnection.start,
    ) -> None:
        self.name = spec.engine
        self._spec = spec
        self._connect = connect
        self._encoder = BodyEncoder()
        self._decoder: BodyDecoder[ToParent] = BodyDecoder(ToParent)
        self._connection: EngineConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._pending: dict[int, _PendingCall] = {}
        self._lost: asyncio.Future[TinkerError] | None = None
        self._models: tuple[BaseModel, ...] = ()
        self._forget()

    def _forget(self) -> None:
        self._capacity = NOTHING
        self._adapters: set[AdapterId] = set()
        self._weights: set[WeightsId] = set()
        self._samples: set[str] = set()
        self._stepping: asyncio.Task[list[SampleEvent]] | None = None

    # Lifecycle

    @property
    def pid(self) -> int | None:
        """Its process id, if it is on this machine."""
        return None if self._connection is None else self._connection.pid

    async def open(self) -> None:
        """Start the process and load its models; after `close`, opens a new, empty engine.

        Raises:
            ValidationError: The process speaks another version of the protocol.
        """
        assert self._connection is None, "already open"
        self._forget()
        self._lost = asyncio.get_running_loop().create_future()
        try:
            self._connection = await self._connect()
            self._connection.send(messages.hello())
            answer = await self._connection.receive()
            if answer is not None:
                messages.check_hello(answer)
            self._reading = asyncio.create_task(self._read(self._connection))
            if answer is None:  # it ended before it said anything
                raise await self.wait_lost()
            levels = _log_levels()
            reply = await self._call(lambda n: messages.OpenEngine(n, self._spec, levels))
        except BaseException:
            await self.close()
            raise
        assert reply.opened is not None
        self.name, self._models = reply.opened.name, reply.opened.base_models
        self.samples_concurrently = reply.opened.samples_concurrently

    async def close(self) -> None:
        """Disconnect from the process and wait for its exit; running calls fail."""
        self._forget()
        self._fail_calls(ClosedError("the engine is closed"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        connection, self._connection, self._reading = self._connection, None, None
        if connection is not None:
            await connection.close()

    def kill(self) -> None:
        """End the process at once, whatever it does; the engine is lost then."""
        if self._connection is not None:
            self._connection.kill()

    async def wait_lost(self) -> TinkerError:
        """Return the reason once the process has died or its connection is broken."""
        assert self._lost is not None, "not open"
        return await asyncio.shield(self._lost)

    def base_models(self) -> tuple[BaseModel, ...]:
        """The base models that the process reported when it was opened."""
        return self._models

    def capacity(self) -> EngineCapacity:
        """The last reported capacity, with the current number of samples."""
        return msgspec.structs.replace(self._capacity, samples=len(self._samples))

    # Calls and replies

    async def _call(
        self, make: Callable[[int], EngineCall], note: Callable[[], object] = bool
    ) -> CallReply:
        number = next(self._numbers)
        future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self._send(make(number))
        self._pending[number] = _PendingCall(future, note)
        return await future

    def _send(self, message: messages.EngineCall | messages.EngineOrder) -> None:
        if self._connection is None:
            raise ClosedError("the engine is closed")
        if self._lost is not None and self._lost.done():
            raise _fresh_copy(self._lost.result())
        self._connection.send(self._encoder.encode(message))

    async def _read(self, connection: EngineConnection) -> None:
        try:
            while (body := await connection.receive()) is not None:
                message = self._decoder.decode(body)
                if isinstance(message, ChildLogLine):
                    _replay_log(message)
                else:
                    self._settle(message)
            end = await connection.wait_end()
        except Exception as exc:  # noqa: BLE001 - or callers would wait forever
            _log.exception("invalid message from the engine's process")
            connection.kill()
            last_output = (await connection.wait_end()).last_output
            end = ProcessEnd(f"it sent an invalid message ({exc!r})", last_output=last_output)
        error = EngineLostError(
            f"the process of the engine {self.name!r} has ended: {end.reason}",
            remedy=MORE_MEMORY if end.is_killed else LOOK_IN_LOG,
        )
        assert self._lost is not None
        last_words = f"; its last output:\n{end.last_output}" if end.last_output else ""
        _log.error("%s%s", error.args[0], last_words)
        self._lost.set_result(error)
        self._forget()
        self._fail_calls(error)

    def _settle(self, reply: CallReply) -> None:
        if reply.capacity is not None:
            self._capacity = reply.capacity
        pending = self._pending.pop(reply.number)
        if reply.error is None:
            pending.note()
        if pending.future.done():
            return  # the caller was cancelled
        if reply.error is None:
            pending.future.set_result(reply)
        else:
            pending.future.set_exception(reply.error)

    def _fail_calls(self, error: TinkerError) -> None:
        pending, self._pending = self._pending, {}
        for one in pending.values():
            if not one.future.done():
                one.future.set_exception(_fresh_copy(error))

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Create an adapter with fresh weights in the process."""
        note = self._added(self._adapters, spec.adapter_id)
        await self._call(lambda n: messages.CreateAdapter(n, spec), note)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter in the process from saved files."""
        note = self._added(self._adapters, spec.adapter_id)
        await self._call(lambda n: messages.LoadAdapter(n, spec, str(folder), parts.value), note)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Have the process write an adapter's files into an empty folder."""
        await self._call(lambda n: messages.SaveAdapter(n, adapter_id, str(folder), parts.value))

    async def save_to_move(self, adapter_id: AdapterId, folder: Path) -> str:
        """Save all parts of an adapter for another process; returns the digest of the files."""
        parts = AdapterParts.SNAPSHOT.value
        reply = await self._call(
            lambda n: messages.SaveAdapter(n, adapter_id, str(folder), parts, wants_digest=True)
        )
        assert reply.digest is not None
        return reply.digest

    async def load_moved(self, spec: AdapterSpec, folder: Path, digest: str) -> None:
        """Load an adapter from the files of another process's `save_to_move`.

        Raises:
            CheckpointFormatError: The files do not match the digest; nothing was loaded.
        """
        note = self._added(self._adapters, spec.adapter_id)
        parts = AdapterParts.SNAPSHOT.value
        await self._call(lambda n: messages.LoadAdapter(n, spec, str(folder), parts, digest), note)

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Unload an adapter from the process; no error if it is not loaded."""
        note = self._removed(self._adapters, adapter_id)
        await self._call(lambda n: messages.DropAdapter(n, adapter_id), note)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether the adapter is loaded; answered without a call to the process."""
        return adapter_id in self._adapters

    def _added(self, known: set[Any], id_: str) -> Callable[[], object]:
        return lambda: known.add(id_)

    def _removed(self, known: set[Any], id_: str) -> Callable[[], object]:
        return lambda: known.discard(id_)

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run a batch of works in the process; returns one outcome per work, in order."""
        works = messages.sent_works(tuple(batch))
        reply = await self._call(lambda n: messages.Train(n, works))
        return [messages.received_outcome(one) for one in reply.outcomes]

    # Sampling

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Load sampler weights in the process from saved files."""
        note = self._added(self._weights, weights_id)
        await self._call(
            lambda n: messages.LoadWeights(n, weights_id, base_model, str(folder)), note
        )

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights once no admitted sample uses them; unknown ids are ignored."""
        note = self._removed(self._weights, weights_id)
        await self._call(lambda n: messages.DropWeights(n, weights_id), note)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether the sampler weights are loaded; answered without a call to the process."""
        return weights_id in self._weights

    def admit(self, sample: SampleWork) -> None:
        """Add a sample; returns at once. If the process rejects it, the error is its outcome."""
        if sample.work_id not in self._samples:
            self._send(messages.AdmitSample(sample))
            self._samples.add(sample.work_id)

    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next token boundary; unknown ids are ignored."""
        if work_id in self._samples:
            self._samples.discard(work_id)
            with contextlib.suppress(ClosedError):
                self._send(messages.CancelSample(work_id))

    async def step_sampler(self) -> list[SampleEvent]:
        """Run a sampler step in the process and return its events; a cancelled call loses none."""
        if self._stepping is None:
            if not self._samples:
                return []
            self._stepping = asyncio.create_task(self._step())
            self._stepping.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: events that arrive after a cancelled call belong to the next one.
        stepping = self._stepping
        try:
            events = await asyncio.shield(stepping)
        except Exception:
            self._stepping = None
            raise
        self._stepping = None
        self._samples.difference_update(
            event.work_id for event in events if isinstance(event, SampleOutcome)
        )
        return events

    async def _step(self) -> list[SampleEvent]:
        return list((await self._call(messages.StepSampler)).events)


def _fresh_copy(error: TinkerError) -> TinkerError:
    """A copy for each caller, since raising adds a traceback."""
    return type(error)(*error.args, remedy=error.remedy)


def _replay_log(line: ChildLogLine) -> None:
    try:
        messages.replay_log(line)
    except Exception as exc:  # noqa: BLE001 - of a logging filter of the user
        asyncio.get_running_loop().call_exception_handler(
            {
                "message": "a log record of the engine's process could not be handled",
                "exception": exc,
            }
        )


def _log_levels() -> dict[str, int]:
    """Levels of the root logger and ours, so that the child sends no unwanted records."""
    return {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "tinsmith")}
