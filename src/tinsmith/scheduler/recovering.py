"""The start after a crash: each model from its snapshot, and what came after it once more.

Commands that changed a model and were settled are run again in their order; what they give is
thrown away, because the first settlement stays. What was not settled is pending again, and is
claimed as if new when this is over. Saves are not run again: their files are there.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import PassWork, Saved, TrainingWork
from tinsmith.errors import (
    BadRequestError,
    CheckpointUnavailableError,
    ClosedError,
    InternalServerError,
    TinkerError,
)
from tinsmith.ledger.records import Command, LineId
from tinsmith.ledger.recovery import ModelRecovery, recover
from tinsmith.scheduler.model_commands import ModelCommands
from tinsmith.scheduler.models import KnownModel, could_not_be_made, spec_of
from tinsmith.scheduler.order import TRAINING
from tinsmith.scheduler.parts import Parts
from tinsmith.scheduler.training import Training
from tinsmith.wire.failures import failed_from_error

_log = logging.getLogger(__name__)

STORE_WAIT_S = 1.0
CHUNK = 128
"""How many commands are read and run at a time."""


class Recovering:
    """Brings all models back."""

    def __init__(self, parts: Parts, commands: ModelCommands, training: Training) -> None:
        self._parts = parts
        self._commands = commands
        self._training = training

    async def run(self) -> None:
        """Bring every model to where it was; a model that cannot be is left with the reason."""
        parts, started = self._parts, time.monotonic()
        parts.began_at = parts.ledger.now()
        found = await parts.ask(lambda: recover(parts.ledger, parts.settings.claimer))
        redone = sum(len(one.redo) for one in found.models)
        if redone:
            _log.info("%d commands of %d models are run again", redone, len(found.models))
        recovered = 0
        for number, recovery in enumerate(found.models):
            how_far = f"{number} of {len(found.models)} models are back where they were"
            parts.recovery = f"the service has begun anew: {how_far}"
            recovered += await self._bring_back(recovery)
        parts.is_recovered = True
        parts.statistics.count("recovered_models", recovered)
        parts.statistics.count("redone_commands", redone)
        parts.statistics.count("recovery_s", time.monotonic() - started)
        if found.models:
            _log.info(
                "recovered %d models, %d commands run again, in %.2f s",
                recovered,
                redone,
                time.monotonic() - started,
            )
        if found.released:
            _log.info(
                "%d commands that were under way when the service ended are run first",
                found.released,
            )

    async def _bring_back(self, recovery: ModelRecovery) -> bool:
        """Bring one model to where it was; whether it is there."""
        line = LineId(recovery.model.id)
        numbers = [command.seq_id for command in recovery.ended]
        self._parts.order.begin(line, recovery.next_number, numbers)
        known = self._parts.models.add(spec_of(recovery.model))
        try:
            await self._insist(known, recovery)
        except ClosedError:
            raise  # the model is not to blame, and is brought back at the next start
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            is_foreseen = isinstance(exc, TinkerError)  # as a base model that is no longer served
            _log.error("model %s cannot be brought back: %s", line, exc, exc_info=not is_foreseen)
            self._parts.statistics.count("lost_models")
            known.is_ready = False
            known.trouble = InternalServerError(
                f"model {line} could not be brought back after a restart: "
                f"{failed_from_error(exc).error}",
                remedy="create it again from its last checkpoint",
            )
            return False
        return True

    async def _insist(self, known: KnownModel, recovery: ModelRecovery) -> None:
        """Restore a model; a store that is away for now is waited for, for as long as it takes.

        To go on without it would fail every command that the model's client is waiting for.
        """
        while True:
            try:
                await self._restore(known, recovery)
            except CheckpointUnavailableError as exc:
                _log.warning("model %s waits for the store: %s", recovery.model.id, exc)
                self._parts.problem = f"the store of checkpoints is unavailable: {exc}"
            else:
                self._parts.problem = None
                return
            await asyncio.sleep(STORE_WAIT_S)

    async def _restore(self, known: KnownModel, recovery: ModelRecovery) -> None:
        known.is_ready = False  # an earlier try may have come halfway
        if recovery.line.snapshot is not None:
            path = CheckpointPath.parse(recovery.line.snapshot)
            await self._commands.load_files(known, path, Saved.SNAPSHOT)
            known.is_ready = known.has_trained = True
        redo = recovery.redo
        if not known.is_ready:
            if not redo or redo[0].seq_id != 0:
                await self._note_failed(known, recovery)
                return
            await self._commands.make(redo[0])
            redo = redo[1:]
        await self._redo(known, redo)

    async def _note_failed(self, known: KnownModel, recovery: ModelRecovery) -> None:
        """A model whose creation failed stays known with the reason; one to be made has none."""
        ended = recovery.ended
        if ended and ended[0].seq_id == 0:
            line = LineId(recovery.model.id)
            known.trouble = could_not_be_made(line, BadRequestError("see its first request"))

    async def _redo(self, known: KnownModel, commands: list[Command]) -> None:
        batch: list[Command] = []
        for command in commands:
            if command.kind in TRAINING:
                batch.append(command)
                if len(batch) >= CHUNK:
                    await self._train(known, batch)
                    batch = []
            elif command.kind == "load_weights":
                await self._train(known, batch)
                batch = []
                await self._commands.load_into(known, await self._parts.request(command))
        await self._train(known, batch)

    async def _train(self, known: KnownModel, commands: list[Command]) -> None:
        if not commands:
            return
        read = await asyncio.gather(*(self._training.read(command) for command in commands))
        works: list[TrainingWork] = []
        for work in read:
            if isinstance(work, BaseException):
                raise work
            if not isinstance(work, PassWork) or work.with_gradients:
                works.append(work)
        what = f"training, {len(works)} commands of {commands[0].line} again"
        with self._parts.silence.call(what):
            outcomes = await self._parts.engine.train(works)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        known.note_work(len(commands), sum(one.payload_bytes for one in commands), 0.0)
