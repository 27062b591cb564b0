"""`tinsmith version`: what is installed here, for people and for bug reports.

Reads the metadata of installed packages and imports none of them.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

from tinsmith._version import __version__

# What changes how tinsmith behaves; those that are not installed are shown as such.
PACKAGES = ("msgspec", "backports.zstd", "numpy", "orjson", "torch")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tinsmith version`."""
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text (default) or json"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the versions in the chosen format."""
    packages = {name: _installed_version(name) for name in PACKAGES}
    python, system = platform.python_version(), platform.platform()
    if arguments.format == "json":
        report = {
            "tinsmith": __version__,
            "python": python,
            "platform": system,
            "packages": packages,
        }
        print(json.dumps(report))
        return 0
    print(f"tinsmith {__version__}")
    print(f"python {python} on {system}")
    for name, version in packages.items():
        print(f"{name} {version or '(not installed)'}")
    return 0


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
