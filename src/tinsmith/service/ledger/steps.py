"""Operations of the ledger, written once and run by two databases; here those on commands.

An operation is a generator: it yields the name of a query with its parameters, and is sent the
rows. With a list of parameters the query is run for each, and gives no rows; with `Each`, it gives
the rows of each. It does no I/O, so SQLite runs it on a thread and PostgreSQL in a coroutine, with
the same meaning. To PostgreSQL every query is a round trip, for which all other writers wait: an
operation asks for many things at once, and not for one after the other.

One rule: an operation that refuses raises before its first change, because its neighbours in the
transaction are committed all the same.

What is to happen once the change is durable, it notes in `Effects`.

Steps of one transaction see everything that was changed before; transactions run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from tinsmith.errors import ResultGoneError, UnknownEntryError
from tinsmith.service.ledger.payloads import SMALL_BYTES, Ended, Kept
from tinsmith.service.ledger.records import (
    Command,
    CommandState,
    Completion,
    QueueId,
    RequestId,
    SessionId,
    Settlement,
    UsageKey,
    Use,
    identity,
    request_id,
)
from tinsmith.service.ledger.scheduler_lease import lease_lost
from tinsmith.service.ledger.wakeups import NEW_WORK, feed_topic, settled_topic

T = TypeVar("T")

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = Sequence[Any]


class Each(list[tuple[Value, ...]]):
    """Parameters of a query that reads, once for each; its answer has the rows of each, in order.

    The query gives no more than a few rows, in any order.
    """


Values: TypeAlias = tuple[Value, ...] | list[tuple[Value, ...]]
Query: TypeAlias = tuple[str, Values]
Steps: TypeAlias = Generator[Query, Sequence[Row], T]


class Effects:
    """What follows from an operation when it is durable."""

    __slots__ = ("appended", "claimed", "ended", "files", "topics", "writes")

    def __init__(self) -> None:
        self.topics: list[str] = []
        """Who is woken."""
        self.appended: list[tuple[RequestId, bytes]] = []
        """New commands with a small payload."""
        self.claimed: list[Command] = []
        """Commands that were claimed, as they are now."""
        self.ended: list[Ended] = []
        """Commands that were settled."""
        self.files: list[str] = []
        """Payload files that nothing names any more."""
        self.writes = 1
        """How many calls it stands for."""

    def drop(self, file: str | None) -> None:
        """Delete a payload file, if there is one."""
        if file is not None:
            self.files.append(file)


Operation: TypeAlias = Callable[[Effects], Steps[T]]


def run_steps(steps: Steps[T], ask: Callable[[str, Values], Sequence[Row]]) -> T:
    """Run an operation to its end, where queries are answered at once."""
    try:
        name, values = next(steps)
        while True:
            if isinstance(values, Each):
                name, values = steps.send([ask(name, one) for one in values])
            else:
                name, values = steps.send(ask(name, values))
    except StopIteration as end:
        result: T = end.value
        return result


def fenced(operation: Operation[T], epoch: int | None) -> Operation[T]:
    """The operation, refused before its first change unless the epoch is the newest."""
    if epoch is None:
        return operation

    def steps(effects: Effects) -> Steps[T]:
        [(newest,)] = yield "lease_epoch", ()
        if newest != epoch:
            raise lease_lost(epoch, newest)
        return (yield from operation(effects))

    return steps


def next_epoch(_: Effects, owner: str) -> Steps[int]:
    """Begin a new epoch, whoever held the last one."""
    [(epoch,)] = yield "next_epoch", (owner,)
    return int(epoch)


def nothing(_: Effects) -> Steps[None]:
    """Change nothing: with `fenced`, a look whether an epoch is the newest."""
    yield from ()


_HOUR_S = 3600


def claim(
    effects: Effects, claimer: str, limit: int, now: float, epoch: int | None
) -> Steps[list[Command]]:
    """`Ledger.claim`."""
    rows = yield "pending", (limit,)
    if not rows:
        return []
    taken = [command_of(row) for row in rows]
    # They are the oldest: no other pending command is up to the last of them.
    yield "claim_until", (claimer, now, taken[-1].ordinal, epoch)
    if len(taken) == limit:
        effects.topics.append(NEW_WORK)  # there may be more, for another claimer
    effects.claimed = [
        msgspec.structs.replace(
            command, state=CommandState.CLAIMED, claimed_by=claimer, claimed_at=now
        )
        for command in taken
    ]
    return effects.claimed


def claimed_after(_: Effects, claimer: str, after: float) -> Steps[list[Command]]:
    """What a claimer holds that was claimed later than `after`, oldest first."""
    rows = yield "claimed_after", (claimer, after)
    return [command_of(row) for row in rows]


def release_claims(effects: Effects, claimer: str) -> Steps[int]:
    """`Ledger.release_claims`."""
    rows = yield "release_claims", (claimer,)
    effects.topics.append(NEW_WORK)
    return len(rows)


def has_work(_: Effects, claimer: str) -> Steps[bool]:
    """Whether `Ledger.wait_for_commands` has something to return for."""
    pending = yield "has_pending", ()
    if pending:
        return True
    return bool((yield "cancelled", (claimer,)))


def take_cancelled(_: Effects, claimer: str) -> Steps[list[RequestId]]:
    """`Ledger.take_cancelled`."""
    rows = yield "cancelled", (claimer,)
    if rows:
        yield "cancels_told", (claimer,)
    return [request_id(QueueId(queue_id), number) for queue_id, number in rows]


def settle(
    effects: Effects,
    settlements: Sequence[tuple[Settlement, Kept]],
    now: float,
    *,
    is_cancel: bool = False,
    epoch: int | None = None,
) -> Steps[list[RequestId]]:
    """`Ledger.settle`, with the results already stored, and `Ledger.cancel`."""
    known: dict[tuple[QueueId, int], tuple[Settlement, Kept]] = {}
    for settlement, kept in settlements:
        identified = _try_identity(settlement.request_id)
        if identified is None or identified in known:  # of two ends the first stays
            effects.drop(kept.file)
        else:
            known[identified] = settlement, kept
    found = yield "to_settle", Each(known)
    ended = _Ended()
    for (queue_id, _), (settlement, kept), rows in zip(known, known.values(), found, strict=True):
        if not rows:
            effects.drop(kept.file)
            continue
        [(ordinal, clone, is_ordered, state, claimed_by, claimed_at, payload_file)] = rows
        is_failed = int(settlement.is_failed)
        ended.results.append(
            (
                *(ordinal, queue_id, clone, is_failed, now, kept.size_bytes, *_place(kept)),
                *(settlement.started_at, settlement.batch, epoch),
            ),
        )
        is_claim_cancelled = is_cancel and state == CommandState.CLAIMED
        ended.commands.append((ordinal, int(is_claim_cancelled)))
        if not is_ordered:  # an ordered one may have to be replayed
            ended.payloads.append((ordinal,))
            effects.drop(payload_file)
        ended.uses += settlement.uses
        effects.topics.append(settled_topic(settlement.request_id))
        effects.ended.append(
            Ended(
                request_id=settlement.request_id,
                claimed_by=claimed_by,
                claimed_at=claimed_at,
                settled_at=now,
                started_at=settlement.started_at,
                batch=settlement.batch,
                is_failed=settlement.is_failed,
                payload_bytes=kept.size_bytes,
                payload=settlement.payload if kept.size_bytes <= SMALL_BYTES else None,
            )
        )
        if clone is not None:
            effects.topics.append(feed_topic(queue_id, clone))
        if is_claim_cancelled:
            effects.topics.append(NEW_WORK)
    yield from ended.write(effects, now)
    return [one.request_id for one in effects.ended]


class _Ended:
    """What a settlement writes, table by table."""

    def __init__(self) -> None:
        self.results: list[tuple[Value, ...]] = []
        self.commands: list[tuple[Value, ...]] = []
        self.payloads: list[tuple[Value, ...]] = []
        self.uses: list[Use] = []

    def write(self, effects: Effects, now: float) -> Steps[None]:
        """Write it, if there is anything."""
        if self.results:
            yield "add_result", self.results
            yield "mark_settled", self.commands
        if self.payloads:
            yield "drop_payload", self.payloads
        yield from add_uses(effects, self.uses, now)


def _try_identity(wanted: str) -> tuple[QueueId, int] | None:
    try:
        return identity(wanted)
    except UnknownEntryError:
        return None


def _place(kept: Kept) -> tuple[str | None, bytes | None, bytes | None]:
    return kept.file, kept.digest, kept.content


def command(_: Effects, wanted: str) -> Steps[Command]:
    """`Ledger.command`."""
    rows = yield "command", identity(wanted)
    return command_of(_only(rows, wanted))


def commands_of(_: Effects, session_id: SessionId, after: int, limit: int) -> Steps[list[Command]]:
    """`Ledger.commands_of`."""
    rows = yield "commands_of_session", (session_id, after, limit)
    return [command_of(row) for row in rows]


def payload(_: Effects, wanted: str) -> Steps[Kept]:
    """Where a command's payload is."""
    rows = yield "payload", identity(wanted)
    if not rows:
        yield from command(_, wanted)  # which names what is unknown
        raise UnknownEntryError(f"the payload of {wanted} has been deleted")
    return Kept(*rows[0])


