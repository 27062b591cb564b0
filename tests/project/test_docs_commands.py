"""Every `tinsmith` command line on a page is valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tinsmith.cli.main import root_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = sorted(
    {
        line.split("#")[0].split(" < ")[0].strip()
        for page in PAGES
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in block.splitlines()
        if line.startswith("tinsmith ")
    }
)


@pytest.mark.parametrize("line", SHOWN)
def test_a_documented_command_line_is_valid(line: str) -> None:
    words = shlex.split(line)[1:]
    if "--help" in words:
        words.remove("--help")

    parsed = root_parser().parse_args(words)

    assert parsed.run is not None or not words


def test_there_are_documented_command_lines() -> None:
    assert len(SHOWN) > 10
