"""What `pip install tinsmith` installs, with all dependencies."""

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
    """The normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_with(package: str) -> set[str]:
    """The names of the package and of everything that it requires here."""
    return {canonical(requirement.name) for requirement in asked_for(package)}


def asked_for(package: str) -> list[Requirement]:
    """The package and all its direct and indirect requirements on this platform."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting, found = [Requirement(package)], []
    while waiting:
        requirement = waiting.pop()
        found.append(requirement)
        key = canonical(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        for line in metadata.requires(requirement.name) or []:
            wanted = Requirement(line)
            extras = {"", *requirement.extras}
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(wanted)
    return found


def pins() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(one.name): str(one.specifier).removeprefix("==") for one in wanted}


def test_the_core_install_has_exactly_the_listed_packages() -> None:
    assert installed_with("tinsmith") == CORE_PACKAGES, WHAT_TO_DO


def test_typed_marker_is_shipped() -> None:
    """Without `py.typed` a type checker ignores every annotation of an installed package."""
    assert (resources.files("tinsmith") / "py.typed").is_file()


def test_everything_installed_here_is_pinned() -> None:
    """CI installs pinned versions only, so that a new release of a dependency cannot break it."""
    not_pinned = installed_with("tinsmith[dev]") - pins().keys() - {"tinsmith"}

    assert not_pinned == set(), "add these to constraints.txt; see the note at its top"


def test_every_extra_can_be_installed_with_the_pins() -> None:
    """A pin that contradicts a requirement makes an extra impossible to install."""
    extras = metadata.metadata("tinsmith").get_all("Provides-Extra") or []
    pinned = pins()
    clashes = [
        f"{one} is asked for, and pinned to {pinned[canonical(one.name)]}"
        for one in asked_for(f"tinsmith[{','.join(extras)}]")
        if canonical(one.name) in pinned
        and not one.specifier.contains(pinned[canonical(one.name)], prereleases=True)
    ]

    assert "s3" in extras
    assert clashes == []
