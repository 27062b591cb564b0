"""`tinsmith billing`: usage and checkpoint storage."""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.cli.text import counted, moment_from

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

_TOKEN_EVENTS = frozenset({"training", "sampling_prefill", "sampling_sample"})
_COST = "estimated_cost_usd"
_TOKEN_RATE = "effective_rate_usd_per_million_tokens"  # noqa: S105 - no secret
_STORAGE_RATE = "effective_rate_usd_per_gigabyte_month"


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith billing`."""
    usage = parser.add_verb(
        "usage",
        "show your organization's usage by the hour",
        show_usage,
        " Costs are estimates before credits, not an invoice."
        "\n\nexample: tinsmith billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z",
    )
    for name, summary in (
        ("starting_on", "start: a full hour in UTC, such as 2026-07-13T00:00:00Z"),
        ("ending_before", "end: a full hour, at most 14 days after the start"),
    ):
        usage.add_argument(name, type=moment_from, help=summary)
    _add_csv(usage, "--csv", "write the rows to this CSV file; - for stdout")
    _add_csv(usage, "--sessions-csv", "write the sessions and their metadata to this CSV file")
    storage = parser.add_verb(
        "checkpoint-storage", "show the current checkpoint storage and its cost", show_storage
    )
    storage.add_argument("--project-id", metavar="ID", help="only this project")
    _add_csv(storage, "--csv", "write the rows to this CSV file; - for stdout")


def _add_csv(verb: Parser, name: str, summary: str) -> None:
    verb.add_argument(name, metavar="PATH", help=summary)


def show_usage(arguments: argparse.Namespace) -> None:
    """Show one row per usage event."""
    from tinsmith.cli.connect import admin_client, wait
    from tinsmith.cli.output import Table, plain_of, show

    future = admin_client(arguments).get_billing_usage(
        arguments.starting_on, arguments.ending_before
    )
    plain = plain_of(wait(future, arguments))
    rows = [_flat(event) for event in plain["data"]]
    if arguments.sessions_csv:
        _write_csv(_session_rows(plain["sessions"]), arguments.sessions_csv)
    if arguments.csv:
        _write_csv(rows, arguments.csv)
    if arguments.csv or arguments.sessions_csv:
        return
    title = counted(len(rows), "hourly usage row") if rows else "No usage in this period"
    shown = [_with_nulls(row) for row in rows]
    show(arguments.format, plain, Table(title, *_filled(shown)))


def show_storage(arguments: argparse.Namespace) -> None:
    """Show one row per project and owner."""
    from tinsmith.cli.connect import admin_client, wait
    from tinsmith.cli.output import Table, plain_of, show

    future = admin_client(arguments).get_current_checkpoint_storage_usage(arguments.project_id)
    plain = plain_of(wait(future, arguments))
    rows = [{_STORAGE_RATE: plain[_STORAGE_RATE], **row} for row in plain["data"]]
    if arguments.csv:
        _write_csv(rows, arguments.csv)
        return
    title = "Current checkpoint storage" if rows else "No checkpoints stored"
    show(arguments.format, plain, Table(title, *_filled(rows)))


def _flat(event: dict[str, Any]) -> dict[str, Any]:
    """An event as one row, with the fields of `event_info` at the top level."""
    return {
        **{key: value for key, value in event.items() if key != "event_info"},
        **event["event_info"],
    }


def _with_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `null` for unknown costs of a priced event; other empty cells stay empty."""
    kind = row["type"]
    priced = [_COST, _TOKEN_RATE] if kind in _TOKEN_EVENTS else []
    priced = [_COST, _STORAGE_RATE] if kind == "storage" else priced
    return {key: "null" if key in priced and value is None else value for key, value in row.items()}


def _session_rows(sessions: dict[str, Any]) -> list[dict[str, Any]]:
    import json

    return [
        {
            "session_id": session_id,
            "user_metadata": None
            if session["user_metadata"] is None
            else json.dumps(session["user_metadata"]),
        }
        for session_id, session in sessions.items()
    ]


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _filled(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells without empty columns."""
    columns = [name for name in _columns(rows) if any(row.get(name) is not None for row in rows)]
    return columns, _cells(rows, columns)


def _cells(rows: list[dict[str, Any]], columns: list[str]) -> list[list[str]]:
    found = [[row.get(column) for column in columns] for row in rows]
    return [["" if cell is None else str(cell) for cell in row] for row in found]


def _write_csv(rows: list[dict[str, Any]], path: str) -> None:
    import csv
    import pathlib
    import sys

    columns = _columns(rows)
    table = [columns, *_cells(rows, columns)] if rows else []
    if path == "-":
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    with pathlib.Path(path).open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(table)
    print(f"Wrote {counted(len(rows), 'row')} to {path}", file=sys.stderr)
