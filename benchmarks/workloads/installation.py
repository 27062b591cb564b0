"""What a package costs before it does anything: room on the disk, and memory once imported."""

from __future__ import annotations

import importlib
import sysconfig
from importlib import metadata
from pathlib import Path

from benchmarks.harness.memory import resident_bytes

_INSTALLERS = frozenset({"pip", "setuptools", "wheel", "_distutils_hack", "distutils"})


def room(package: str) -> dict[str, float]:
    """The size of everything installed, the installers aside, and how many packages that is.

    Our own package is installed from where its source lies, so that place is counted too.
    """
    site = Path(sysconfig.get_path("purelib"))
    counted = [entry for entry in site.iterdir() if not _is_installer(entry.name)]
    source = Path(importlib.import_module(package).__path__[0])
    if not source.is_relative_to(site):
        counted.append(source)
    names = {found.name.lower() for found in metadata.distributions()} - _INSTALLERS
    return {"installed_bytes": sum(map(_disk_bytes, counted)), "packages": len(names)}


def imported(package: str) -> dict[str, float]:
    """Resident memory once the package is imported and each of its public names was used."""
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
    return {"resident_bytes": resident_bytes()}


def _is_installer(name: str) -> bool:
    return name.split("-", maxsplit=1)[0].split(".", maxsplit=1)[0] in _INSTALLERS


def _disk_bytes(entry: Path) -> int:
    files = [entry] if entry.is_file() else [file for file in entry.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)
