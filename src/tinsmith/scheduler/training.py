"""The loop that trains: chooses a batch, reads it, runs it, settles it.

While a batch runs the next commands gather. A command that fails is settled with its error, and the
later ones of its model still run; if a whole call of the engine fails, all of its commands do.

An uploaded loss may compute for minutes. Whether a command has one is known when it is read: the
lines of a batch that have one leave it and run aside, one such batch for each tenant at a time, and
the loop goes on with the others. Lines for which there is no place aside wait until there is one.
A batch aside has as many commands as take a few seconds, by what the tenant's last ones took.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from tinsmith.engines.base import (
    AdapterId,
    CustomLossSpec,
    PassWork,
    StepWork,
    TrainingOutcome,
    TrainingWork,
    has_uploaded_loss,
)
from tinsmith.errors import BadRequestError, ClosedError, TinkerError
from tinsmith.ledger.records import (
    Command,
    CustomLoss,
    LineId,
    RequestId,
    SessionId,
    Settlement,
    TenantId,
)
from tinsmith.scheduler.batching import Batch, choose_batch
from tinsmith.scheduler.fairness import Shares
from tinsmith.scheduler.order import PASSES
from tinsmith.scheduler.parts import Parts, about, use
from tinsmith.scheduler.settling import failure, success
from tinsmith.scheduler.snapshots import Snapshots
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.training import OptimStepResponse

_log = logging.getLogger(__name__)

MOST_LOSSES = 256
"""How many uploaded losses are remembered."""
MOST_ASIDE = 2
"""How many batches with uploaded losses run at a time, each of another tenant."""
ASIDE_S = 5.0
"""How long such a batch should take; a single command may take longer."""

Read = TrainingWork | BaseException
"""A command as a work of the engine, or why it cannot be one."""


class Training:
    """See the top of the module."""

    def __init__(self, parts: Parts, snapshots: Snapshots) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._shares = Shares()
        self._running: dict[RequestId, Command] = {}
        self._aside: dict[TenantId, asyncio.Task[None]] = {}
        self._waiting_aside: dict[LineId, TenantId] = {}
        """Lines for which there was no place aside, in the order in which they came."""
        self._command_s: dict[TenantId, float] = {}
        """How long a command of a tenant's last batch aside took."""
        self._losses: OrderedDict[str, tuple[SessionId, CustomLossSpec]] = OrderedDict()

    async def run(self) -> None:
        """Train until cancelled, or until the scheduler closes and nothing runs."""
        try:
            await self._run_batches()
            await asyncio.gather(*self._aside.values())
        finally:
            tasks = list(self._aside.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_batches(self) -> None:
        parts, changed = self._parts, self._parts.listen()
        while not parts.is_closing:
            changed.clear()
            await parts.settler.wait_room()
            if parts.suspects.must_wait:
                # Not active meanwhile: who is in the engine must not wait for us to take our share.
                await parts.turns.set_active("training", False)
                await parts.suspects.wait_alone()
                continue
            batch = self._choose()
            if batch is None:
                await parts.turns.set_active("training", False)
                await changed.wait()
                continue
            parts.suspects.enter(command.request_id for command in batch.commands)
            await parts.turns.set_active("training", True)
            await self._run_batch(batch)
            if parts.suspects.are_apart:
                await asyncio.sleep(0)  # whoever has waited to be alone in the engine goes first
        await parts.turns.set_active("training", False)

    def is_running_again(self) -> bool:
        """Whether the engine is at what was accepted before this scheduler began."""
        began_at = self._parts.began_at
        return any(command.created_at < began_at for command in self._running.values())

    def _choose(self) -> Batch | None:
        return choose_batch(
            self._parts.order,
            self._shares,
            self._base_model,
            without={line for line, one in self._waiting_aside.items() if not self._has_place(one)},
            most_tokens=min(
                self._parts.engine.capacity().batch_tokens, self._parts.settings.most_batch_tokens
            ),
            most_commands=1
            if self._parts.suspects.are_apart
            else self._parts.settings.most_batch_commands,
        )

    def _base_model(self, line: LineId) -> str:
        known = self._parts.models.get(line)
        return "" if known is None else known.spec.base_model

    async def _run_batch(self, batch: Batch) -> None:
        for line in batch.lines:
            self._parts.order.start(line)
        read = await asyncio.gather(*(self.read(command) for command in batch.commands))
        works = dict(zip((one.request_id for one in batch.commands), read, strict=True))
        together, aside = _parted(batch, works)
        waited = list(self._waiting_aside)  # whoever had to wait comes first
        for tenant in sorted(aside, key=lambda one: _place(waited, aside[one])):
            if self._has_place(tenant):
                most = max(1, int(ASIDE_S / self._command_s.get(tenant, 1.0)))
                begun, aside[tenant] = aside[tenant][:most], aside[tenant][most:]
                own = {command.request_id: works[command.request_id] for command in begun}
                self._begin_aside(tenant, Batch(batch.base_model, begun), own)
            self._put_back(aside[tenant])
        if together.commands:
            await self._run_works(together, works)

    def _has_place(self, tenant: TenantId) -> bool:
        """Whether a batch of a tenant may run aside now."""
        return tenant not in self._aside and len(self._aside) < MOST_ASIDE

    def _begin_aside(self, tenant: TenantId, batch: Batch, works: dict[RequestId, Read]) -> None:
        for line in batch.lines:
            self._waiting_aside.pop(line, None)
        task = self._aside[tenant] = asyncio.create_task(self._run_aside(tenant, batch, works))
        task.add_done_callback(lambda _: self._ended_aside(tenant))

    def _put_back(self, commands: Sequence[Command]) -> None:
        """Let commands wait until there is a place aside for them."""
        order = self._parts.order
        self._parts.suspects.put_back(command.request_id for command in commands)
        for command in commands:
            if command.seq_id == order.position(command.line):  # else one before it runs
                self._waiting_aside.setdefault(command.line, command.tenant_id)
                order.finish(command.line, (), time.monotonic())

    async def _run_aside(
        self, tenant: TenantId, batch: Batch, works: dict[RequestId, Read]
    ) -> None:
        started = time.monotonic()
        try:
            await self._run_works(batch, works, is_aside=True)
        except ClosedError as exc:
            # The commands are not to blame: they stay claimed, and are run after the next start.
            self._parts.problem = f"the engine is gone: {exc}"
        except Exception as exc:  # noqa: BLE001 - told, as the end of the loop would be
            _log.exception("a batch with uploaded losses was lost")
            self._parts.problem = f"a batch with uploaded losses was lost: {type(exc).__name__}"
        self._command_s[tenant] = max(0.01, time.monotonic() - started) / len(batch.commands)

    def _ended_aside(self, tenant: TenantId) -> None:
        del self._aside[tenant]
        known = self._parts.order.knows
        self._waiting_aside = {
            line: one for line, one in self._waiting_aside.items() if known(line)
        }
        self._parts.wake()

    async def _run_works(
        self, batch: Batch, works: dict[RequestId, Read], *, is_aside: bool = False
    ) -> None:
        parts = self._parts
        read = [works[command.request_id] for command in batch.commands]
        self._running |= {command.request_id: command for command in batch.commands}
        started, started_at = time.monotonic(), parts.ledger.now()
        outcomes = await self._train(
            [work for work in read if not isinstance(work, BaseException)], is_aside=is_aside
        )
        work_s = (time.monotonic() - started) / max(1, len(batch.lines))
        for command in batch.commands:
            del self._running[command.request_id]
        parts.suspects.leave(command.request_id for command in batch.commands)
        self._settle(batch, read, outcomes, started_at)
        for line, commands in batch.lines.items():
            known = parts.models.get(line)
            if known is not None and known.is_ready:
                known.note_work(len(commands), sum(one.payload_bytes for one in commands), work_s)
            parts.order.finish(line, commands, time.monotonic())
            self._snapshots.consider(line)
        parts.statistics.count("batches")
        parts.statistics.count("batched_commands", len(batch.commands))
        parts.ended(len(batch.commands))

    async def read(self, command: Command) -> Read:
        """A command as a work of the engine, or why it cannot be one."""
        try:
            self._parts.suspects.check(command.request_id)
            self._parts.models.ready(command.line)
            request = await self._parts.request(command)
            if command.kind not in PASSES:
                return StepWork(
                    work_id=command.request_id,
                    adapter_id=AdapterId(command.line),
                    params=request.optim_params,
                )
            given = request.forward_backward_input
            config = given.loss_fn_config or {}
            loss = await self._loss(command, config) if given.loss_fn == "custom" else None
            return PassWork(
                work_id=command.request_id,
                adapter_id=AdapterId(command.line),
                data=tuple(given.data),
                loss_fn=given.loss_fn,
                loss_config=config,
                with_gradients=not request.forward_only,
                custom_loss=loss,
            )
        except TinkerError as exc:
            return exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("a command cannot be read", extra=about(command))
            return exc

    async def _loss(self, command: Command, config: dict[str, float | str]) -> CustomLossSpec:
        loss_id = str(config.get("loss_id", ""))
        if loss_id not in self._losses:
            entries = self._parts.ledger.entries(CustomLoss)
            entry = await self._parts.ask(lambda: entries.get(loss_id))
            if entry is not None:
                self._losses[loss_id] = entry.session_id, _spec(entry)
        found = self._losses.get(loss_id)
        if found is None or found[0] != command.session_id:
            raise BadRequestError(
                f"there is no loss {loss_id!r:.200} in this session",
                remedy="make it with create_custom_loss of the same ServiceClient",
            )
        self._losses.move_to_end(loss_id)
        if len(self._losses) > MOST_LOSSES:
            self._losses.popitem(last=False)
        return found[1]

    async def _train(
        self, works: Sequence[TrainingWork], *, is_aside: bool
    ) -> dict[str, TrainingOutcome]:
        if not works:
            return {}
        turn = contextlib.nullcontext() if is_aside else self._parts.turns.turn("training")
        try:
            async with turn:
                what = f"training, {len(works)} commands from {works[0].work_id} on"
                with (
                    self._parts.silence.call(what),
                    self._parts.spans.span("batch", kind="training", commands=len(works)),
                ):
                    outcomes = await self._parts.engine.train(works)
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("a batch failed as a whole: %s", ", ".join(w.work_id for w in works))
            self._parts.statistics.count("failed_batches")
            outcomes = [TrainingOutcome(work_id=work.work_id, error=exc) for work in works]
        self._parts.suspects.note_return()
        return {outcome.work_id: outcome for outcome in outcomes}

    def _settle(
        self,
        batch: Batch,
        read: Sequence[Read],
        outcomes: dict[str, TrainingOutcome],
        started_at: float,
    ) -> None:
        name = batch.commands[0].request_id  # no other batch has the same first command
        for command, work in zip(batch.commands, read, strict=True):
            if isinstance(work, BaseException):
                settlement = failure(command, work)
            else:
                settlement = self._ending(command, work, outcomes.get(command.request_id))
            self._parts.statistics.count(
                "failed_commands" if settlement.is_failed else "done_commands"
            )
            self._parts.settler.add(
                msgspec.structs.replace(settlement, started_at=started_at, batch=name)
            )

    def _ending(
        self, command: Command, work: TrainingWork, outcome: TrainingOutcome | None
    ) -> Settlement:
        if outcome is None or (outcome.error is None and outcome.result is None):
            return failure(command, RuntimeError("the engine gave no outcome"))
        if outcome.error is not None:
            if not isinstance(outcome.error, TinkerError):
                _log.error("a command failed", extra=about(command), exc_info=outcome.error)
            return failure(command, outcome.error)
        uses = []
        self._note_progress(command, work, outcome)
        if isinstance(work, PassWork):
            base_model = self._base_model(command.line)
            uses = [use(command, "training", work.tokens, base_model)]
            self._parts.statistics.count("trained_tokens", work.tokens)
        return success(command, outcome.result, uses)

    def _note_progress(
        self, command: Command, work: TrainingWork, outcome: TrainingOutcome
    ) -> None:
        runs, result = self._parts.ledger.board.runs, outcome.result
        if isinstance(result, OptimStepResponse):
            runs.note_step(command.line, result.metrics)
        elif isinstance(work, PassWork) and work.with_gradients and result is not None:
            runs.note_pass(command.line, result.loss_per_token, work.tokens)


def _parted(
    batch: Batch, works: dict[RequestId, Read]
) -> tuple[Batch, dict[TenantId, list[Command]]]:
    """The lines that run together, and by tenant those that have an uploaded loss."""
    together: list[Command] = []
    aside: dict[TenantId, list[Command]] = {}
    for commands in batch.lines.values():
        read = [works[command.request_id] for command in commands]
        found = [one for one in read if not isinstance(one, BaseException)]
        is_aside = has_uploaded_loss(found)
        (aside.setdefault(commands[0].tenant_id, []) if is_aside else together).extend(commands)
    return Batch(batch.base_model, together), aside


def _place(waited: Sequence[LineId], commands: Sequence[Command]) -> int:
    """Where the first of their lines stands among those that waited; behind all if none has."""
    places = [waited.index(one.line) for one in commands if one.line in waited]
    return min(places, default=len(waited))


def _spec(entry: CustomLoss) -> CustomLossSpec:
    request = CreateCustomLossRequest.model_validate(
        {
            "session_id": entry.session_id,
            "custom_loss_seq_id": 0,
            "name": entry.name,
            "inputs": entry.graph.get("inputs", []),
            "graph": entry.graph.get("graph", {}),
        }
    )
    return CustomLossSpec(loss_id=entry.id, inputs=tuple(request.inputs), graph=request.graph)
