"""`tinsmith key`: the API keys of your own service, and the tenants they belong to.

These commands work on the service's database directly, whether the service is running or not. A
running server notices changes within a second. A key is shown once, when it is created.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.service.run.options import BY_NAME

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    from tinsmith.service.ledger.base import Ledger
    from tinsmith.service.ledger.records import ApiKey, Tenant

    T = TypeVar("T")

_QUOTA_HELP = "set a quota of the tenant, such as models=8; models=none removes it"


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith key`."""
    create = parser.add_verb(
        "create",
        "create a key, and its tenant if needed",
        create_key,
        " The key is printed once. As soon as a service has a key, it refuses requests without one."
        "\n\nexample: tinsmith key create --name laptop",
    )
    create.add_argument("--name", default="", help="name of the key")
    create.add_argument(
        "--tenant", default="default", metavar="NAME", help="tenant of the key (default: default)"
    )
    create.add_argument(
        "--quota", action="append", default=[], type=quota, metavar="NAME=N", help=_QUOTA_HELP
    )
    create.add_argument(
        "--operator", action="store_true", help="let the key show and drain the service's replicas"
    )
    listing = parser.add_verb("list", "list the keys, including revoked ones", list_keys)
    listing.add_argument("--tenant", metavar="NAME", help="only keys of this tenant")
    revoke = parser.add_verb("revoke", "revoke a key", revoke_key)
    revoke.add_argument("id", metavar="ID", help="id of the key, as in `tinsmith key list`")
    quotas = parser.add_verb("quota", "show or change the quotas of a tenant", change_quotas)
    quotas.add_argument("tenant", metavar="TENANT", help="name of the tenant")
    quotas.add_argument("quota", nargs="*", type=quota, metavar="NAME=N", help=_QUOTA_HELP)
    from tinsmith.cli.serve import add_settings

    for verb in (create, listing, revoke, quotas):
        add_settings(verb, (BY_NAME["data"], BY_NAME["database"]))


def quota(text: str) -> tuple[str, int | None]:
    """An argument `type=`: a quota and its value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=N, got {text!r:.80}")
    if value == "none":
        return name, None
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise argparse.ArgumentTypeError(f"expected an integer or none after =, got {text!r:.80}")
    return name, int(value)


def create_key(arguments: argparse.Namespace) -> None:
    """Create a key and print it."""
    from tinsmith.cli.output import show
    from tinsmith.service.api import keys

    async def create(ledger: Ledger) -> tuple[Tenant, ApiKey, str]:
        tenant = await keys.add_tenant(ledger, arguments.tenant, dict(arguments.quota))
        made = await keys.create_key(ledger, tenant, arguments.name, is_operator=arguments.operator)
        return (tenant, *made)

    tenant, kept, key = on_ledger(arguments, create)
    _remember_keys(arguments)
    plain = {"key": key, **_plain(kept), "quotas": tenant.quotas}
    # Only the key goes to stdout, for scripts.
    _note(arguments, f"Created a key for tenant {tenant.name}. It will not be shown again:")
    show(arguments.format, plain, key)
    _note(arguments, f"To revoke it, run `tinsmith key revoke {keys.key_id(kept)}`.")


def list_keys(arguments: argparse.Namespace) -> None:
    """Show the keys, but only the first characters of each."""
    from tinsmith.cli.output import Table, show
    from tinsmith.cli.text import counted
    from tinsmith.service.api import keys

    found = on_ledger(
        arguments, lambda ledger: keys.list_keys(ledger, arguments.tenant), may_make=False
    )
    show(
        arguments.format,
        {"keys": [_plain(key) for key in found]},
        Table(
            counted(len(found), "key") if found else "No keys found",
            ["ID", "Key", "Name", "Tenant", "Operator", "Created", "Revoked"],
            [_row(key) for key in found],
        ),
    )


def revoke_key(arguments: argparse.Namespace) -> None:
    """Revoke a key by its id."""
    from tinsmith.cli.output import show
    from tinsmith.service.api import keys

    key = on_ledger(arguments, lambda ledger: keys.revoke_key(ledger, arguments.id), may_make=False)
    show(
        arguments.format,
        _plain(key),
        f"Revoked the key {keys.key_id(key)} ({key.shown}…) of tenant {key.tenant_id}. "
        "A running server refuses it within a second.",
    )


def change_quotas(arguments: argparse.Namespace) -> None:
    """Set the given quotas of a tenant, and show all of them."""
    from tinsmith.cli.output import Properties, show
    from tinsmith.errors import UnknownEntryError
    from tinsmith.service.api import keys
    from tinsmith.service.ledger.records import Tenant

    async def change(ledger: Ledger) -> Tenant:
        # A misspelt name must not create a tenant.
        if await ledger.entries(Tenant).get(arguments.tenant) is None:
            raise UnknownEntryError(f"unknown tenant {arguments.tenant!r:.80}")
        return await keys.add_tenant(ledger, arguments.tenant, dict(arguments.quota))

    tenant = on_ledger(arguments, change, may_make=False)
    shown = [(name, str(tenant.quotas.get(name, "none"))) for name in keys.QUOTAS]
    show(
        arguments.format,
        {"tenant": tenant.name, "quotas": tenant.quotas},
        Properties(f"Quotas of {tenant.name}", shown),
    )


def on_ledger(
    arguments: argparse.Namespace, work: Callable[[Ledger], Awaitable[T]], *, may_make: bool = True
) -> T:
    """Run `work` on the service's ledger, creating it first if `may_make`.

    Raises:
        UsageError: An argument is invalid.
    """
    import asyncio

    from tinsmith.cli.command_errors import UsageError
    from tinsmith.cli.serve import loaded_settings
    from tinsmith.errors import ValidationError
    from tinsmith.service.ledger.registry import open_ledger_beside

    address = loaded_settings(arguments).settings.database

    async def run() -> T:
        async with await open_ledger_beside(address, may_make=may_make) as ledger:
            return await work(ledger)

    try:
        return asyncio.run(run())
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc


def _remember_keys(arguments: argparse.Namespace) -> None:
    """Note in the data folder that there are keys, if the ledger is the default one in it."""
    from tinsmith.cli.serve import loaded_settings
    from tinsmith.service.run.key_guard import note_keys
    from tinsmith.service.run.service_settings import ServiceSettings

    settings = loaded_settings(arguments).settings
    if settings.database == ServiceSettings(data=settings.data).database:
        note_keys(settings.data)


def _note(arguments: argparse.Namespace, text: str) -> None:
    import sys

    if arguments.format != "json":
        print(text, file=sys.stderr)


def _plain(key: ApiKey) -> dict[str, Any]:
    from tinsmith.service.api import keys

    return {
        "id": keys.key_id(key),
        "shown": key.shown,
        "name": key.name,
        "tenant": key.tenant_id,
        "operator": key.is_operator,
        "created_at": iso(key.created_at),
        "revoked_at": None if key.revoked_at is None else iso(key.revoked_at),
    }


def _row(key: ApiKey) -> list[str]:
    from tinsmith.cli.text import time_text
    from tinsmith.service.api import keys

    revoked = "" if key.revoked_at is None else time_text(_moment(key.revoked_at))
    created = time_text(_moment(key.created_at))
    operator = "yes" if key.is_operator else ""
    return [keys.key_id(key), f"{key.shown}…", key.name, key.tenant_id, operator, created, revoked]


def _moment(at: float) -> Any:
    import datetime

    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def iso(at: float) -> str:
    """A time for JSON output."""
    return str(_moment(at).isoformat())
