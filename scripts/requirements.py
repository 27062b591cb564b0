"""Writes `docs/requirements.md`: the requirements S1 to S45, and the tests that prove each of them.

    python scripts/requirements.py [--write]

Without `--write` it reports whether the page is up to date. A test belongs to a requirement if its
name says so (`test_s17_…`), or if its module does: in its name, or in the first sentence of its
docstring, as `(S17)` or `S24–S26: …`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "requirements.md"
REQUIREMENTS = ROOT / "scripts" / "requirements.toml"

HEAD = """\
<!-- Written by scripts/requirements.py from scripts/requirements.toml and tests/. -->

# Requirements

For contributors: what the client and the service must do, and the tests that prove it. The numbers
S1 to S45 appear in test names, so `grep -rn s17_ tests` finds the tests of S17.

The requirements come from design reviews of clients for the Tinker API. Times hold against a server
on the same machine. After adding or renaming a test, run `scripts/check --fix`.
"""


class Test(NamedTuple):
    """A test that proves a requirement, or a whole module of them (`name` is empty)."""

    file: str
    name: str


def _numbers(text: str) -> set[int]:
    """The requirements that a text names; `S14-S18` is all five."""
    found: set[int] = set()
    for first, last in re.findall(r"\bS(\d+)(?:\s*[-–]\s*S(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _of_module(path: Path, tree: ast.Module) -> set[int]:
    first_line = (ast.get_docstring(tree) or "").partition("\n")[0]
    # `S3` alone may be the storage service.
    named = re.findall(r"\((S\d[^)]*)\)", first_line) + re.findall(r"^(S\d.*?):", first_line)
    in_name = re.findall(r"test_s(\d+)_", path.stem)
    return {int(number) for number in in_name} | _numbers(" ".join(named))


def _tests_in(path: Path) -> Iterator[tuple[int, Test]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    file = path.relative_to(ROOT).as_posix()
    by_name: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            numbers = re.match(r"test((?:_s\d+)+)_", node.name)
            for number in re.findall(r"\d+", numbers[1]) if numbers else []:
                by_name.add(int(number))
                yield int(number), Test(file, node.name)
    for number in _of_module(path, tree) - by_name:
        yield number, Test(file, "")


def proofs() -> dict[int, list[Test]]:
    """The tests of each requirement, sorted by file and name."""
    found: dict[int, list[Test]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, test in _tests_in(path):
            found.setdefault(number, []).append(test)
    return {number: sorted(tests) for number, tests in found.items()}


def requirements() -> dict[str, dict[int, str]]:
    """The text of each requirement by its number, by the title of its group."""
    groups = tomllib.loads(REQUIREMENTS.read_text(encoding="utf-8"))
    return {
        title: {int(name.removeprefix("S")): text.strip() for name, text in group.items()}
        for title, group in groups.items()
    }


def page() -> str:
    """The page as it should be."""
    tests, lines = proofs(), [HEAD]
    for title, group in requirements().items():
        lines.append(f"\n## {title}\n")
        for number, text in group.items():
            lines.append(f"\n### S{number}\n\n{text}\n\n")
            file = ""
            for test in tests.get(number, []):
                if test.file != file:
                    file = test.file
                    lines.append(f"- `{file}`{'' if test.name else ', all tests'}\n")
                if test.name:
                    lines.append(f"    - `{test.name}`\n")
    return "".join(lines)


def main() -> int:
    """Compare or write; 1 if the page is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite docs/requirements.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/requirements.md is out of date; run: scripts/check --fix")
    return 1


if __name__ == "__main__":
    sys.exit(main())
