"""What a scheduler needs after a crash: each model from its snapshot, and what came after.

The state of a model is its last snapshot and the commands after it. Commands that were settled are
run again, so that the weights are what they were, and their outcomes are thrown away: the first
settlement stays. Commands that were not are pending again, and are claimed as if new.
"""

from __future__ import annotations

import msgspec

from tinsmith.ledger.base import PAGE, Ledger
from tinsmith.ledger.fenced import FencedLedger
from tinsmith.ledger.records import CheckpointEntry, Command, Line, LineId, Model


class ModelRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is brought back."""

    model: Model
    line: Line
    """Where its snapshot is, and its position."""
    redo: list[Command]
    """The settled commands after the snapshot, by number; those that failed changed nothing."""
    ended: list[Command]
    """All that ended after the snapshot, well or badly, by number."""
    spent: list[int]
    """Numbers that its line need not wait for."""

    @property
    def next_number(self) -> int:
        """The first number that has neither ended nor been passed over."""
        number, ended = self.line.position, {command.seq_id for command in self.ended}
        while number in ended:
            number += 1
        return number


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to go on."""

    models: list[ModelRecovery]
    released: int
    """How many commands had been claimed and are pending again."""


async def recover(ledger: Ledger | FencedLedger, claimer: str) -> Recovery:
    """Give back what a dead claimer of this name held, and collect what has to be run again.

    To be called before the first claim. It may be called again.
    """
    released = await ledger.release_claims(claimer)
    models: list[ModelRecovery] = []
    for model in await _models(ledger):
        if model.released_at is not None:
            continue
        line_id = LineId(model.id)
        replayed = await ledger.replay(line_id)
        models.append(
            ModelRecovery(
                model=model,
                line=await ledger.line(line_id),
                redo=[one for one in replayed if one.is_settled and not one.is_failed],
                ended=[one for one in replayed if one.is_settled],
                spent=await ledger.spent(line_id),
            )
        )
    return Recovery(models=models, released=released)


async def names_files(ledger: Ledger) -> bool:
    """Whether there should be files in the store: checkpoints, or snapshots to go on from."""
    if await ledger.entries(CheckpointEntry).count():
        return True
    trained = [model for model in await _models(ledger) if model.released_at is None]
    return any([(await ledger.line(LineId(model.id))).snapshot for model in trained])


async def _models(ledger: Ledger | FencedLedger) -> list[Model]:
    """Every model, oldest first."""
    found: list[Model] = []
    while page := await ledger.entries(Model).all(limit=PAGE, offset=len(found)):
        found += page
    return found[::-1]
