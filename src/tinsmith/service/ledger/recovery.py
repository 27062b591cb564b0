"""What a scheduler needs after a crash: each model's last snapshot, and the commands after it.

Settled commands are run again to restore the weights, and their outcomes are discarded: the first
settlement is final. Commands that were not settled become pending and are claimed like new ones.
"""

from __future__ import annotations

import msgspec

from tinsmith.service.ledger.base import PAGE, Ledger
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    Command,
    ModelEntry,
    QueueId,
    QueueProgress,
)


class ModelRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is brought back."""

    model: ModelEntry
    progress: QueueProgress
    """Where its snapshot is, and its position."""
    redo: list[Command]
    """The settled commands after the snapshot, by number; those that failed changed nothing."""
    ended: list[Command]
    """All that ended after the snapshot, well or badly, by number."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to go on."""

    models: list[ModelRecovery]
    released: int
    """How many commands had been claimed and are pending again."""


async def recover(ledger: Ledger | FencedLedger, claimer: str) -> Recovery:
    """Release the claims of a dead claimer of this name, and collect the commands to run again.

    Call this before the first claim. Repeating it is harmless.
    """
    released = await ledger.release_claims(claimer)
    models = [
        await recover_model(ledger, model)
        for model in await _models(ledger)
        if model.released_at is None
    ]
    return Recovery(models=models, released=released)


async def recover_model(ledger: Ledger | FencedLedger, model: ModelEntry) -> ModelRecovery:
    """Collect what has to be run again for one model."""
    queue_id = QueueId(model.id)
    replayed = await ledger.replay(queue_id)
    return ModelRecovery(
        model=model,
        progress=await ledger.queue(queue_id),
        redo=[one for one in replayed if one.is_settled and not one.is_failed],
        ended=[one for one in replayed if one.is_settled],
    )


async def names_files(ledger: Ledger) -> bool:
    """Whether the store should have files: checkpoints, or snapshots to recover from."""
    if await ledger.entries(CheckpointEntry).count():
        return True
    trained = [model for model in await _models(ledger) if model.released_at is None]
    return any([(await ledger.queue(QueueId(model.id))).snapshot for model in trained])


async def _models(ledger: Ledger | FencedLedger) -> list[ModelEntry]:
    """Every model, oldest first."""
    found: list[ModelEntry] = []
    while page := await ledger.entries(ModelEntry).all(limit=PAGE, offset=len(found)):
        found += page
    return found[::-1]
