"""Looks for what is new in the newest release of the official SDK.

    python -m tests.compatibility.newest [--release RELEASE]

Installs the newest `tinker` of the package index into an environment of its own, below `.cache`,
and compares its public surface with that of the newest release that we support, which is in the
development environment. `scripts/compatibility --newest` runs this.

Exit status: 0 if nothing is new, 1 if something is, 2 if no release could be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from tests.compatibility.sdks import ROOT

FOLDER = ROOT / ".cache" / "newest-tinker"
DUMP = Path(__file__).with_name("dump_surface.py")
INSTALL_TIMEOUT_S = 900.0
DUMP_TIMEOUT_S = 120.0


class Sdk(NamedTuple):
    """A release and its public names, each with its parameters."""

    release: str
    surface: dict[str, list[str]]


class Changes(NamedTuple):
    """In what one release differs from another."""

    added: list[str]
    removed: list[str]

    def report(self) -> str:
        """A line for each change."""
        marked = [("new", line) for line in self.added] + [("gone", line) for line in self.removed]
        return "".join(f"{mark:5}{line}\n" for mark, line in marked)


class InstallError(RuntimeError):
    """pip could not install the release, or it cannot be imported."""


def changes(known: dict[str, list[str]], found: dict[str, list[str]]) -> Changes:
    """What `found` has and `known` lacks, and the reverse."""
    return Changes(_only_in(found, known), _only_in(known, found))


def _only_in(one: dict[str, list[str]], other: dict[str, list[str]]) -> list[str]:
    lines = []
    for name, parameters in sorted(one.items()):
        owner = name.rpartition(".")[0]
        if name in other:
            lines += [f"{name}({each}=)" for each in parameters if each not in other[name]]
        elif owner in other or owner not in one:  # else a member of a class that is listed itself
            lines.append(name)
    return lines


def dumped(python: str, folder: Path | None = None) -> Sdk:
    """The surface of the `tinker` that an interpreter imports, from `folder` if it is given.

    Raises:
        InstallError: It cannot be imported.
    """
    done = subprocess.run(
        [python, "-W", "ignore", str(DUMP)],
        capture_output=True,
        text=True,
        timeout=DUMP_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder or "")},
    )
    if done.returncode:
        raise InstallError(f"tinker cannot be imported:\n{done.stderr[-2000:]}")
    return Sdk(**json.loads(done.stdout))


def installed(requirement: str, folder: Path = FOLDER) -> str:
    """Install a release into an environment of its own; its interpreter.

    Raises:
        InstallError: pip could not install it.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise InstallError(f"pip could not install {requirement}:\n{done.stderr[-2000:]}")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/compatibility --newest", description="Report what a new release adds."
    )
    parser.add_argument("--release", help="look at this release instead of the newest")
    release = parser.parse_args().release
    try:
        newest = dumped(installed(f"tinker=={release}" if release else "tinker"))
        supported = dumped(sys.executable)
    except (InstallError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = changes(supported.surface, newest.surface)
    print(found.report(), end="")
    print(
        f"tinker {newest.release} has {len(found.added)} names and parameters that "
        f"{supported.release} lacks, and lacks {len(found.removed)} that it has"
    )
    return 1 if found.added else 0


if __name__ == "__main__":
    sys.exit(main())
