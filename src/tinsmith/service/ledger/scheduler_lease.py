"""The scheduler's lease: who may claim and settle, under which epoch; and the ledger's time.

`base.py` explains its purpose. Two clocks are involved. The database's clock decides when another
server may take over. The holder uses its own monotonic clock, counted from before it asked the
database, so that the lease expires for it no later than for the database; and it stops `MARGIN` of
the lease earlier.

**Time** (`SteadyClock`) starts from the wall clock and then only runs forward. The wall clock can
be set, by a person or by NTP. A jump ahead would expire every result at once, a jump back would
keep them for ever. So the wall clock is read once, when a ledger is opened, and from then on the
monotonic clock counts. What was written before the opening moves the start up to itself: times in
one ledger never run backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith.errors import LeaseHeldError, LeaseLostError

LEASE_S = 4.0
"""How long a lease lasts unless renewed; the next server waits so long after a kill."""
LEASE_TOPIC = "lease"
"""Told when a lease was released (`wakeups.py`)."""
MARGIN = 0.25
"""The fraction of a lease before its end at which the holder stops."""


class Lease:
    """One lease, as its holder sees it. For one event loop.

    Attributes:
        owner: Who holds it, for messages.
        epoch: Its number. A newer lease has a larger one.
        lease_s: How long it lasts unless it is renewed.
        ends_at: When it ends if it is not renewed, by `time.monotonic`. Moved by the ledger.
    """

    def __init__(self, owner: str, epoch: int, lease_s: float, ends_at: float) -> None:
        self.owner = owner
        self.epoch = epoch
        self.lease_s = lease_s
        self.ends_at = ends_at

    @property
    def stops_at(self) -> float:
        """When its holder has to stop, by `time.monotonic`: before the lease ends."""
        return self.ends_at - MARGIN * self.lease_s

    @property
    def is_held(self) -> bool:
        """Whether the holder may work, as far as its own clock can tell."""
        return time.monotonic() < self.stops_at


def lease_lost(epoch: int, newest: int) -> LeaseLostError:
    """The error for a write under an epoch that is not the newest."""
    return LeaseLostError(
        f"lost the lease with epoch {epoch}: another scheduler holds it, with epoch {newest}",
        remedy="run one scheduler per database; this server stops by itself",
    )


def lease_held(owner: str) -> LeaseHeldError:
    """The error for a lease that another one has."""
    return LeaseHeldError(
        f"another server is using this database: {owner}",
        remedy="stop it, or give this one a database of its own",
    )


Clock = Callable[[], float]


class SteadyClock:
    """Seconds since the epoch, whatever happens to the wall clock meanwhile."""

    def __init__(self, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()

    def now(self) -> float:
        """The time."""
        return self._monotonic() + self._ahead_s

    def start_after(self, moment: float) -> None:
        """Move ahead so that nothing is earlier than what was written at `moment`."""
        self._ahead_s += max(0.0, moment - self.now())
