"""`tinsmith key`: the keys that a service of ours accepts, and the tenants that they belong to.

These commands work on the service's database, whether or not it runs; they are for whoever may read
that. A server sees within a second what they change. A key is shown when it is made, and not again.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.serve.options import BY_NAME

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    from tinsmith.ledger.base import Ledger
    from tinsmith.ledger.records import ApiKey, Tenant

    T = TypeVar("T")

_QUOTA_HELP = (
    "hold the tenant to this many; models=8 as an example, and models=none takes it away again"
)


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith key`."""
    create = parser.add_verb(
        "create",
        "make a key, and its tenant if there is none",
        create_key,
        " The key is shown now and never again. The first one closes the service to all"
        " who have none.",
    )
    create.add_argument("--name", default="", help="what to call the key in listings")
    create.add_argument(
        "--tenant", default="default", metavar="NAME", help="whose key it is (default: default)"
    )
    create.add_argument(
        "--quota", action="append", default=[], type=quota, metavar="NAME=N", help=_QUOTA_HELP
    )
    listing = parser.add_verb("list", "show the keys, revoked ones too", list_keys)
    listing.add_argument("--tenant", metavar="NAME", help="only those of this tenant")
    revoke = parser.add_verb("revoke", "refuse a key from now on", revoke_key)
    revoke.add_argument("id", metavar="ID", help="the key's id, as `tinsmith key list` shows it")
    quotas = parser.add_verb("quota", "show or change what a tenant is held to", change_quotas)
    quotas.add_argument("tenant", metavar="TENANT", help="the tenant's name")
    quotas.add_argument("quota", nargs="*", type=quota, metavar="NAME=N", help=_QUOTA_HELP)
    from tinsmith.cli.serve import add_settings

    for verb in (create, listing, revoke, quotas):
        add_settings(verb, (BY_NAME["data"], BY_NAME["database"]))


def quota(text: str) -> tuple[str, int | None]:
    """A quota and its value, for `type=` of an argument."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not NAME=N")
    if value == "none":
        return name, None
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise argparse.ArgumentTypeError(f"{text!r:.80}: the value is a whole number, or none")
    return name, int(value)


def create_key(arguments: argparse.Namespace) -> None:
    """Make a key and print it."""
    from tinsmith.cli.output import show
    from tinsmith.server import keys

    async def create(ledger: Ledger) -> tuple[Tenant, ApiKey, str]:
        tenant = await keys.add_tenant(ledger, arguments.tenant, dict(arguments.quota))
        return (tenant, *await keys.create_key(ledger, tenant, arguments.name))

    tenant, kept, key = _on_ledger(arguments, create)
    _remember_keys(arguments)
    plain = {"key": key, **_plain(kept), "quotas": tenant.quotas}
    # The key alone on stdout, so that a script can take it.
    _note(arguments, f"A key of tenant {tenant.name}. It is not shown again:")
    show(arguments.format, plain, key)
    _note(arguments, f"`tinsmith key revoke {keys.key_id(kept)}` ends it.")


def list_keys(arguments: argparse.Namespace) -> None:
    """Show the keys; nothing of them but their first characters."""
    from tinsmith.cli.output import Table, show
    from tinsmith.cli.text import counted
    from tinsmith.server import keys

    found = _on_ledger(
        arguments, lambda ledger: keys.list_keys(ledger, arguments.tenant), may_make=False
    )
    show(
        arguments.format,
        {"keys": [_plain(key) for key in found]},
        Table(
            counted(len(found), "key") if found else "No keys found",
            ["ID", "Key", "Name", "Tenant", "Created", "Revoked"],
            [_row(key) for key in found],
        ),
    )


def revoke_key(arguments: argparse.Namespace) -> None:
    """Revoke a key by its id."""
    from tinsmith.cli.output import show
    from tinsmith.server import keys

    key = _on_ledger(
        arguments, lambda ledger: keys.revoke_key(ledger, arguments.id), may_make=False
    )
    show(
        arguments.format,
        _plain(key),
        f"The key {keys.key_id(key)} ({key.shown}…) of tenant {key.tenant_id} is revoked. "
        "A running server refuses it within a second.",
    )


def change_quotas(arguments: argparse.Namespace) -> None:
    """Change a tenant's quotas, if any are given, and show them."""
    from tinsmith.cli.output import Properties, show
    from tinsmith.errors import UnknownEntryError
    from tinsmith.ledger.records import Tenant
    from tinsmith.server import keys

    async def change(ledger: Ledger) -> Tenant:
        # A misspelt name must not make a tenant.
        if await ledger.entries(Tenant).get(arguments.tenant) is None:
            raise UnknownEntryError(f"there is no tenant {arguments.tenant!r:.80}")
        return await keys.add_tenant(ledger, arguments.tenant, dict(arguments.quota))

    tenant = _on_ledger(arguments, change, may_make=False)
    shown = [(name, str(tenant.quotas.get(name, "none"))) for name in keys.QUOTAS]
    show(
        arguments.format,
        {"tenant": tenant.name, "quotas": tenant.quotas},
        Properties(f"Quotas of {tenant.name}", shown),
    )


def _on_ledger(
    arguments: argparse.Namespace, work: Callable[[Ledger], Awaitable[T]], *, may_make: bool = True
) -> T:
    """Do something with the entries of the service's ledger, which may have to be made first.

    Raises:
        UsageError: What was given cannot be used.
    """
    import asyncio

    from tinsmith.cli.failures import UsageError
    from tinsmith.cli.serve import loaded_settings
    from tinsmith.errors import ValidationError
    from tinsmith.ledger.registry import open_ledger_beside

    address = loaded_settings(arguments).settings.database

    async def run() -> T:
        async with await open_ledger_beside(address, may_make=may_make) as ledger:
            return await work(ledger)

    try:
        return asyncio.run(run())
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc


def _remember_keys(arguments: argparse.Namespace) -> None:
    """In the data folder, if the ledger is the one in it; any other service notes it itself."""
    from tinsmith.cli.serve import loaded_settings
    from tinsmith.serve.key_guard import note_keys
    from tinsmith.serve.settings import ServiceSettings

    settings = loaded_settings(arguments).settings
    if settings.database == ServiceSettings(data=settings.data).database:
        note_keys(settings.data)


def _note(arguments: argparse.Namespace, text: str) -> None:
    import sys

    if arguments.format != "json":
        print(text, file=sys.stderr)


def _plain(key: ApiKey) -> dict[str, Any]:
    from tinsmith.server import keys

    return {
        "id": keys.key_id(key),
        "shown": key.shown,
        "name": key.name,
        "tenant": key.tenant_id,
        "created_at": _iso(key.created_at),
        "revoked_at": None if key.revoked_at is None else _iso(key.revoked_at),
    }


def _row(key: ApiKey) -> list[str]:
    from tinsmith.cli.text import time_text
    from tinsmith.server import keys

    revoked = "" if key.revoked_at is None else time_text(_moment(key.revoked_at))
    created = time_text(_moment(key.created_at))
    return [keys.key_id(key), f"{key.shown}…", key.name, key.tenant_id, created, revoked]


def _moment(at: float) -> Any:
    import datetime

    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def _iso(at: float) -> str:
    return str(_moment(at).isoformat())
