"""How the ledger's operations are written down once and run by two databases.

An operation is a generator: it yields the name of a query with its parameters, and is sent the
rows. With a list of parameters the query is run for each, and gives no rows. It does no I/O, so
SQLite runs it on a thread and PostgreSQL in a coroutine, with the same meaning.

One rule: an operation that refuses raises before its first change, because its neighbours in the
transaction are committed all the same.

What is to happen once the change is durable, it notes in `Effects`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from tinsmith.ledger.records import Command, RequestId
from tinsmith.ledger.remembered import Ended

T = TypeVar("T")

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = Sequence[Any]
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
            name, values = steps.send(ask(name, values))
    except StopIteration as end:
        result: T = end.value
        return result
