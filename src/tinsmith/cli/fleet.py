"""`tinsmith fleet`: the replicas of your service's engine.

A scheduler reports its replicas in the service's database, and looks there for wishes every second.
These commands ask the service at `--base-url` or TINKER_BASE_URL, which needs the key of an
operator. Without either, or with a setting that says where the database is, they use the database.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.service.run.options import BY_NAME

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    import datetime

    from tinsmith.types.extensions import ReplicaStatus

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
    import datetime

    from tinsmith.cli.output import Table, plain_of, show
    from tinsmith.cli.text import counted

    found = _listed(arguments)
    columns = ["Name", "State", "Duty", "Device", "Models", "Weights", "Samples", "Load", "Losses"]
    title = counted(len(found), "replica") if found else "No replicas: the engine is not divided"
    rows = [_row(one, datetime.datetime.now(datetime.UTC)) for one in found]
    plain = {"replicas": [plain_of(one) for one in found]}
    show(arguments.format, plain, Table(title, columns, rows))


def drain_replica(arguments: argparse.Namespace) -> None:
    """Have a replica drained."""
    _ask(arguments, is_drained=True)


def resume_replica(arguments: argparse.Namespace) -> None:
    """Have a replica used again."""
    _ask(arguments, is_drained=False)


def _ask(arguments: argparse.Namespace, *, is_drained: bool) -> None:
    from tinsmith.cli.output import plain_of, show

    replica = _asked(arguments, is_drained=is_drained)
    what = "will be drained" if is_drained else "will be used again"
    told = f"Replica {replica.name} {what}. `tinsmith fleet` shows how far it is."
    show(arguments.format, plain_of(replica), told)


def _listed(arguments: argparse.Namespace) -> list[ReplicaStatus]:
    if not _uses_service(arguments):
        from tinsmith.cli.key import on_ledger
        from tinsmith.service.ledger import replicas

        return on_ledger(arguments, replicas.list_replicas, may_make=False)
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.cli.connect import fleet_client, wait
    from tinsmith.errors import NotFoundError

    try:
        return wait(fleet_client(arguments).list_replicas(), arguments).replicas
    except NotFoundError as exc:
        raise CommandError(
            "the service shows its replicas to operators only, or is of another kind",
            remedy="use a key made with `tinsmith key create --operator`, or pass --data or "
            "--database to use the service's database",
        ) from exc


def _asked(arguments: argparse.Namespace, *, is_drained: bool) -> ReplicaStatus:
    if not _uses_service(arguments):
        from tinsmith.cli.key import on_ledger
        from tinsmith.service.ledger import replicas

        return on_ledger(
            arguments,
            lambda ledger: replicas.ask_drained(ledger, arguments.name, is_drained=is_drained),
            may_make=False,
        )
    from tinsmith.cli.connect import fleet_client, wait
    from tinsmith.errors import NotFoundError

    client = fleet_client(arguments)
    call = client.drain_replica if is_drained else client.resume_replica
    try:
        return wait(call(arguments.name), arguments)
    except NotFoundError as exc:
        _listed(arguments)  # says so if the key is not an operator's
        exc.remedy = "run `tinsmith fleet` to see the replicas"
        raise


def _uses_service(arguments: argparse.Namespace) -> bool:
    """Whether to ask the service, rather than its database."""
    import os

    from tinsmith.cli.serve import names_database

    url = arguments.base_url or os.environ.get("TINKER_BASE_URL")
    return bool(url) and url != "embedded" and not names_database(arguments)


def _row(replica: ReplicaStatus, now: datetime.datetime) -> list[str]:
    state = replica.state
    age_s = (now - replica.reported_at).total_seconds()
    if age_s > STALE_S:
        state += f" ({age_s:.0f} s ago)"
    if replica.restarts_in_s is not None:
        state += f" in {replica.restarts_in_s:.0f} s"
    if replica.problem:
        state += f" ({replica.problem})"
    losses = str(replica.losses)
    if replica.last_loss:
        losses += f" ({replica.last_loss})"
    return [
        replica.name,
        state,
        replica.duty,
        replica.device,
        f"{len(replica.adapters)} of {replica.most_adapters}",
        str(replica.weights),
        str(replica.samples),
        f"{replica.load:.0%}",
        losses,
    ]