def result(_: Effects, wanted: str) -> Steps[tuple[Kept, bool] | None]:
    """Where a command's result is, and whether it is a failure."""
    rows = yield "result", identity(wanted)
    state, is_gone, is_failed, *place = _only(rows, wanted)
    if state != CommandState.SETTLED:
        return None
    if is_gone:
        raise ResultGoneError(f"the result of {wanted} has been deleted", request_id=wanted)
    return Kept(*place), bool(is_failed)


def acknowledge(effects: Effects, wanted: Sequence[str]) -> Steps[None]:
    """`Ledger.acknowledge`."""
    known = dict.fromkeys(filter(None, map(_try_identity, wanted)))
    found = yield "kept_result", Each(known)
    dropped = [(ordinal, file) for rows in found for ordinal, file in rows]
    for _, file in dropped:
        effects.drop(file)
    if dropped:
        yield "drop_result", [(ordinal,) for ordinal, _ in dropped]


def completions(
    _: Effects, queue_id: QueueId, clone: int, after: int, limit: int
) -> Steps[list[Completion]]:
    """`Ledger.completions`."""
    rows = yield "completions", (queue_id, clone, after, limit)
    return [
        Completion(
            cursor=cursor,
            request_id=request_id(queue_id, number),
            is_failed=bool(is_failed),
            result_bytes=size_bytes,
        )
        for cursor, number, is_failed, size_bytes in rows
    ]


