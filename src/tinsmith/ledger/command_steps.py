"""What happens to commands once they are appended, as steps for any database (`steps.py`).

Steps of one transaction see all that was changed before; transactions run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tinsmith.errors import ResultGoneError, UnknownEntryError
from tinsmith.ledger.payloads import Kept
from tinsmith.ledger.records import (
    Command,
    CommandState,
    Completion,
    LineId,
    RequestId,
    SessionId,
    Settlement,
    TenantId,
    Use,
    identity,
    request_id,
)
from tinsmith.ledger.remembered import SMALL_BYTES, Ended
from tinsmith.ledger.steps import Effects, Row, Steps
from tinsmith.ledger.wakeups import NEW_WORK, feed_topic, settled_topic

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


def claimed_after(_: Effects, claimer: str, after: int, limit: int) -> Steps[list[Command]]:
    """What a claimer holds with an ordinal above `after`, oldest first."""
    rows = yield "claimed_after", (claimer, after, limit)
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
    return [request_id(LineId(line), number) for line, number in rows]


def settle(
    effects: Effects,
    settlements: Sequence[tuple[Settlement, Kept]],
    now: float,
    *,
    is_cancel: bool = False,
    epoch: int | None = None,
) -> Steps[list[RequestId]]:
    """`Ledger.settle`, with the results already kept, and `Ledger.cancel`."""
    ended = []
    for settlement, kept in settlements:
        known = _try_identity(settlement.request_id)
        rows = (yield "to_settle", known) if known else ()
        if known is None or not rows:
            effects.drop(kept.file)
            continue
        line, _ = known
        [(ordinal, clone, is_ordered, state, claimed_by, claimed_at, payload_file)] = rows
        is_failed = int(settlement.is_failed)
        yield (
            "add_result",
            (
                *(ordinal, line, clone, is_failed, now, kept.size_bytes, *_place(kept)),
                *(settlement.started_at, settlement.batch, epoch),
            ),
        )
        is_claim_cancelled = is_cancel and state == CommandState.CLAIMED
        yield "mark_settled", (ordinal, int(is_claim_cancelled))
        if not is_ordered:  # an ordered one may have to be replayed
            yield "drop_payload", (ordinal,)
            effects.drop(payload_file)
        yield from add_uses(effects, settlement.uses, now)
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
            effects.topics.append(feed_topic(line, clone))
        if is_claim_cancelled:
            effects.topics.append(NEW_WORK)
        ended.append(settlement.request_id)
    return ended


def _try_identity(wanted: str) -> tuple[LineId, int] | None:
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
        raise UnknownEntryError(f"the payload of {wanted} is no longer kept")
    return Kept(*rows[0])


def result(_: Effects, wanted: str) -> Steps[tuple[Kept, bool] | None]:
    """Where a command's result is, and whether it is a failure."""
    rows = yield "result", identity(wanted)
    state, is_gone, is_failed, *place = _only(rows, wanted)
    if state != CommandState.SETTLED:
        return None
    if is_gone:
        raise ResultGoneError(f"the result of {wanted} is no longer kept", request_id=wanted)
    return Kept(*place), bool(is_failed)


def acknowledge(effects: Effects, wanted: Sequence[str]) -> Steps[None]:
    """`Ledger.acknowledge`."""
    for one in wanted:
        known = _try_identity(one)
        for ordinal, file in (yield "kept_result", known) if known else ():
            yield "drop_result", (ordinal,)
            effects.drop(file)


def completions(
    _: Effects, line: LineId, clone: int, after: int, limit: int
) -> Steps[list[Completion]]:
    """`Ledger.completions`."""
    rows = yield "completions", (line, clone, after, limit)
    return [
        Completion(
            cursor=cursor,
            request_id=request_id(line, number),
            is_failed=bool(is_failed),
            result_bytes=size_bytes,
        )
        for cursor, number, is_failed, size_bytes in rows
    ]


def add_uses(_: Effects, uses: Sequence[Use], now: float) -> Steps[None]:
    """`Ledger.add_uses`."""
    hour = hour_of(now)
    for use in uses:
        key = use.key
        values = (TenantId(key.tenant_id), hour, key.kind, key.session_id, key.line, key.base_model)
        yield "add_use", (*values, float(use.amount))


def hour_of(moment: float) -> int:
    """When the hour began."""
    return int(moment) // _HOUR_S * _HOUR_S


def command_of(row: Row) -> Command:
    """A command from a row of the view `command_states`."""
    (ordinal, line, seq_id, kind, tenant_id, session_id, clone, is_ordered, fingerprint) = row[:9]
    (payload_bytes, created_at, state, claimed_by, claimed_at) = row[9:14]
    (settled_at, is_failed, result_bytes, is_gone, started_at, batch) = row[14:]
    return Command(
        ordinal=ordinal,
        line=line,
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
