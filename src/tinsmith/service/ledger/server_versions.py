"""Which servers may share a database: a rolling upgrade replaces them one after the other.

Every server notes in the ledger that it runs, and which *protocol* it speaks: what it writes, and
what it expects of others, beyond the tables. Two servers work together if each speaks at least the
oldest protocol that the other understands. One that starts looks at those that run before it
changes any table, and refuses to start beside one that it cannot work with; the message names it.

`PROTOCOL` rises with every change that other servers notice: entries and notices that mean
something new, or columns that older servers do not fill. `OLDEST` rises when support for an old
protocol is dropped, which is never done in the release that introduces a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from tinsmith._version import __version__
from tinsmith.errors import LedgerVersionError
from tinsmith.service.ledger.records import Entry

PROTOCOL = 1
OLDEST = 1
NOTED_S = 10.0
"""How often a server notes that it runs."""
GONE_S = 35.0
"""When one that does not counts as gone."""


class RunningServer(Entry, frozen=True, kw_only=True):
    """A server of this ledger. Listed by when it last noted that it runs."""

    kind: ClassVar[str] = "running_server"

    role: str
    where: str
    """Its process and machine, for messages."""
    noted_at: float
    version: str = __version__
    protocol: int = PROTOCOL
    oldest: int = OLDEST

    @property
    def due_at(self) -> float:
        """When it last noted that it runs."""
        return self.noted_at


def check_versions(bodies: Iterable[str]) -> None:
    """Check that this version can work with the servers that run.

    Args:
        bodies: Their entries, in JSON.

    Raises:
        LedgerVersionError: It cannot.
    """
    for body in bodies:
        other = msgspec.json.decode(body, type=RunningServer)
        if other.protocol < OLDEST or other.oldest > PROTOCOL:
            raise LedgerVersionError(
                f"tinsmith {__version__} cannot share this database with tinsmith {other.version}, "
                f"which runs as {other.role} in {other.where}: they speak protocol {PROTOCOL} and "
                f"{other.protocol}",
                remedy="upgrade one release at a time, or stop all servers of the other version "
                f"first; one that was killed counts as running for {GONE_S:g} s",
            )
