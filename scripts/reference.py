"""Writes the pages of docs/reference/ from the code that they describe.

    python scripts/reference.py [--write]

Without `--write` it reports pages that are out of date. Each module of `reference_pages` renders
one page. `scripts/check --fix` writes them, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # Python puts the script's own folder there

from scripts.reference_pages import cli, client, errors, metrics, routes, settings  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- Written by scripts/reference.py from the code; do not edit. -->\n"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli.page,
    "client.md": client.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
    "routes.md": routes.page,
    "settings.md": settings.page,
}


def reference_page(name: str) -> str:
    """The text of a page as it should be."""
    return f"{MARK}{PAGES[name]()}"


def main() -> int:
    """Compare or write; 1 if a page is out of date."""
    parser = argparse.ArgumentParser(prog="scripts/reference.py")
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    is_written = parser.parse_args().write
    old = []
    for name in PAGES:
        path, text = FOLDER / name, reference_page(name)
        if is_written:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(f"docs/reference/{name}")
    if old:
        print(f"out of date: {', '.join(old)}; run: scripts/check --fix")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
