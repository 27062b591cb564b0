"""A session's trace: what is told of each command, and that slices of a row never overlap."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.ledgers import SetClock, a_session, ended, sampling, training
from tinsmith.service.api.traces import MOST_ROWS, _Trace, trace_pieces
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    Command,
    CommandState,
    QueueId,
    SessionEntry,
    SessionId,
    TenantId,
)

SESSION = SessionEntry(
    id="s", tenant_id=TenantId("a"), created_at=0.0, project_id="p", heartbeat_at=0.0
)


def a_command(start: float, wait_s: float, run_s: float, number: int) -> Command:
    return Command(
        ordinal=number,
        queue_id=QueueId("s:sample:0"),
        seq_id=number,
        kind="asample",
        tenant_id=TenantId("a"),
        session_id=SessionId("s"),
        clone=None,
        is_ordered=False,
        fingerprint=b"",
        payload_bytes=1,
        created_at=start,
        state=CommandState.SETTLED,
        claimed_at=start + wait_s,
        settled_at=start + wait_s + run_s,
    )


def test_a_batch_appears_once_and_each_of_its_commands_names_it() -> None:
    trace = _Trace(SESSION)
    commands = [
        msgspec.structs.replace(a_command(0.0, 1.0, 2.0, n), batch="b", started_at=2.0)
        for n in (1, 2)
    ]

    events = [event for command in commands for event in trace.events(command, now=9.0)]

    slices = [event for event in events if event["ph"] == "X"]
    [batch] = [event for event in slices if event["cat"] == "batch"]
    runs = [event for event in slices if event["cat"] == "run"]
    assert [run["args"]["batch"] for run in runs] == ["b", "b"]
    assert (batch["ts"], batch["dur"]) == (runs[0]["ts"], runs[0]["dur"]) == (2_000_000, 1_000_000)


def test_a_trace_is_json_with_every_command() -> None:
    async def make() -> dict[str, Any]:
        clock = SetClock()
        ledger = MemoryLedger(clock=clock.steady())
        session = a_session()
        for number in range(1, 4):
            await ledger.append(training(number))
        await ledger.append(sampling(0))
        await ledger.claim("c", limit=2)
        clock.wait(2)
        first = await ledger.commands_of(SessionId(session.id), limit=1)
        await ledger.settle([ended(first[0].request_id)])
        pieces = [piece async for piece in trace_pieces(ledger, session)]
        made: dict[str, Any] = msgspec.json.decode(b"".join(pieces))
        return made

    trace = asyncio.run(make())

    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    states = [event["args"]["state"] for event in slices if event["cat"] == "queue"]
    assert sorted(states) == ["claimed", "pending", "pending", "settled"]
    assert len([event for event in slices if event["cat"] == "run"]) == 2
    assert all(event["dur"] >= 0 for event in slices)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 5), st.floats(0, 20)), min_size=1, max_size=40
    )
)
def test_overlapping_commands_get_separate_rows(times: list[tuple[float, float, float]]) -> None:
    trace = _Trace(SESSION)
    rows: dict[int, list[tuple[int, int]]] = {}

    for number, (start, wait_s, run_s) in enumerate(sorted(times)):
        for event in trace.events(a_command(start, wait_s, run_s, number), 1000.0):
            if event["ph"] == "X":
                rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))

    assert len(rows) <= MOST_ROWS
    for slices in rows.values():
        ordered = sorted(slices)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ordered))
