"""`tinsmith version`: the versions of tinsmith and its dependencies, for bug reports.

Reads package metadata and imports none of the packages.
"""

from __future__ import annotations

import argparse

from tinsmith._version import __version__
from tinsmith.cli.parser import Parser

# Packages that affect how tinsmith behaves.
PACKAGES = ("msgspec", "aiohttp", "backports.zstd", "numpy", "orjson", "tokenizers", "torch")


def configure(parser: Parser) -> None:
    """Set the function of `tinsmith version`, which has no arguments."""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the versions."""
    import platform

    from tinsmith.cli.output import show

    packages = {name: _installed_version(name) for name in PACKAGES}
    python, system = platform.python_version(), platform.platform()
    lines = [f"tinsmith {__version__}", f"python {python} on {system}"]
    lines += [f"{name} {version or '(not installed)'}" for name, version in packages.items()]
    plain = {
        "tinsmith": __version__,
        "python": python,
        "platform": system,
        "packages": packages,
    }
    show(arguments.format, plain, "\n".join(lines))


def _installed_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
