"""Deleting many checkpoints: which, a few at a time, and an account of how each of them went."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from tinsmith.errors import NotFoundError, TinkerError
from tinsmith.types.checkpoints import Checkpoint, CheckpointType

AT_ONCE = 16


class FailedDeletion(msgspec.Struct, frozen=True):
    """A checkpoint that is still there, and why."""

    checkpoint: Checkpoint
    error: TinkerError


class DeletionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `RestClient.delete_checkpoints` did, or would do."""

    deleted: list[Checkpoint]
    """What is gone; of a dry run, what would be."""
    failed: list[FailedDeletion]
    is_dry_run: bool = False


class CheckpointFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints are meant. A time without an offset is taken as UTC."""

    checkpoint_type: CheckpointType | None = None
    before: datetime.datetime | None = None
    after: datetime.datetime | None = None

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is one of them: of the type, and saved between the two times."""
        saved_at = _in_utc(checkpoint.time)
        return (
            self.checkpoint_type in (None, checkpoint.checkpoint_type)
            and (self.before is None or saved_at < _in_utc(self.before))
            and (self.after is None or saved_at > _in_utc(self.after))
        )


def _in_utc(time: datetime.datetime) -> datetime.datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


async def delete_all(
    checkpoints: Iterable[Checkpoint], delete: Callable[[Checkpoint], Awaitable[object]]
) -> DeletionReport:
    """Delete checkpoints, a few at a time; one that fails does not keep the others."""
    found = list(checkpoints)
    waiting = iter(found)
    errors: dict[str, TinkerError] = {}

    async def work() -> None:
        for checkpoint in waiting:
            try:
                await delete(checkpoint)
            except NotFoundError:
                continue  # it is gone, be it by our first try, whose reply was lost
            except TinkerError as error:
                errors[checkpoint.tinker_path] = error

    await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(found)))))
    return DeletionReport(
        deleted=[one for one in found if one.tinker_path not in errors],
        failed=[
            FailedDeletion(one, errors[one.tinker_path])
            for one in found
            if one.tinker_path in errors
        ],
    )
