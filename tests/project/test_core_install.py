"""What `pip install tinsmith` puts on a machine, with everything that brings in."""

from __future__ import annotations

import re
import sys
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# aiohttp brings the second line; backports.zstd is in the standard library from Python 3.14 on.
CORE_PACKAGES = {"tinsmith", "msgspec", "aiohappyeyeballs", "aiohttp", "httptools"}
CORE_PACKAGES |= {"aiosignal", "attrs", "frozenlist", "idna", "multidict"}
CORE_PACKAGES |= {"propcache", "typing-extensions", "yarl"}
CORE_PACKAGES |= {"backports-zstd"} if sys.version_info < (3, 14) else set()

WHAT_TO_DO = (
    "the core install has changed. Every user pays for each of its packages, so prefer an extra. "
    "If it is meant: change CORE_PACKAGES here, give the reason in docs/dependencies.md, and add "
    "the pins to constraints.txt"
)


def canonical(name: str) -> str:
    """The one spelling of a package's name, whatever its metadata says."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_with(package: str) -> set[str]:
    """The package and all that it requires here, through every level, without extras."""
    found: set[str] = set()
    waiting = [Requirement(package)]
    while waiting:
        requirement = waiting.pop()
        if canonical(requirement.name) in found:
            continue
        found.add(canonical(requirement.name))
        for line in metadata.requires(requirement.name) or []:
            wanted = Requirement(line)
            extras = requirement.extras or {""}
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(wanted)
    return found


def test_core_install_holds_the_pinned_packages_and_no_others() -> None:
    assert installed_with("tinsmith") == CORE_PACKAGES, WHAT_TO_DO


def test_typed_marker_is_shipped() -> None:
    """Without `py.typed` a type checker ignores every annotation of an installed package."""
    assert (resources.files("tinsmith") / "py.typed").is_file()


def test_everything_installed_here_is_pinned() -> None:
    """What CI installs is in constraints.txt, so that a release elsewhere cannot break a build."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(pin.split("==")[0]) for pin in pins if "==" in pin and pin[0] != "#"}
    not_pinned = installed_with("tinsmith[dev]") - pinned - {"tinsmith"}

    assert not_pinned == set(), "add these to constraints.txt; see the note at its top"
