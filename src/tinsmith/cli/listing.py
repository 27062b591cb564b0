"""Listings that come in pages: as much of one as was asked for, and what is said of the rest."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TypeVar

from tinsmith.cli.text import counted
from tinsmith.client.management.pages import Pages
from tinsmith.observe.progress import Progress

T = TypeVar("T")

MOST_PER_PAGE = 1000


def page_size(limit: int) -> int:
    """How much of a listing to ask for at a time."""
    return min(limit, MOST_PER_PAGE) or MOST_PER_PAGE


def taken(pages: Pages[T], arguments: argparse.Namespace, what: str) -> list[T]:
    """As many items as were asked for, with a bar where that takes several pages."""
    found: list[T] = []
    with Progress(f"Fetching {what}", None, format_=arguments.format) as bar:
        for item in itertools.islice(pages, min(arguments.limit, sys.maxsize) or None):
            found.append(item)
            if pages.total_count is not None:
                bar.total = min(pages.total_count, arguments.limit or pages.total_count)
            bar.add(1)
    return found


def title_of(shown: int, total: int | None, what: str) -> str:
    """How many there are, and how many of them are not shown."""
    if not shown:
        return f"No {what}s found"
    hidden = (total or shown) - shown
    more = f" ({hidden} more not shown; see --limit)" if hidden > 0 else ""
    return counted(shown, what) + more
