"""Results on stdout: tables for people, JSON for programs.

JSON has every field, null if it has no value, and ISO 8601 times. Tables are never truncated: if
they are wider than the terminal, each row is printed as a block of lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.cli.text import counted, printable, width_of
from tinsmith.observe.terminal import Progress

if TYPE_CHECKING:
    from tinsmith.client.management.base import Pages

T = TypeVar("T")

MAX_PAGE_SIZE = 1000
_GAP = "  "


class Table:
    """Rows with column headings and a title."""

    def __init__(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.title = title
        self.columns = list(columns)
        self.rows = [[printable(cell) for cell in row] for row in rows]


class Properties:
    """Named values with a title."""

    def __init__(self, title: str, pairs: Iterable[tuple[str, str]]) -> None:
        self.title = title
        self.pairs = [(name, printable(value)) for name, value in pairs]


def show(format_: str, plain: Any, table: Table | Properties | str) -> None:
    """Print a result in the requested format.

    Args:
        format_: `table` or `json`.
        plain: The result as JSON-compatible values.
        table: The result for people.
    """
    if format_ == "json":
        print(json.dumps(plain, indent=2, allow_nan=False))
    elif isinstance(table, str):
        print(table)
    else:
        print(rendered(table, _terminal_width()))


def plain_of(record: Any) -> Any:
    """A record of the API as JSON-compatible values."""
    return record.model_dump(mode="json")


def rendered(table: Table | Properties, width: int | None) -> str:
    """A table as text.

    Args:
        table: The table.
        width: The width of the terminal; None for no limit.
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


def page_size(limit: int) -> int:
    """How many items to request per page."""
    return min(limit, MAX_PAGE_SIZE) or MAX_PAGE_SIZE


def fetch_items(pages: Pages[T], arguments: argparse.Namespace, what: str) -> list[T]:
    """The first `--limit` items of a listing, with a progress bar."""
    found: list[T] = []
    with Progress(f"Fetching {what}", None, format_=arguments.format) as bar:
        for item in itertools.islice(pages, min(arguments.limit, sys.maxsize) or None):
            found.append(item)
            if pages.total_count is not None:
                bar.total = min(pages.total_count, arguments.limit or pages.total_count)
            bar.add(1)
    return found


def listing_title(shown: int, total: int | None, what: str) -> str:
    """How many items are shown, and how many more there are."""
    if not shown:
        return f"No {what}s found"
    hidden = (total or shown) - shown
    more = f" ({hidden} more; use --limit to show them)" if hidden > 0 else ""
    return counted(shown, what) + more
