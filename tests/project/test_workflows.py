"""The GitHub workflows run scripts that exist, on the Python versions that the package claims."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_ci_runs_on_every_python_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    claimed = [one.removeprefix(prefix) for one in project["classifiers"] if one.startswith(prefix)]

    [versions] = re.findall(
        r"^ +python: \[(.+)\]$",
        (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )

    assert versions == ", ".join(f'"3.{minor}"' for minor in claimed)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_executables_of_the_repository(workflow: Path) -> None:
    commands = re.findall(r"^ +run: (\S+)", workflow.read_text(encoding="utf-8"), re.MULTILINE)

    assert commands
    assert [one for one in commands if not os.access(ROOT / one, os.X_OK)] == []