def add_uses(_: Effects, uses: Sequence[Use], now: float) -> Steps[None]:
    """`Ledger.add_uses`."""
    hour = hour_of(now)
    amounts: dict[UsageKey, float] = {}
    for use in uses:
        amounts[use.key] = amounts.get(use.key, 0.0) + float(use.amount)
    if amounts:
        yield (
            "add_use",
            [
                (
                    *(key.tenant_id, hour, key.kind, key.session_id, key.queue_id),
                    *(key.base_model, amount),
                )
                for key, amount in amounts.items()
            ],
        )


def hour_of(moment: float) -> int:
    """When the hour began."""
    return int(moment) // _HOUR_S * _HOUR_S


def command_of(row: Row) -> Command:
    """A command from a row of the view `command_states`."""
    (ordinal, queue_id, seq_id, kind, tenant_id, session_id, clone, is_ordered, fingerprint) = row[
        :9
    ]
    (payload_bytes, created_at, state, claimed_by, claimed_at) = row[9:14]
    (settled_at, is_failed, result_bytes, is_gone, started_at, batch) = row[14:]
    return Command(
        ordinal=ordinal,
        queue_id=queue_id,
        seq_id=seq_id,
        kind=kind,
        tenant_id=tenant_id,
        session_id=session_id,
        clone=clone,
        is_ordered=bool(is_ordered),
        fingerprint=fingerprint,
        payload_bytes=payload_bytes,
        created_at=created_at,
        state=CommandState(state),
        claimed_by=claimed_by,
        claimed_at=claimed_at,
        settled_at=settled_at,
        is_failed=bool(is_failed),
        result_bytes=result_bytes or 0,
        is_gone=bool(is_gone),
        started_at=started_at,
        batch=batch,
    )


def _only(rows: Sequence[Row], wanted: str) -> Row:
    if not rows:
        raise UnknownEntryError(f"there is no request {wanted!r:.200}")
    return rows[0]
