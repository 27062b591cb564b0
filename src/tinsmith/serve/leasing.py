"""Holds the scheduler's lease on the ledger, for as long as it can be renewed.

A lease is renewed several times before its time is up. When it cannot be, or when another server
has taken it over, it counts as lost: `Working` then stops the scheduler. It is lost while it still
lasts in the database, so that nobody else can have it before this scheduler has stopped.

A process that was paused finds out when it goes on; until then `Board.may_work` goes by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time

from tinsmith.errors import LeaseLostError, LedgerError, LedgerUnavailableError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.lease import Lease

_log = logging.getLogger(__name__)

RENEWALS = 5
"""How often a lease is renewed while it lasts."""
RETRIES = 50
"""How often it is tried in that time while it fails."""
WAITED = 2.0
"""How long a server waits for the lease, in leases: the last holder may have been killed just now,
or be ending."""


class Leasing:
    """Renews a lease until it is lost or released. For one event loop; made by `acquire`.

    Attributes:
        lease: What is held, or was until it was lost.
    """

    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        self._ledger = ledger
        self.lease = lease
        self._begin()

    @classmethod
    async def acquire(cls, ledger: Ledger, lease_s: float) -> Leasing:
        """Take the lease, and renew it from now on.

        Raises:
            LeaseHeldError: Another server has it, and does not end.
        """
        owner = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
        return cls(ledger, await _acquire(ledger, owner, lease_s))

    async def acquire_again(self) -> None:
        """Take the lease anew after it was lost; a database that is away is waited for.

        Raises:
            LeaseHeldError: Another server has it, and does not end.
        """
        await self._stop()
        while True:
            try:
                self.lease = await _acquire(self._ledger, self.lease.owner, self.lease.lease_s)
                break
            except LedgerUnavailableError as exc:
                _log.warning("waiting for the scheduler's lease: %s", exc)
                await asyncio.sleep(self.lease.lease_s / RENEWALS)
        self._begin()

    async def wait_lost(self) -> LeaseLostError:
        """Return why, when it is lost."""
        return await asyncio.shield(self._keeping)

    async def close(self) -> None:
        """Let go of it, so that the next server need not wait. May be called again."""
        await self._stop()
        try:
            await self._ledger.release_lease(self.lease)
        except LedgerError as exc:
            _log.warning(
                "the lease could not be released, so the next server waits up to %g s for it: %s",
                self.lease.lease_s,
                exc,
            )

    def _begin(self) -> None:
        lease = self.lease
        self._ledger.board.may_work = lambda: lease.is_held
        self._keeping = asyncio.create_task(self._keep(lease), name="service: lease")

    async def _stop(self) -> None:
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    async def _keep(self, lease: Lease) -> LeaseLostError:
        if math.isinf(lease.ends_at):
            await asyncio.get_running_loop().create_future()  # nobody can take it
        while True:
            await asyncio.sleep(lease.lease_s / RENEWALS)
            try:
                await self._renew(lease)
            except LeaseLostError as exc:
                lease.ends_at = 0.0
                return exc

    async def _renew(self, lease: Lease) -> None:
        tries = 0
        while True:
            tries += 1
            # Also where its time is up: nobody may have taken it meanwhile.
            left_s = max(lease.stops_at - time.monotonic(), lease.lease_s / RENEWALS)
            try:
                async with asyncio.timeout(left_s):
                    return await self._ledger.renew_lease(lease)
            except (LedgerUnavailableError, TimeoutError) as exc:
                _log.log(
                    logging.WARNING if tries == 2 else logging.DEBUG,
                    "the scheduler's lease could not be renewed: %s",
                    exc,
                )
                if not lease.is_held:
                    raise LeaseLostError(
                        f"the lease could not be renewed for {lease.lease_s:g} s",
                        remedy="see that PostgreSQL runs and can be reached",
                    ) from exc
            await asyncio.sleep(lease.lease_s / RETRIES)


async def _acquire(ledger: Ledger, owner: str, lease_s: float) -> Lease:
    return await ledger.acquire_lease(owner, lease_s=lease_s, wait_s=WAITED * lease_s)
