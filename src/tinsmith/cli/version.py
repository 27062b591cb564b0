"""`tinsmith version`: what is installed here, for people and for bug reports.

Reads the metadata of installed packages and imports none of them.
"""

from __future__ import annotations

import argparse

from tinsmith._version import __version__
from tinsmith.cli.parser import Parser

# What changes how tinsmith behaves; those that are not installed are shown as such.
PACKAGES = ("msgspec", "aiohttp", "backports.zstd", "numpy", "orjson", "tokenizers", "torch")


def configure(parser: Parser) -> None:
    """Let `tinsmith version` run without arguments of its own."""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the versions in the chosen format."""
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
