"""Pages are easy to read: lines of prose have at most 100 columns, and each says who it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
MOST_COLUMNS = 100
# The front doors speak to everybody; the changelog has a format of its own.
OPEN_TO_ALL = {"README.md", "CHANGELOG.md"}


def prose(page: Path) -> list[str]:
    """The lines of a page that are neither code, nor tables, nor one unbreakable word."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return [
        line
        for line in text.splitlines()
        if not line.lstrip().startswith("|") and len(line.lstrip(" -:").split()) > 1
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps_at_100_columns(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in OPEN_TO_ALL],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_starts_with_who_it_is_for(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, first = text.strip().split("\n\n")[:2]

    assert title.startswith("# ")
    assert re.match(r"(For|This page is for) ", first), first
