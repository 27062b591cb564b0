"""The loops that sample: one admits samples to the engine, the other steps it and settles.

A sample is read and its weights are loaded beside all others. Samples join and leave the engine at
token boundaries; their tokens go to the board if somebody watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import msgspec

from tinsmith.engines.base import SampleEvent, SampleOutcome, SampleTokens, SampleWork
from tinsmith.errors import ClosedError, TinkerError
from tinsmith.ledger.board import TokenPiece
from tinsmith.ledger.records import Command, RequestId, TenantId, Use
from tinsmith.scheduler.parts import Parts, about, use
from tinsmith.scheduler.samplers import Samplers, Source
from tinsmith.scheduler.settling import failure, success
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse

_log = logging.getLogger(__name__)

MOST_PREPARING = 32
"""How many samples are read at a time, so that a burst does not hold up the event loop."""


class Preparing(msgspec.Struct, frozen=True):
    """A sample that is on its way to the engine."""

    command: Command
    task: asyncio.Task[None]


class Admitted(msgspec.Struct, frozen=True):
    """A sample that the engine has."""

    command: Command
    source: Source
    prompt_tokens: int
    started_at: float


class Sampling:
    """See the top of the module. For one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._samplers = Samplers(parts)
        self._preparing: dict[RequestId, Preparing] = {}
        self._admitted: dict[RequestId, Admitted] = {}
        self._has_admitted = asyncio.Event()
        self._changed = parts.listen()
        self._reading: set[RequestId] = set()

    @property
    def under_way(self) -> int:
        """How many samples are being read or are in the engine."""
        return len(self._preparing) + len(self._admitted)

    async def admit(self) -> None:
        """Admit samples as there is room, until cancelled or the scheduler closes."""
        parts = self._parts
        while not parts.is_closing:
            self._changed.clear()
            await parts.settler.wait_room()
            slots, room = parts.engine.capacity().most_samples, MOST_PREPARING - len(self._reading)
            if room and len(parts.samples):
                for command in parts.samples.take(room, slots=slots, held=self._held()):
                    task = asyncio.create_task(self._prepare(command))
                    self._preparing[command.request_id] = Preparing(command, task)
                    self._reading.add(command.request_id)
            await self._changed.wait()

    def _held(self) -> Counter[TenantId]:
        """How many samples each tenant has under way."""
        held = Counter(one.command.tenant_id for one in self._preparing.values())
        held.update(one.command.tenant_id for one in self._admitted.values())
        return held

    async def step(self) -> None:
        """Step the engine's sampler for as long as there is something in it."""
        parts = self._parts
        try:
            while not parts.is_closing:
                if not self._admitted:
                    self._has_admitted.clear()
                    await parts.turns.set_active("sampling", False)
                    await self._has_admitted.wait()
                    continue
                await parts.turns.set_active("sampling", True)
                await parts.settler.wait_room()
                async with parts.turns.turn("sampling"):
                    events = await self._step()
                for event in events:
                    self._take(event)
        finally:
            # Also with the loss of the engine: training must not wait for us to take our share.
            await parts.turns.set_active("sampling", False)

    def cancel(self, request_id: RequestId) -> bool:
        """Drop a sample that its client gave up, wherever it is; False if it is not here."""
        preparing = self._preparing.pop(request_id, None)
        if preparing is not None:
            preparing.task.cancel()
            self._reading.discard(request_id)  # it may not have begun, and then does not itself
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None:
            self._parts.engine.cancel(request_id)
            self._samplers.release(admitted.source)
        return preparing is not None or admitted is not None

    async def stop(self) -> None:
        """Give up all samples; they were not settled and will be drawn again."""
        tasks = [one.task for one in self._preparing.values()]
        for request_id in [*self._preparing, *self._admitted]:
            self.cancel(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._samplers.stop()

    async def _prepare(self, command: Command) -> None:
        request_id, suspects = command.request_id, self._parts.suspects
        try:
            request = await self._read(command)
            suspects.check(request_id)
            await suspects.wait_alone()
            suspects.enter([request_id])
            source = await self._samplers.source(command)
            await self._samplers.acquire(source)
            self._enter(command, request, source)
        except ClosedError as exc:
            # The sample is not to blame: it stays claimed, and is drawn after the next start.
            self._parts.problem = f"the engine is gone: {exc}"
        except TinkerError as exc:
            self._end(command, exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("a sample failed", extra=about(command))
            self._end(command, exc)
        finally:
            self._preparing.pop(request_id, None)

    async def _read(self, command: Command) -> SampleRequest:
        try:
            request: SampleRequest = await self._parts.request(command)
            return request
        finally:
            # Not after its weights are loaded: others need not wait for these.
            self._reading.discard(command.request_id)
            self._changed.set()

    def _enter(self, command: Command, request: SampleRequest, source: Source) -> None:
        request_id, board = command.request_id, self._parts.ledger.board
        is_watched = board.is_watched(request_id)
        if is_watched:
            board.restart(request_id)
        work = SampleWork(
            work_id=request_id,
            base_model=source.base_model,
            weights_id=source.weights_id,
            request=request,
            is_streamed=is_watched,
            owner=command.tenant_id,
        )
        try:
            self._parts.engine.admit(work)
        except BaseException:
            self._samplers.release(source)
            raise
        self._admitted[request_id] = Admitted(
            command, source, request.prompt.length, self._parts.ledger.now()
        )
        self._has_admitted.set()

    async def _step(self) -> list[SampleEvent]:
        try:
            with self._parts.silence.call(f"sampling, {len(self._admitted)} samples"):
                return await self._parts.engine.step_sampler()
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            # Which sample it was cannot be told: none of them would ever end.
            _log.exception("the sampler failed with %d samples", len(self._admitted))
            self._parts.statistics.count("failed_batches")
            lost = list(self._admitted)
            for request_id in lost:
                self._parts.engine.cancel(request_id)
            return [SampleOutcome(work_id=request_id, error=exc) for request_id in lost]

    def _take(self, event: SampleEvent) -> None:
        request_id = RequestId(event.work_id)
        if isinstance(event, SampleTokens):
            piece = TokenPiece(event.sequence, event.tokens, event.logprobs)
            self._parts.ledger.board.tell(request_id, [piece])
            return
        self._parts.suspects.note_return()
        admitted = self._admitted.pop(request_id, None)
        if admitted is None:
            return  # cancelled in the meantime
        self._parts.suspects.leave([request_id])
        self._samplers.release(admitted.source)
        if event.result is None:
            error = event.error or RuntimeError("the engine gave no outcome")
            if not isinstance(error, TinkerError):
                _log.error("a sample failed", extra=about(admitted.command), exc_info=error)
            self._end(admitted.command, error)
            return
        ended = success(admitted.command, event.result, self._uses(admitted, event.result))
        self._parts.settler.add(msgspec.structs.replace(ended, started_at=admitted.started_at))
        self._parts.statistics.count("done_samples")
        self._parts.ended()

    def _end(self, command: Command, error: BaseException) -> None:
        self._parts.suspects.leave([command.request_id])
        self._parts.settler.add(failure(command, error))
        self._parts.statistics.count("failed_samples")
        self._parts.ended()

    def _uses(self, admitted: Admitted, result: SampleResponse) -> list[Use]:
        command, base_model = admitted.command, admitted.source.base_model
        cached = min(result.prompt_cache_hit_tokens, admitted.prompt_tokens)
        drawn = sum(len(sequence.token_numbers) for sequence in result.sequences)
        amounts = {
            "sampling_prefill": admitted.prompt_tokens - cached,
            "sampling_prefill_cached": cached,
            "sampling_sample": drawn,
        }
        self._parts.statistics.count("sampled_tokens", drawn)
        return [use(command, kind, n, base_model) for kind, n in amounts.items() if n]
