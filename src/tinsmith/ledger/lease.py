"""The lease of a scheduler: who may claim and settle, under which epoch, and until when.

`base.py` says what it is for. Two clocks are at work. The database's clock decides when another
server may take the lease over. The holder goes by its own monotonic clock, counted from before it
asked the database, so that its time is up no later than the database's; and it stops `MARGIN` of
the lease earlier.
"""

from __future__ import annotations

import time

from tinsmith.errors import LeaseHeldError, LeaseLostError

LEASE_S = 10.0
"""How long a lease lasts unless it is renewed: as long does a server wait after one was killed."""
MARGIN = 0.25
"""The part of a lease for which its holder has stopped before it ends."""


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
        remedy="let one server work from this database; the other one ends by itself",
    )


def lease_held(owner: str) -> LeaseHeldError:
    """The error for a lease that another one has."""
    return LeaseHeldError(
        f"another server works from this database: {owner}",
        remedy="stop it, or give this one a database of its own",
    )
