"""A session's commands as a trace that Perfetto and Chrome open.

Each model and each sampler is a track. A command is two slices on it: queued, then running until it
is settled. Commands that overlap in time, as samples do, are spread over several rows. Commands
that ran in one call of the engine carry the name of their batch, and batches have their own track.

Made from the ledger alone, in pieces, while it is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinsmith.service.ledger.base import PAGE, Ledger
from tinsmith.service.ledger.records import Command, SessionEntry, SessionId

BATCHES = "batches of the engine"
MOST_ROWS = 64
"""The most rows of one track; further overlapping commands share the last."""


async def trace_pieces(ledger: Ledger, session: SessionEntry) -> AsyncIterator[bytes]:
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
    """Assigns track and row numbers, and writes commands as events."""

    def __init__(self, session: SessionEntry) -> None:
        self._session = session
        self._tracks: dict[str, _Track] = {}
        self._batches: set[str] = set()
        self._rows = 0

    def about(self) -> dict[str, Any]:
        return {"session_id": self._session.id, "display_name": self._session.display_name}

    def process(self) -> dict[str, Any]:
        name = self._session.display_name or self._session.id
        return {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": name}}

    def events(self, command: Command, now: float) -> list[dict[str, Any]]:
        """The events of one command; times are microseconds since the session began."""
        created = self._us(command.created_at)
        begun_at = command.started_at or command.claimed_at
        begun = self._us(begun_at if begun_at is not None else now)
        if begun_at is None and command.settled_at is not None:
            begun = self._us(command.settled_at)  # cancelled before it was claimed
        ended = self._us(command.settled_at if command.settled_at is not None else now)
        begun, ended = max(created, begun), max(created, begun, ended)
        events: list[dict[str, Any]] = []
        label = command.queue_id.removeprefix(f"{self._session.id}:")
        number = self._place(events, label, created, ended)
        args = {
            "request_id": command.request_id,
            "seq_id": command.seq_id,
            "state": _state(command),
            "request_bytes": command.payload_bytes,
            "result_bytes": command.result_bytes,
            "batch": command.batch,
        }
        waiting = f"waiting: {command.kind}"
        events.append(_slice(number, waiting, "queue", created, begun, args))
        if begun_at is not None:
            events.append(_slice(number, command.kind, "run", begun, ended, args))
        if command.batch is not None and command.batch not in self._batches:
            self._batches.add(command.batch)
            row = self._place(events, BATCHES, begun, ended)
            told = {"batch": command.batch}
            events.append(_slice(row, command.kind, "batch", begun, ended, told))
        return events

    def _place(self, events: list[dict[str, Any]], label: str, start: int, stop: int) -> int:
        """A row of a track that is free at this time; a new one is named first."""
        track = self._tracks.setdefault(label, _Track())
        row, is_new = track.row(start, stop)
        if is_new:
            self._rows += 1
            track.numbers.append(self._rows)
            events.append(self._row_name(self._rows, label if row == 0 else f"{label} ({row + 1})"))
        return track.numbers[row]

    def _row_name(self, number: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}

    def _us(self, moment: float) -> int:
        return max(0, round((moment - self._session.created_at) * 1e6))


class _Track:
    """The rows of one queue of commands: the slices of a row do not overlap."""

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


def _slice(
    row: int, name: str, category: str, start: int, stop: int, args: dict[str, Any]
) -> dict[str, Any]:
    place = {"ph": "X", "pid": 1, "tid": row, "ts": start, "dur": stop - start}
    return {**place, "name": name, "cat": category, "args": args}


def _state(command: Command) -> str:
    if not command.is_settled:
        return command.state.name.lower()
    return "failed" if command.is_failed else "settled"
