"""Appends, many at a time: what was submitted while the last commit ran becomes one operation.

Group commit shares the sync of the disk; this shares the statements too. The rows of a batch are
looked up by queue, decided upon in their order, and inserted together. That halves the work for
SQLite, and saves PostgreSQL the round trips.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from tinsmith.errors import (
    CommandConflictError,
    CommandPassedError,
    LedgerUnavailableError,
    without_frames,
)
from tinsmith.service.ledger.payloads import SMALL_BYTES, Kept
from tinsmith.service.ledger.records import Appended, QueueId, Submission, request_id
from tinsmith.service.ledger.steps import Each, Effects, Operation, Steps, Value
from tinsmith.service.ledger.wakeups import NEW_WORK

LARGEST_BATCH = 256
_SPREAD = 4
"""Numbers that are spread wider than so many times their count are looked up one by one."""

Outcome = Appended | CommandConflictError | CommandPassedError
Write = Callable[[Operation[list[Outcome]]], Awaitable[list[Outcome]]]
Known = dict[int, tuple[str, bytes]]


class Waiting:
    """A submission that is to be appended, and who waits for it."""

    __slots__ = ("future", "kept", "now", "submission")

    def __init__(self, submission: Submission, kept: Kept, now: float) -> None:
        self.submission = submission
        self.kept = kept
        self.now = now
        self.future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()


class AppendBatch:
    """Submissions that are appended together. It takes more until it is run."""

    def __init__(self) -> None:
        self.members: list[Waiting] = []
        self._is_open = True
        self._lock = threading.Lock()  # it is run on the writer's thread

    def try_add(self, waiting: Waiting) -> bool:
        """Join the batch, if it has not been run and has room."""
        with self._lock:
            if self._is_open and len(self.members) < LARGEST_BATCH:
                self.members.append(waiting)
                return True
            return False

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._is_open = False

    def run(self, effects: Effects) -> Steps[list[Outcome]]:
        """The batch as an operation; it may be run again if it failed."""
        self.close()
        return append_all(effects, self.members)


class Appending:
    """Gathers submissions for as long as the writer is busy, and no longer."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._batch = AppendBatch()
        self._tasks: set[asyncio.Task[None]] = set()

    async def append(self, submission: Submission, kept: Kept, now: float) -> Appended:
        """Append with others; returns when it is durable."""
        waiting = Waiting(submission, kept, now)
        if not self._batch.members or not self._batch.try_add(waiting):
            self._batch = AppendBatch()
            self._batch.try_add(waiting)
            task = asyncio.get_running_loop().create_task(self._run(self._batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await waiting.future

    async def wait_done(self) -> None:
        """Wait until all that was submitted is answered."""
        await asyncio.gather(*self._tasks)

    async def _run(self, batch: AppendBatch) -> None:
        try:
            outcomes: Sequence[Outcome | Exception] = await self._write(batch.run)
        except LedgerUnavailableError as exc:
            batch.close()  # it may never have run: no other write may join it now
            outcomes = [without_frames(exc)] * len(batch.members)
        except Exception as exc:  # noqa: BLE001 - it reaches the caller whose value it was
            batch.close()
            outcomes = [without_frames(exc)]
            if len(batch.members) > 1:
                await self._run_apart(batch)
                return
        for waiting, outcome in zip(batch.members, outcomes, strict=True):
            if waiting.future.done():
                continue  # its caller was cancelled; the command stands
            if isinstance(outcome, Appended):
                waiting.future.set_result(outcome)
            else:
                waiting.future.set_exception(outcome)

    async def _run_apart(self, batch: AppendBatch) -> None:
        """One of them cannot be written: each by itself, so that the others can."""
        for waiting in batch.members:
            alone = AppendBatch()
            alone.try_add(waiting)
            await self._run(alone)


def append_all(effects: Effects, members: Sequence[Waiting]) -> Steps[list[Outcome]]:
    """`Ledger.append` for several, in their order, with their payloads already stored."""
    effects.writes = len(members)
    by_line: dict[QueueId, list[Submission]] = {}
    for member in members:
        by_line.setdefault(member.submission.queue_id, []).append(member.submission)
    known = yield from _known(by_line)
    found = yield "position", Each((queue_id,) for queue_id in by_line)
    positions = {
        queue_id: rows[0][0] if rows else 0 for queue_id, rows in zip(by_line, found, strict=True)
    }
    [(ordinal,)] = yield "last_ordinal", ()
    outcomes: list[Outcome] = []
    commands: list[tuple[Value, ...]] = []
    payloads: list[tuple[Value, ...]] = []
    for member in members:
        submission, kept = member.submission, member.kept
        queue_id, number = submission.queue_id, submission.seq_id
        if number is None:
            number = yield from _next_number(queue_id, known[queue_id], positions[queue_id])
        outcome = decide(submission, number, known[queue_id].get(number), positions[queue_id])
        outcomes.append(outcome)
        if not isinstance(outcome, Appended) or not outcome.is_new:
            continue
        ordinal += 1
        known[queue_id][number] = submission.kind, submission.fingerprint
        commands.append(
            (
                ordinal,
                queue_id,
                number,
                submission.kind,
                submission.tenant_id,
                submission.session_id,
                submission.clone,
                int(submission.is_ordered),
                submission.fingerprint,
                kept.size_bytes,
                member.now,
            )
        )
        payloads.append((ordinal, kept.size_bytes, kept.file, kept.digest, kept.content))
        if kept.content is not None and kept.size_bytes <= SMALL_BYTES:
            effects.appended.append((outcome.request_id, kept.content))
    if commands:
        # In an order that is the same everywhere: servers that append the same must not deadlock.
        commands.sort(key=lambda values: values[1:3])
        yield "append", commands
        yield "keep_payload", payloads
        effects.topics.append(NEW_WORK)
    return outcomes


def _known(by_line: dict[QueueId, list[Submission]]) -> Steps[dict[QueueId, Known]]:
    """The commands of each queue that have one of its submitted numbers."""
    ranges = Each()
    for queue_id, submissions in by_line.items():
        numbers = {one.seq_id for one in submissions if one.seq_id is not None}
        if not numbers:
            continue
        low, high = min(numbers), max(numbers)
        if high - low <= _SPREAD * len(numbers):
            ranges.append((queue_id, low, high))
        else:
            ranges += [(queue_id, number, number) for number in numbers]
    known: dict[QueueId, Known] = {queue_id: {} for queue_id in by_line}
    if ranges:
        found = yield "same_numbers", ranges
        for (name, *_), rows in zip(ranges, found, strict=True):
            known[QueueId(str(name))].update((n, (kind, mark)) for n, kind, mark in rows)
    return known


def _next_number(queue_id: QueueId, known: Known, position: int) -> Steps[int]:
    """The number after all that the queue has or had, those of this batch included."""
    [(number,)] = yield "next_number", (queue_id,)
    return max(int(number), position, *(one + 1 for one in known), 0)


def decide(
    submission: Submission, number: int, known: tuple[str, bytes] | None, position: int
) -> Outcome:
    """The answer to a submission.

    Args:
        submission: What is asked.
        number: Its number in the queue.
        known: Kind and fingerprint of what has this number already.
        position: How far the queue is.
    """
    request, queue_id = request_id(submission.queue_id, number), submission.queue_id
    if known is None and submission.is_ordered and number < position:
        return CommandPassedError(
            f"seq_id {number} of {queue_id} arrived too late: later requests have already run; "
            f"the next number is {position} or higher"
        )
    if known is not None and known != (submission.kind, submission.fingerprint):
        return CommandConflictError(
            f"seq_id {number} of {queue_id} is already used by another request",
            request_id=request,
        )
    return Appended(request_id=request, seq_id=number, is_new=known is None)
