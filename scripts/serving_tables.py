"""The generated tables of docs/serving.md: settings, quotas, metrics, log fields.

They are made from the code that they describe, and stand between marks in the page. A test compares
them; `python scripts/serving_tables.py` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tinsmith.serve.options import OPTIONS
from tinsmith.server.keys import QUOTAS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "serving.md"


def settings_table() -> str:
    """Every setting, its default, and what it does."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for option in OPTIONS:
        default = option.default if " " in option.default else f"`{option.default}`"
        rows.append(f"| `{option.name}` | {default} | {option.help} |")
    return "\n".join(rows)


def quotas_table() -> str:
    """What a tenant can be held to."""
    rows = [f"| `{name}` | {what} |" for name, what in QUOTAS.items()]
    return "\n".join(["| quota | of one tenant |", "|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {"settings": settings_table, "quotas": quotas_table}


def with_tables(page: str) -> str:
    """The page with every table as the code has it."""
    for name, table in TABLES.items():
        marks = (f"<!-- generated: {name} -->", f"<!-- end: {name} -->")
        between = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        text = f"{marks[0]}\n{table()}\n{marks[1]}".replace("\\", r"\\")
        page, found = between.subn(text, page)
        if found != 1:
            raise SystemExit(f"{PAGE} has the marks of {name} {found} times")
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
