"""Each model's line of commands, and which of them may run next.

Commands of one model run in the order in which their client numbered them, whatever the order in
which they came; commands of different models are free of each other. While a command of a line
runs, nothing else of that line does. `batching.py` takes the heads of the lines from here.

A number that is missing holds its line up. Whoever waits long enough for it, or learns that it was
refused, calls `skip_to`; the ledger has to know it before.

Time is a parameter. Knows nothing of engines, HTTP or the database.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from tinsmith.ledger.records import Command, LineId

PASSES = frozenset({"forward", "forward_backward"})
STEPS = frozenset({"optim_step"})
TRAINING = PASSES | STEPS
"""Kinds that the engine runs in batches."""


class Gap(msgspec.Struct, frozen=True):
    """A line whose next number has not come."""

    line: LineId
    missing: int
    """The first number that is missing."""
    found: int
    """The lowest number that is there."""
    since: float
    """When the line began to wait."""


class Order:
    """All lines."""

    def __init__(self) -> None:
        self._lines: dict[LineId, _Line] = {}
        self._ready: dict[LineId, None] = {}  # in the order in which they became so
        self._gaps: set[LineId] = set()
        self._count = 0

    def __len__(self) -> int:
        """How many commands wait."""
        return self._count

    def knows(self, line: LineId) -> bool:
        """Whether `begin` was called for it."""
        return line in self._lines

    def begin(self, line: LineId, position: int, done: Iterable[int] = ()) -> None:
        """Open a line at its next number; `done` are later numbers that ended already."""
        if line not in self._lines:
            self._lines[line] = made = _Line(position)
            made.done.update(number for number in done if number >= position)
            made.advance()

    def add(self, command: Command, now: float) -> bool:
        """Put a command into its line, which is open; False if its number is done or there."""
        line = self._lines[command.line]
        number = command.seq_id
        if number < line.next or number in line.waiting or number in line.done:
            return False
        line.waiting[number] = command
        heapq.heappush(line.numbers, number)
        self._count += 1
        self._look(command.line, now)
        return True

    def ready(self) -> list[LineId]:
        """The lines whose next command is there and may run, longest ready first."""
        return list(self._ready)

    def head(self, line: LineId) -> Command:
        """The next command of a line that is ready."""
        one = self._lines[line]
        return one.waiting[one.next]

    def run_of(self, line: LineId, kinds: frozenset[str]) -> list[Command]:
        """The next commands of a ready line, for as long as their kinds are among these."""
        one, found = self._lines[line], list[Command]()
        while (command := one.waiting.get(one.next + len(found))) and command.kind in kinds:
            found.append(command)
        return found

    def start(self, line: LineId) -> None:
        """Say that something of a line runs now, so that nothing else does."""
        self._lines[line].is_busy = True
        self._ready.pop(line, None)

    def finish(self, line: LineId, commands: Iterable[Command], now: float) -> None:
        """Say that what ran of a line has ended, and that these commands are done."""
        one = self._lines.get(line)
        if one is None:
            return
        for command in commands:
            self._count -= one.take(command.seq_id)
        one.is_busy = False
        one.advance()
        self._look(line, now)

    def drop(self, line: LineId, number: int, now: float) -> bool:
        """Take out a command that ended before its turn; False if it is not there or runs."""
        one = self._lines.get(line)
        if one is None or number not in one.waiting or (one.is_busy and number == one.next):
            return False
        self._count -= one.take(number)
        one.advance()
        self._look(line, now)
        return True

    def gaps(self) -> list[Gap]:
        """The lines that wait for a number that has not come."""
        found = []
        for line in self._gaps:
            one = self._lines[line]
            lowest = one.lowest()
            if lowest is not None:
                found.append(Gap(line, one.next, lowest, one.gap_since))
        return found

    def skip_to(self, line: LineId, position: int, now: float) -> None:
        """Go on with a number; those below it that have not come are done."""
        one = self._lines.get(line)
        if one is not None and not one.is_busy and position > one.next:
            one.next = position
            one.advance()
            self._look(line, now)

    def position(self, line: LineId) -> int:
        """The number that a line is at: all below are done."""
        return self._lines[line].next

    def is_busy(self, line: LineId) -> bool:
        """Whether something of a line runs."""
        return line in self._lines and self._lines[line].is_busy

    def waiting(self, line: LineId) -> list[Command]:
        """What waits in a line, by number."""
        one = self._lines.get(line)
        return [] if one is None else [one.waiting[number] for number in sorted(one.waiting)]

    def forget(self, line: LineId) -> None:
        """Close a line; its waiting commands are forgotten."""
        one = self._lines.pop(line, None)
        self._ready.pop(line, None)
        self._gaps.discard(line)
        if one is not None:
            self._count -= len(one.waiting)

    def lines(self) -> int:
        """How many lines are open."""
        return len(self._lines)

    def _look(self, line: LineId, now: float) -> None:
        """Note whether a line is ready or has a gap."""
        one = self._lines[line]
        is_there = one.next in one.waiting
        if is_there and not one.is_busy:
            self._ready.setdefault(line)
        else:
            self._ready.pop(line, None)
        if is_there or one.is_busy or not one.waiting:
            self._gaps.discard(line)
        elif line not in self._gaps:
            self._gaps.add(line)
            one.gap_since = now


class _Line:
    """One line."""

    __slots__ = ("done", "gap_since", "is_busy", "next", "numbers", "waiting")

    def __init__(self, position: int) -> None:
        self.next = position
        self.waiting: dict[int, Command] = {}
        self.numbers: list[int] = []  # a heap of the waiting ones, and of some that went
        self.done: set[int] = set()
        self.is_busy = False
        self.gap_since = 0.0

    def take(self, number: int) -> int:
        """Note that a number is done; says how many commands that takes out."""
        self.done.add(number)
        return 1 if self.waiting.pop(number, None) is not None else 0

    def advance(self) -> None:
        """Go past what is done."""
        while self.next in self.done:
            self.done.discard(self.next)
            self.next += 1
        self.done = {number for number in self.done if number > self.next} if self.done else set()

    def lowest(self) -> int | None:
        """The lowest number that waits."""
        while self.numbers and self.numbers[0] not in self.waiting:
            heapq.heappop(self.numbers)
        return self.numbers[0] if self.numbers else None
