"""What this process itself has just written, and is about to be asked for: most looks are saved.

A small payload is remembered from its append until the scheduler of this process has read it, a
small result from its settlement, if somebody waits for it, until that one has read it. Each is
given out once, so that nothing here outlives what the database holds for long. Where no other
process can change them, claimed commands are remembered until they are settled: polls ask for
those. Whatever is not here is looked up.

Only what is durable is put in. Knows nothing of databases.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from tinsmith.ledger.records import Command, CommandState, RequestId

T = TypeVar("T")

SMALL_BYTES = 4096
MOST = 1024


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, as the row of its result says."""

    request_id: RequestId
    claimed_by: str | None
    claimed_at: float | None
    settled_at: float
    started_at: float | None
    batch: str | None
    is_failed: bool
    payload_bytes: int
    payload: bytes | None
    """None if it is large."""

    def applied_to(self, command: Command) -> Command:
        """The command, now that it has ended."""
        return msgspec.structs.replace(
            command,
            state=CommandState.SETTLED,
            claimed_by=self.claimed_by,
            claimed_at=self.claimed_at,
            settled_at=self.settled_at,
            started_at=self.started_at,
            batch=self.batch,
            is_failed=self.is_failed,
            result_bytes=self.payload_bytes,
        )


class Remembered(Generic[T]):
    """The last of a kind, by request id; the oldest are forgotten when there are many."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, value: T) -> None:
        """Remember it."""
        self._kept[request_id] = value
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def see(self, request_id: str) -> T | None:
        """What is remembered, which stays."""
        return self._kept.get(request_id)

    def take(self, request_id: str) -> T | None:
        """What is remembered, which is forgotten by that."""
        return self._kept.pop(request_id, None)

    def forget_all(self) -> None:
        """Look everything up again."""
        self._kept.clear()
