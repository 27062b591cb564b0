"""`tinsmith fleet`: the replicas of your service's engine.

These commands work on the service's database directly. A scheduler reports its replicas there and
looks for wishes every second.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.key import on_ledger
from tinsmith.cli.parser import Parser
from tinsmith.service.run.options import BY_NAME

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.service.ledger.records import ReplicaEntry

STALE_S = 60.0
"""A report that is older is shown with its age."""


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith fleet`; without one, it lists the replicas."""
    from tinsmith.cli.serve import add_settings

    parser.set_defaults(run=list_replicas)
    listing = parser.add_verb(
        "list", "list the replicas, what they hold and their losses", list_replicas
    )
    drain = parser.add_verb(
        "drain",
        "move everything off a replica and close it",
        drain_replica,
        " Models move between two commands, and running samples finish; nothing fails. It stays "
        "closed, also after a restart of the service, until `tinsmith fleet resume`.",
    )
    resume = parser.add_verb("resume", "use a drained replica again", resume_replica)
    for verb in (drain, resume):
        verb.add_argument("name", metavar="NAME", help="name of the replica")
    for one in (parser, listing, drain, resume):
        add_settings(one, (BY_NAME["data"], BY_NAME["database"]))


def list_replicas(arguments: argparse.Namespace) -> None:
    """Show the replicas."""
    import time

    from tinsmith.cli.output import Table, show
    from tinsmith.cli.text import counted
    from tinsmith.service.run import fleet_reports

    found = on_ledger(arguments, fleet_reports.list_replicas, may_make=False)
    columns = ["Name", "State", "Duty", "Device", "Models", "Weights", "Samples", "Load", "Losses"]
    title = counted(len(found), "replica") if found else "No replicas: the engine is not divided"
    rows = [_row(one, time.time()) for one in found]
    show(
        arguments.format, {"replicas": [_plain(one) for one in found]}, Table(title, columns, rows)
    )


def drain_replica(arguments: argparse.Namespace) -> None:
    """Have a replica drained."""
    _ask(arguments, is_drained=True)


def resume_replica(arguments: argparse.Namespace) -> None:
    """Have a replica used again."""
    _ask(arguments, is_drained=False)


def _ask(arguments: argparse.Namespace, *, is_drained: bool) -> None:
    from tinsmith.cli.output import show
    from tinsmith.service.run import fleet_reports

    entry = on_ledger(
        arguments,
        lambda ledger: fleet_reports.ask_drained(ledger, arguments.name, is_drained=is_drained),
        may_make=False,
    )
    what = "will be drained" if is_drained else "will be used again"
    told = f"Replica {entry.id} {what}. `tinsmith fleet` shows how far it is."
    show(arguments.format, _plain(entry), told)


def _plain(entry: ReplicaEntry) -> dict[str, Any]:
    from tinsmith.cli.key import iso

    return {
        "name": entry.id,
        **entry.report,
        "reported_at": iso(entry.reported_at),
        "wants_drained": entry.is_drained,
        "problem": entry.problem,
    }


def _row(entry: ReplicaEntry, now: float) -> list[str]:
    report = entry.report
    state = str(report["state"])
    if now - entry.reported_at > STALE_S:
        state += f" ({now - entry.reported_at:.0f} s ago)"
    if report["restarts_in_s"] is not None:
        state += f" in {report['restarts_in_s']:.0f} s"
    if entry.problem:
        state += f" ({entry.problem})"
    losses = str(report["losses"])
    if report["last_loss"]:
        losses += f" ({report['last_loss']})"
    return [
        entry.id,
        state,
        report["duty"],
        report["device"],
        f"{len(report['adapters'])} of {report['most_adapters']}",
        str(report["weights"]),
        str(report["samples"]),
        f"{report['load']:.0%}",
        losses,
    ]
