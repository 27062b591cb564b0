"""The pages of docs/reference/, each made from the code that it describes.

One module of `reference_pages` makes one page. A test compares them with what is in the tree;
`python scripts/reference.py --write` writes them anew, as `scripts/check --fix` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a script's own folder is there instead

from scripts.reference_pages import cli, client, errors, metrics, routes, settings  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- Made from the code by scripts/reference.py; changes here are lost. -->\n"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli.page,
    "client.md": client.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
    "routes.md": routes.page,
    "settings.md": settings.page,
}


def reference_page(name: str) -> str:
    """The text of a page, as the code has it."""
    return f"{MARK}{PAGES[name]()}"


def main() -> int:
    """Compare, or write; 1 when a page is out of date."""
    parser = argparse.ArgumentParser(prog="scripts/reference.py")
    parser.add_argument("--write", action="store_true", help="make the pages anew")
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
        print(f"not as the code is: {', '.join(old)}; run: python scripts/reference.py --write")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
