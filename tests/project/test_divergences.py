"""The page of differences from the official SDK points to tests that exist (S45)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "divergences.md").read_text(encoding="utf-8")


def test_s45_every_difference_names_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    defined = set(re.findall(r"def (test_\w+)", tests))

    named = set(re.findall(r"`(test_[a-z0-9_]+)`", PAGE))

    assert len(named) > 20
    # A module is named without its tests, and a group by how their names begin.
    modules = {path.stem for path in ROOT.glob("tests/**/*.py")}
    unknown = {
        name
        for name in named - defined - modules
        if not any(test.startswith(name) for test in defined)
    }
    assert unknown == set()


def test_s45_every_path_that_the_page_names_exists() -> None:
    paths = re.findall(r"`(tests/[\w/.]+)`", PAGE)

    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
