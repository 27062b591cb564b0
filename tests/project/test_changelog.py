"""The changelog: one section per release, and fragments that towncrier can collect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tinsmith._version import __version__

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "changelog.d"
FRAGMENTS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


def test_the_current_version_has_a_section() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    released = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d{2}-\d{2}\)$", changelog, re.MULTILINE)

    assert released[0] == __version__


def test_towncrier_collects_every_fragment() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "99.0.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    section = " ".join(finished.stdout.split())
    missing = [
        path.name
        for path in FRAGMENTS
        if " ".join(path.read_text(encoding="utf-8").split()).removeprefix("- ") not in section
    ]
    assert missing == []
