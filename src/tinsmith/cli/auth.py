"""`tinsmith auth`: the key that commands and programs use when they are given none.

A key is asked for without being shown, checked with the service, and kept by `credential_store`.
It is never printed.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.cli.credential_store import CredentialStore
    from tinsmith.types.service import ApiKeyResponse

KEYS_PAGE = "https://tinker.thinkingmachines.ai/keys"
MOST_KEY_CHARACTERS = 16 * 1024


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith auth`."""
    parser.add_verb(
        "login",
        "check an API key and keep it for later",
        login,
        " The key is asked for, or read from stdin if that is not a terminal.",
    )
    parser.add_verb("logout", "forget the key that was kept", logout)
    parser.add_verb("status", "say whether there is a credential, and whether it works", status)
    parser.add_verb("whoami", "show whose credential is used", whoami)


def login(arguments: argparse.Namespace) -> None:
    """Ask for a key and keep it, if the service accepts it."""
    from tinsmith.cli.failures import CommandError
    from tinsmith.cli.output import plain_of, show

    store = _store()
    if store.default() is not None:
        raise CommandError(
            "you are signed in already", remedy="`tinsmith auth logout` forgets that key first"
        )
    url = _address(arguments)
    key = _asked_for_key(url)
    owner: ApiKeyResponse = _call(arguments, "get_api_key", key)
    details = plain_of(owner.details)
    record = {"type": "manual", "key": key, "name": owner.name, "note": owner.note}
    store.add_default(str(owner.key_id), {**record, "details": details, "base_url": url})
    email, organisation = details["user_details"]["email"], details["org_details"]["name"]
    show(
        arguments.format,
        {"email": email, "organization": organisation, "key_name": owner.name},
        f"Signed in as {email} ({organisation}). The key {owner.name!r} is kept as the default.",
    )


def _address(arguments: argparse.Namespace) -> str:
    from tinsmith.cli.connect import settings

    return settings(arguments).base_url


def _where_keys_are(url: str | None, key_id: str = "") -> str:
    """Where whoever uses a service makes and deletes keys; the hosted one if it is not known."""
    from tinsmith.client.settings import HOSTED_URL

    if url in (None, HOSTED_URL):
        return f"at {KEYS_PAGE}/{key_id}".rstrip("/")
    return "with `tinsmith key` where the service runs"


def _asked_for_key(url: str) -> str:
    """A key from the terminal, unseen, or from stdin.

    Raises:
        UsageError: What was given is no key.
    """
    import getpass
    import sys

    from tinsmith.cli.failures import UsageError

    if sys.stdin.isatty():
        print(f"{url}: you can make a key {_where_keys_are(url)}", file=sys.stderr)
        key = getpass.getpass("API key: ", stream=sys.stderr).strip()
    else:
        key = sys.stdin.readline(MOST_KEY_CHARACTERS).strip()
    if not key.startswith(("tml-", "eyJ")) or not key.isascii() or not key.isprintable():
        raise UsageError("that is not an API key", remedy="a key begins with tml-")
    return key


def logout(arguments: argparse.Namespace) -> None:
    """Forget the default key; one that was made for this machine is deleted on the server too."""
    from tinsmith.cli.failures import CommandError, in_short
    from tinsmith.cli.output import show
    from tinsmith.errors import APIError

    store = _store()
    kept = store.default()
    if kept is None:
        raise CommandError("no key is kept here", remedy="there is nothing to sign out of")
    key_id, record = kept
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
            f"the key {name!r} is forgotten here, and could not be deleted on the server: "
            f"{in_short(problem)}",
            remedy=f"delete it {keys}",
        )
    left = "" if is_generated else f" It still works; you can delete it {keys}"
    show(
        arguments.format,
        {"key_name": name, "deleted_on_server": is_generated},
        f"The key {name!r} is forgotten.{left}",
    )


def status(arguments: argparse.Namespace) -> int:
    """Say whether a credential is at hand and whether the service accepts it."""
    from tinsmith.cli.connect import limit_s, service_client, settings, use_record_only
    from tinsmith.cli.failures import FAILED, SIGN_IN, report
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
        problem.remedy = SIGN_IN
    report(problem, arguments.format == "json")
    return FAILED


def whoami(arguments: argparse.Namespace) -> None:
    """Show the user and the organisation of the credential."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, plain_of, show
    from tinsmith.cli.text import MISSING

    owner = wait(rest_client(arguments).whoami(), arguments)
    pairs = [
        ("Email", owner.email or MISSING),
        ("User", owner.user_urn),
        ("Organization", owner.org_urn),
    ]
    show(arguments.format, plain_of(owner), Properties("Signed in", pairs))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _store() -> CredentialStore:
    from pathlib import Path

    from tinsmith.cli.credential_store import CredentialStore
    from tinsmith.client.auth import CREDENTIALS_FILE

    return CredentialStore(Path(CREDENTIALS_FILE))


def _call(arguments: argparse.Namespace, endpoint: str, key: str) -> Any:
    """Make a call with this key, whatever others there are."""
    from tinsmith.cli.connect import settings, wait
    from tinsmith.client.background import background
    from tinsmith.client.lease import SessionLease
    from tinsmith.client.session import Session
    from tinsmith.types.requests import EmptyRequest

    lease = SessionLease(Session(settings(arguments, api_key=key)))
    return wait(
        background().start(lease.session.call(endpoint, EmptyRequest()), endpoint), arguments
    )
