"""Results on stdout: a table for people, JSON for programs.

In JSON every field is there, null where it has no value, and times are ISO 8601. In tables nothing
is ever cut off: rows that are wider than the terminal are shown as one block each.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tinsmith.cli.text import printable, width_of

_GAP = "  "


class Table:
    """Rows under headings, with a line above that says what they are."""

    def __init__(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.title = title
        self.columns = list(columns)
        self.rows = [[printable(cell) for cell in row] for row in rows]


class Properties:
    """Named values of one thing."""

    def __init__(self, title: str, pairs: Iterable[tuple[str, str]]) -> None:
        self.title = title
        self.pairs = [(name, printable(value)) for name, value in pairs]


def show(format_: str, plain: Any, table: Table | Properties | str) -> None:
    """Print a result in the format that was asked for.

    Args:
        format_: `table` or `json`.
        plain: The result as dicts, lists and scalars.
        table: The same for people.
    """
    if format_ == "json":
        print(json.dumps(plain, indent=2, allow_nan=False))
    elif isinstance(table, str):
        print(table)
    else:
        print(rendered(table, _terminal_width()))


def plain_of(record: Any) -> Any:
    """A record of the API as dicts, lists and scalars; times in ISO 8601, null if missing."""
    return record.model_dump(mode="json")


def rendered(table: Table | Properties, width: int | None) -> str:
    """A table as text.

    Args:
        table: What to show.
        width: Of the terminal; None where there is none, and any width will do.
    """
    title = printable(table.title)
    if isinstance(table, Properties):
        return "\n".join([title, *_aligned_pairs(table.pairs)])
    if not table.rows:
        return title
    widths = [max(map(width_of, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    if width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        blocks = [_aligned_pairs(list(zip(table.columns, row, strict=True))) for row in table.rows]
        return "\n\n".join([title, *("\n".join(block) for block in blocks)])
    lines = [_line(row, widths) for row in (table.columns, *table.rows)]
    return "\n".join([title, "", *lines])


def _aligned_pairs(pairs: list[tuple[str, str]]) -> list[str]:
    width = max((width_of(name) for name, _ in pairs), default=0)
    return [_line(pair, [width, 0]) for pair in pairs]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell + " " * (width - width_of(cell)) for cell, width in zip(cells, widths, strict=True)
    )
    return _GAP.join(padded).rstrip()


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
