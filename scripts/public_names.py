"""Compares the public names of tinsmith with the list in `docs/public-names.txt`.

A name that programs may import is a promise. With the list in the repository, a change that adds or
removes one shows in its diff. `scripts/public-names` runs this; `--write` rewrites the list.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from pathlib import Path

PUBLIC_MODULES = ("tinsmith", "tinsmith.types")
LISTED = Path(__file__).resolve().parent.parent / "docs" / "public-names.txt"


def public_names() -> list[str]:
    """Every `module.name` in `__all__` of a public module; exits if one does not exist."""
    names = []
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            if not hasattr(module, name):
                sys.exit(f"error: {module_name}.__all__ lists {name}, which does not exist")
            names.append(f"{module_name}.{name}")
    return sorted(names)


def main() -> int:
    """Compare or write; 1 if the list is out of date."""
    parser = argparse.ArgumentParser(prog="scripts/public-names")
    parser.add_argument("--write", action="store_true", help="rewrite docs/public-names.txt")
    write = parser.parse_args().write
    found = public_names()
    if write:
        LISTED.write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
        return 0
    listed = LISTED.read_text(encoding="utf-8").splitlines() if LISTED.exists() else []
    if found == listed:
        return 0
    print(*difflib.unified_diff(listed, found, "listed", "found", lineterm="", n=0), sep="\n")
    print("the public names have changed; if this is intended, run: scripts/public-names --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
