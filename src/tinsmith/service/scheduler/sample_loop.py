"""The loops that sample: one admits samples to the engine, the other steps it and settles.

Samples are read, and their weights loaded, concurrently. Samples join and leave the engine at token
boundaries; their tokens go to the board if a client streams them.

A cancelled sample leaves this module at once. Whatever the engine still reports of it is dropped in
`_take`, the one place where that is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

import msgspec

from tinsmith.engine.base import Engine, SampleEvent, SampleOutcome, SampleTokens, SampleWork
from tinsmith.errors import AdapterLostError, ClosedError, TinkerError
from tinsmith.service.ledger.board import TokenPiece
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, RequestId, Settlement, TenantId, Use
from tinsmith.service.scheduler.command_queues import EngineArbiter, SampleQueue
from tinsmith.service.scheduler.settling import Settler, failure, success, usage
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog, Suspects
from tinsmith.service.scheduler.weights_loader import SampleSource, WeightsLoader
from tinsmith.service.scheduler.work_reading import log_fields, read_request
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse

_log = logging.getLogger(__name__)

MOST_READING = 32
"""How many samples are read at a time, so that a burst does not block the event loop."""


class PreparingSample(msgspec.Struct, frozen=True):
    """A sample that is being read, or waits for its weights."""

    command: Command
    task: asyncio.Task[None]


class AdmittedSample(msgspec.Struct, frozen=True):
    """A sample that is in the engine."""

    command: Command
    source: SampleSource
    prompt_tokens: int
    started_at: float


class SampleLoop:
    """Admits samples, steps the sampler, settles outcomes. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        engine: Engine,
        *,
        samples: SampleQueue,
        weights: WeightsLoader,
        settler: Settler,
        arbiter: EngineArbiter,
        suspects: Suspects,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._samples = samples
        self._weights = weights
        self._settler = settler
        self._arbiter = arbiter
        self._suspects = suspects
        self._status = status
        self._watchdog = watchdog
        self._preparing: dict[RequestId, PreparingSample] = {}
        self._reading: set[RequestId] = set()
        self._admitted: dict[RequestId, AdmittedSample] = {}
        self._has_admitted = asyncio.Event()

    @property
    def running(self) -> int:
        """How many samples are being prepared or are in the engine."""
        return len(self._preparing) + len(self._admitted)

    async def admit(self) -> None:
        """Admit samples as there is room, until cancelled or the scheduler closes."""
        while not self._status.is_closing:
            self._samples.changed.clear()
            await self._settler.wait_room()
            room = MOST_READING - len(self._reading)
            if room and len(self._samples):
                slots = self._engine.capacity().most_samples
                for command in self._samples.take(room, slots=slots, held=self._held()):
                    task = asyncio.create_task(self._prepare(command))
                    self._preparing[command.request_id] = PreparingSample(command, task)
                    self._reading.add(command.request_id)
            await self._samples.changed.wait()

    def _held(self) -> Counter[TenantId]:
        """How many samples of each tenant are being prepared or are in the engine."""
        held = Counter(one.command.tenant_id for one in self._preparing.values())
        held.update(one.command.tenant_id for one in self._admitted.values())
        return held

    async def step(self) -> None:
        """Step the engine's sampler while there are samples in it."""
        try:
            while not self._status.is_closing:
                if not self._admitted:
                    self._has_admitted.clear()
                    await self._arbiter.set_active("sampling", False)
                    await self._has_admitted.wait()
                    continue
                await self._arbiter.set_active("sampling", True)
                await self._settler.wait_room()
                async with self._arbiter.reserve("sampling"):
                    events = await self._step()
                for event in events:
                    self._take(event)
        finally:
            # Also when the engine is lost: training must not wait for sampling to use its share.
            await self._arbiter.set_active("sampling", False)

    def cancel(self, request_id: RequestId) -> bool:
        """Drop a sample that its client cancelled; False if it is not being drawn here."""
        preparing = self._preparing.pop(request_id, None)
        if preparing is not None:
            preparing.task.cancel()
            self._reading.discard(request_id)  # a task that has not started cannot do it
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None:
            self._engine.cancel(request_id)
            self._weights.release(admitted.source)
        self._samples.changed.set()
        return preparing is not None or admitted is not None

    async def stop(self) -> None:
        """Abandon all samples; they were not settled and will be drawn again."""
        tasks = [one.task for one in self._preparing.values()]
        for request_id in [*self._preparing, *self._admitted]:
            self.cancel(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._weights.stop()

    async def _prepare(self, command: Command) -> None:
        request_id = command.request_id
        try:
            request = await self._read(command)
            self._suspects.check(request_id)
            source = await self._weights.source(command)
            work = _work(command, request, source)
            while (suspects := self._suspects.of(self._engine.replica_for(work))).must_wait:
                await suspects.wait_alone()
            suspects.enter([request_id])
            await self._weights.acquire(source)
            self._enter(command, work, source)
        except ClosedError as exc:
            self._status.note_engine_lost(exc)
        except AdapterLostError:
            self._repeat(command)
        except TinkerError as exc:
            self._fail(command, exc)
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            _log.exception("a sample failed", extra=log_fields(command))
            self._fail(command, exc)
        finally:
            self._preparing.pop(request_id, None)

    async def _read(self, command: Command) -> SampleRequest:
        try:
            request: SampleRequest = await read_request(self._ledger, command)
            return request
        finally:
            # Not after its weights are loaded: others need not wait for those.
            self._reading.discard(command.request_id)
            self._samples.changed.set()

    def _enter(self, command: Command, work: SampleWork, source: SampleSource) -> None:
        request_id, board = command.request_id, self._ledger.board
        is_watched = board.is_watched(request_id)
        if is_watched:
            board.restart_tokens(request_id)
        with contextlib.ExitStack() as undo:
            undo.callback(self._weights.release, source)
            self._engine.admit(msgspec.structs.replace(work, is_streamed=is_watched))
            undo.pop_all()
        self._admitted[request_id] = AdmittedSample(
            command, source, work.request.prompt.length, self._ledger.now()
        )
        self._has_admitted.set()

    def _repeat(self, command: Command) -> None:
        """Let a sample be admitted again: the replica that drew it was lost."""
        self._suspects.put_back([command.request_id])
        self._status.count("repeated_samples")
        self._samples.add(command)

    async def _step(self) -> list[SampleEvent]:
        try:
            with self._watchdog.call(f"sampling, {len(self._admitted)} samples"):
                return await self._engine.step_sampler()
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - the samples fail, the loop continues
            # It is unknown which sample caused it, and none of them would ever end.
            _log.exception("the sampler failed with %d samples", len(self._admitted))
            self._status.count("failed_batches")
            failed = list(self._admitted)
            for request_id in failed:
                self._engine.cancel(request_id)
            return [SampleOutcome(work_id=request_id, error=exc) for request_id in failed]

    def _take(self, event: SampleEvent) -> None:
        """Publish tokens or settle an outcome, unless the sample was cancelled meanwhile."""
        request_id = RequestId(event.work_id)
        admitted = self._admitted.get(request_id)
        if admitted is None:
            return  # cancelled
        if isinstance(event, SampleTokens):
            piece = TokenPiece(event.sequence, event.tokens, event.logprobs)
            self._ledger.board.publish_tokens(request_id, [piece])
            return
        del self._admitted[request_id]
        self._weights.release(admitted.source)
        if isinstance(event.error, AdapterLostError):
            self._repeat(admitted.command)
            return
        self._suspects.note_drawn(request_id)
        if event.result is None:
            error = event.error or RuntimeError("the engine returned no outcome")
            if not isinstance(error, TinkerError):
                _log.error("a sample failed", extra=log_fields(admitted.command), exc_info=error)
            self._fail(admitted.command, error)
            return
        settlement = success(admitted.command, event.result, self._uses(admitted, event.result))
        self._status.count("done_samples")
        self._end(
            admitted.command, msgspec.structs.replace(settlement, started_at=admitted.started_at)
        )

    def _fail(self, command: Command, error: BaseException) -> None:
        self._status.count("failed_samples")
        self._end(command, failure(command, error))

    def _end(self, command: Command, settlement: Settlement) -> None:
        self._suspects.leave([command.request_id])
        self._settler.add(settlement)
        self._samples.changed.set()

    def _uses(self, admitted: AdmittedSample, result: SampleResponse) -> list[Use]:
        command, base_model = admitted.command, admitted.source.base_model
        cached = min(result.prompt_cache_hit_tokens, admitted.prompt_tokens)
        drawn = sum(len(sequence.token_numbers) for sequence in result.sequences)
        amounts = {
            "sampling_prefill": admitted.prompt_tokens - cached,
            "sampling_prefill_cached": cached,
            "sampling_sample": drawn,
        }
        self._status.count("sampled_tokens", drawn)
        return [usage(command, kind, n, base_model) for kind, n in amounts.items() if n]


def _work(command: Command, request: SampleRequest, source: SampleSource) -> SampleWork:
    return SampleWork(
        work_id=command.request_id,
        base_model=source.base_model,
        weights_id=source.weights_id,
        request=request,
        owner=command.tenant_id,
    )
