"""`tinsmith auth`: the stored API key, which commands and programs use by default.

The key is entered without echo, checked with the service, stored by `credential_store`, and never
printed.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.cli.credential_store import CredentialStore
    from tinsmith.types.service import ApiKeyResponse

KEYS_PAGE = "https://tinker.thinkingmachines.ai/keys"
MAX_KEY_CHARS = 16 * 1024


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith auth`."""
    parser.add_verb(
        "login",
        "check an API key and store it",
        login,
        " The key is read from the terminal without echo, or from stdin."
        "\n\nexample: tinsmith auth login --base-url http://127.0.0.1:8000",
    )
    parser.add_verb("logout", "delete the stored API key", logout)
    parser.add_verb("status", "check whether credentials are found and accepted", status)
    parser.add_verb("whoami", "show the user and organization of the API key", whoami)


def login(arguments: argparse.Namespace) -> None:
    """Read a key, and store it if the service accepts it."""
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.cli.output import plain_of, show

    store = _store()
    if store.default() is not None:
        raise CommandError("already logged in", remedy="run `tinsmith auth logout` first")
    url = _address(arguments)
    key = _read_key(url)
    owner: ApiKeyResponse = _call(arguments, "get_api_key", key)
    details = plain_of(owner.details)
    record = {"type": "manual", "key": key, "name": owner.name, "note": owner.note}
    store.add_default(str(owner.key_id), {**record, "details": details, "base_url": url})
    email, organization = details["user_details"]["email"], details["org_details"]["name"]
    show(
        arguments.format,
        {"email": email, "organization": organization, "key_name": owner.name},
        f"Logged in as {email} ({organization}). Stored the key {owner.name!r} as the default.",
    )


def _address(arguments: argparse.Namespace) -> str:
    from tinsmith.cli.connect import settings

    return settings(arguments).base_url


def _where_keys_are(url: str | None, key_id: str = "") -> str:
    """Where to create and delete keys of a service; the hosted one if unknown."""
    from tinsmith.client.settings import HOSTED_URL

    if url in (None, HOSTED_URL):
        return f"at {KEYS_PAGE}/{key_id}".rstrip("/")
    return "with `tinsmith key` on the machine of the service"


def _read_key(url: str) -> str:
    """A key from the terminal, without echo, or from stdin.

    Raises:
        UsageError: The input is not a key.
    """
    import getpass
    import sys

    from tinsmith.cli.command_errors import UsageError

    if sys.stdin.isatty():
        print(f"Create a key for {url} {_where_keys_are(url)}.", file=sys.stderr)
        key = getpass.getpass("API key: ", stream=sys.stderr).strip()
    else:
        key = sys.stdin.readline(MAX_KEY_CHARS).strip()
    if not key.startswith(("tml-", "eyJ")) or not key.isascii() or not key.isprintable():
        raise UsageError("invalid API key: expected a key that starts with `tml-`")
    return key


def logout(arguments: argparse.Namespace) -> None:
    """Delete the stored key; one generated for this machine is deleted on the server too."""
    from tinsmith.cli.command_errors import CommandError, one_line
    from tinsmith.cli.output import show
    from tinsmith.errors import APIError

    store = _store()
    stored = store.default()
    if stored is None:
        raise CommandError("not logged in: there is no stored API key")
    key_id, record = stored
    keys = _where_keys_are(record.get("base_url"), key_id)
    name, is_generated = str(record.get("name")), record.get("type") == "generated"
    problem: APIError | None = None
    if is_generated:
        try:
            _call(arguments, "delete_api_key", str(record.get("key")))
        except APIError as error:
            problem = error
    store.remove(key_id)
    if problem is not None:
        raise CommandError(
            f"deleted the stored key {name!r}, but could not delete it on the server: "
            f"{one_line(problem)}",
            remedy=f"delete it {keys}",
        )
    left = "" if is_generated else f" It is still valid; delete it {keys}."
    show(
        arguments.format,
        {"key_name": name, "deleted_on_server": is_generated},
        f"Deleted the stored key {name!r}.{left}",
    )


def status(arguments: argparse.Namespace) -> int:
    """Check whether credentials are found and whether the service accepts them."""
    from tinsmith.cli.command_errors import FAILURE, LOG_IN, report
    from tinsmith.cli.connect import limit_s, service_client, settings, use_record_only
    from tinsmith.cli.output import show
    from tinsmith.client.auth import NO_KEY, static_key
    from tinsmith.errors import TinkerError

    has_credential, problem = False, None
    try:
        use_record_only(arguments)
        with service_client(arguments) as client:
            chosen = settings(arguments)
            has_command = chosen.credential_command is not None
            has_credential = has_command or static_key(chosen) not in (None, NO_KEY)
            client.get_server_capabilities(timeout=limit_s(arguments))
    except TinkerError as error:
        problem = error
    show(
        arguments.format,
        {"credentials_available": has_credential, "tinker_accessible": problem is None},
        f"Credentials available: {_yes(has_credential)}\n"
        f"Tinker accessible: {_yes(problem is None)}",
    )
    if problem is None:
        return 0
    if not has_credential:
        problem.remedy = LOG_IN
    report(problem, arguments.format == "json")
    return FAILURE


def whoami(arguments: argparse.Namespace) -> None:
    """Show the user and the organization of the API key."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, plain_of, show
    from tinsmith.cli.text import MISSING

    owner = wait(rest_client(arguments).whoami(), arguments)
    pairs = [
        ("Email", owner.email or MISSING),
        ("User", owner.user_urn),
        ("Organization", owner.org_urn),
    ]
    show(arguments.format, plain_of(owner), Properties("Logged in", pairs))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _store() -> CredentialStore:
    from pathlib import Path

    from tinsmith.cli.credential_store import CredentialStore
    from tinsmith.client.auth import CREDENTIALS_FILE

    return CredentialStore(Path(CREDENTIALS_FILE))


def _call(arguments: argparse.Namespace, endpoint: str, key: str) -> Any:
    """Make a call with this key instead of the stored one."""
    from tinsmith.cli.connect import settings, wait
    from tinsmith.client.background import background
    from tinsmith.client.lease import SessionLease
    from tinsmith.client.session import Session
    from tinsmith.types.requests import EmptyRequest

    lease = SessionLease(Session(settings(arguments, api_key=key)))
    return wait(
        background().start(lease.session.call(endpoint, EmptyRequest()), endpoint), arguments
    )
