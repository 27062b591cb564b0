"""Calls that cannot succeed, and why. A call that succeeds must be removed from this list."""

from __future__ import annotations

from typing import NamedTuple

from tests.compatibility.outcomes import Outcome


class Known(NamedTuple):
    name: str
    """The public name, without its class."""
    titles: tuple[str, ...]
    """The columns of the table that it applies to."""
    why: str


KNOWN = [
    Known(
        "get_audit_log_async",
        ("0.22.7", "0.24.0", "0.25.0", "0.30.4", "0.35.0", "0.36.0"),
        "The SDK fails before it sends anything: it uses a connection of its own event loop on "
        "the caller's. The blocking `get_audit_log` works.",
    ),
]


def explained(title: str, outcome: Outcome) -> Known | None:
    """Why the call fails; None if it should not."""
    for known in KNOWN:
        if outcome.name == known.name and title in known.titles:
            return known
    return None
