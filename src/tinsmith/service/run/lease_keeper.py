"""Keeps the scheduler's lease on the ledger for as long as it can be renewed.

A lease is renewed several times before it expires. When that fails, or when another server has
taken it over, it counts as lost, and the supervisor stops the scheduler. It counts as lost before
it expires in the database, so that nobody else can hold it before this scheduler has stopped.

A process that was paused notices when it resumes; until then `Board.may_work` goes by the clock.

A *standby* waits for the lease for as long as another server holds it. The ledger wakes it when the
lease is released, or expires.
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
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.scheduler_lease import Lease

_log = logging.getLogger(__name__)

RENEWALS = 5
"""How often a lease is renewed before it expires."""
RETRIES = 50
"""How often a failing renewal is retried in that time."""
WAITED = 2.0
"""How long a server waits for the lease, in lease times: the last holder may have been killed a
moment ago, or be stopping."""


class LeaseKeeper:
    """Renews a lease until it is lost or released. For one event loop; made by `acquire`.

    Attributes:
        lease: The lease that is held, or was until it was lost.
        is_standby: Whether it waits for other holders, however long they work.
        is_waiting: Whether it is waiting for the lease now.
    """

    def __init__(self, ledger: Ledger, lease: Lease, *, is_standby: bool = False) -> None:
        self._ledger = ledger
        self.lease = lease
        self.is_standby = is_standby
        self.is_waiting = False
        self._begin()

    @classmethod
    async def acquire(
        cls, ledger: Ledger, lease_s: float, *, is_standby: bool = False
    ) -> LeaseKeeper:
        """Acquire the lease, and renew it from now on.

        Raises:
            LeaseHeldError: Another server holds it and does not stop; never for a standby.
            LedgerUnavailableError: The database cannot be used; never for a standby.
        """
        owner = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
        if is_standby:
            lease = await _wait_for_lease(ledger, owner, lease_s, is_standby=True)
        else:
            lease = await ledger.acquire_lease(owner, lease_s=lease_s, wait_s=WAITED * lease_s)
        return cls(ledger, lease, is_standby=is_standby)

    async def acquire_again(self) -> None:
        """Acquire the lease again after it was lost; waits for a database that is unavailable.

        Raises:
            LeaseHeldError: Another server holds it and does not stop; never for a standby.
        """
        await self._stop()
        self.is_waiting = True
        try:
            self.lease = await _wait_for_lease(
                self._ledger, self.lease.owner, self.lease.lease_s, is_standby=self.is_standby
            )
        finally:
            self.is_waiting = False
        self._begin()

    async def wait_lost(self) -> LeaseLostError:
        """Return why, when it is lost."""
        return await asyncio.shield(self._keeping)

    async def close(self) -> None:
        """Release the lease, so that the next server need not wait. May be called again."""
        await self._stop()
        try:
            await self._ledger.release_lease(self.lease)
        except LedgerError as exc:
            _log.warning(
                "could not release the lease; the next server waits up to %g s for it: %s",
                self.lease.lease_s,
                exc,
            )

    def _begin(self) -> None:
        lease = self.lease
        board = self._ledger.board
        board.may_work, board.epoch = lambda: lease.is_held, lease.epoch
        self._keeping = asyncio.create_task(self._keep(lease), name="service: lease")

    async def _stop(self) -> None:
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    async def _keep(self, lease: Lease) -> LeaseLostError:
        if math.isinf(lease.ends_at):
            await asyncio.get_running_loop().create_future()  # nobody else can take it
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
            # Also after it expired: nobody may have taken it meanwhile.
            left_s = max(lease.stops_at - time.monotonic(), lease.lease_s / RENEWALS)
            try:
                async with asyncio.timeout(left_s):
                    return await self._ledger.renew_lease(lease)
            except (LedgerUnavailableError, TimeoutError) as exc:
                _log.log(
                    logging.WARNING if tries == 2 else logging.DEBUG,
                    "could not renew the scheduler's lease, retrying: %s",
                    exc,
                )
                if not lease.is_held:
                    raise LeaseLostError(
                        f"the lease could not be renewed for {lease.lease_s:g} s",
                        remedy="check that PostgreSQL is running and reachable",
                    ) from exc
            await asyncio.sleep(lease.lease_s / RETRIES)


async def _wait_for_lease(ledger: Ledger, owner: str, lease_s: float, *, is_standby: bool) -> Lease:
    """Acquire the lease; waits for a database that is unavailable."""
    wait_s = math.inf if is_standby else WAITED * lease_s
    while True:
        try:
            return await ledger.acquire_lease(owner, lease_s=lease_s, wait_s=wait_s)
        except LedgerUnavailableError as exc:
            _log.warning("waiting for the scheduler's lease: %s", exc)
            await asyncio.sleep(lease_s / RENEWALS)
