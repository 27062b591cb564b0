"""A session's commands as a trace that Perfetto and Chrome open.

Each model and each sampler is a track. A command is two slices on it: how long it waited until it
was claimed, and how long it ran until it was settled. Commands that overlap in time, as samples do,
are spread over as many rows as it takes.

Made from the ledger alone, in pieces, while it is being sent.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinsmith.ledger.base import PAGE, Ledger
from tinsmith.ledger.records import Command, Session, SessionId

MOST_ROWS = 64
"""Of one track; what overlaps more than that shares the last."""


async def trace_pieces(ledger: Ledger, session: Session) -> AsyncIterator[bytes]:
    """The trace as JSON, in the Trace Event Format."""
    trace = _Trace(session)
    yield b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(trace.about())
    yield b',"traceEvents":['
    yield msgspec.json.encode(trace.process())
    after, now = 0, ledger.now()
    while True:
        page = await ledger.commands_of(SessionId(session.id), after=after, limit=PAGE)
        events = [event for command in page for event in trace.events(command, now)]
        if events:
            yield b"," + b",".join(map(msgspec.json.encode, events))
        if len(page) < PAGE:
            break
        after = page[-1].ordinal
    yield b"]}"


class _Trace:
    """Gives out track and row numbers, and writes commands as events."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tracks: dict[str, _Track] = {}
        self._rows = 0

    def about(self) -> dict[str, Any]:
        return {"session_id": self._session.id, "display_name": self._session.display_name}

    def process(self) -> dict[str, Any]:
        name = self._session.display_name or self._session.id
        return {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": name}}

    def events(self, command: Command, now: float) -> list[dict[str, Any]]:
        """What one command adds; times are microseconds since the session began."""
        track = self._tracks.setdefault(command.line, _Track())
        created = self._us(command.created_at)
        claimed = self._us(command.claimed_at if command.claimed_at is not None else now)
        if command.claimed_at is None and command.settled_at is not None:
            claimed = self._us(command.settled_at)  # cancelled before anybody took it
        ended = self._us(command.settled_at if command.settled_at is not None else now)
        claimed, ended = max(created, claimed), max(created, claimed, ended)
        row, is_new = track.row(created, ended)
        events = []
        if is_new:
            self._rows += 1
            track.numbers.append(self._rows)
            label = command.line.removeprefix(f"{self._session.id}:")
            events.append(self._row_name(self._rows, label if row == 0 else f"{label} ({row + 1})"))
        number = track.numbers[row]
        args = {
            "request_id": command.request_id,
            "seq_id": command.seq_id,
            "state": _state(command),
            "request_bytes": command.payload_bytes,
            "result_bytes": command.result_bytes,
        }
        slices = [("waiting", "queue", created, claimed), (command.kind, "run", claimed, ended)]
        for name, category, start, stop in slices:
            if category == "run" and command.claimed_at is None:
                continue
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number,
                    "name": name if category == "run" else f"{name}: {command.kind}",
                    "cat": category,
                    "ts": start,
                    "dur": stop - start,
                    "args": args,
                }
            )
        return events

    def _row_name(self, number: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}

    def _us(self, moment: float) -> int:
        return max(0, round((moment - self._session.created_at) * 1e6))


class _Track:
    """The rows of one line of commands: each holds slices that do not overlap."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._ends: list[tuple[int, int]] = []

    def row(self, start: int, stop: int) -> tuple[int, bool]:
        """A row that is free at this time, and whether it is a new one."""
        if self._ends and (self._ends[0][0] <= start or len(self._ends) >= MOST_ROWS):
            _, row = heapq.heapreplace(self._ends, (max(stop, self._ends[0][0]), self._ends[0][1]))
            return row, False
        row = len(self._ends)
        heapq.heappush(self._ends, (stop, row))
        return row, True


def _state(command: Command) -> str:
    if not command.is_settled:
        return command.state.name.lower()
    return "failed" if command.is_failed else "settled"
