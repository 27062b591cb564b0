"""The two roads on the architecture page are those that real calls take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TIME_LIMIT_S = 300
HEADINGS = {"forward_backward": "### A training call", "sample": "### A sample"}

Step = tuple[str, str]


def printed_tables(call: str) -> list[list[Step]]:
    """The tables below a call's heading: files with functions, in the order of the page."""
    section = re.split(r"^#{2,3} ", PAGE.partition(HEADINGS[call])[2], flags=re.MULTILINE)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", table, re.MULTILINE) for table in tables]


@pytest.fixture(scope="module")
def traced() -> dict[str, list[Step]]:
    """What each call entered, in order."""
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_road.py", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    roads = json.loads(finished.stdout.splitlines()[-1])
    return {call: [(file, function) for file, function in road] for call, road in roads.items()}


def missed_step(table: list[Step], road: list[Step]) -> Step | None:
    """The first step that does not come after the one before it; other calls may lie between."""
    entered = iter(road)
    return next((step for step in table if step not in entered), None)


@pytest.mark.parametrize("call", HEADINGS)
def test_the_steps_on_the_page_are_taken_in_that_order(
    call: str, traced: dict[str, list[Step]]
) -> None:
    tables = printed_tables(call)

    assert [len(table) > 3 for table in tables] == [True, True]
    for table in tables:
        assert missed_step(table, traced[call]) is None


def test_a_step_that_is_missing_or_too_early_is_found() -> None:
    road = [("a", "f"), ("b", "g"), ("c", "h")]

    assert missed_step([("a", "f"), ("c", "h")], road) is None
    assert missed_step([("b", "g"), ("a", "f")], road) == ("a", "f")
    assert missed_step([("a", "x")], road) == ("a", "x")
