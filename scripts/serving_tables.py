"""The generated tables of docs/serving.md: settings, quotas, metrics, log fields, spans.

They are made from the code that they describe, and stand between marks in the page. A test compares
them; `python scripts/serving_tables.py` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tinsmith.observe.log_fields import FIELDS
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import SPANS
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


def metrics_table() -> str:
    """Every metric, its labels, and what it says."""
    rows = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for instrument in ServiceMetrics().registry:
        labels = ", ".join(f"`{name}`" for name in instrument.label_names)
        rows.append(f"| `{instrument.name}` | {instrument.kind} | {labels} | {instrument.text} |")
    return "\n".join(rows)


def log_fields_table() -> str:
    """Every field of a line of log."""
    rows = [f"| `{name}` | {what} |" for name, what in FIELDS.items()]
    return "\n".join(["| field | what it is |", "|---|---|", *rows])


def spans_table() -> str:
    """Every span."""
    rows = [f"| `tinsmith {name}` | {what} |" for name, what in SPANS.items()]
    return "\n".join(["| span | what it is |", "|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "quotas": quotas_table,
    "metrics": metrics_table,
    "log fields": log_fields_table,
    "spans": spans_table,
}


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
