"""How much one tenant may have under way: commands, their bytes, and how many in a minute.

What is under way is counted here, by the request ids that this server gave out and has not seen
settled. A result that is fetched, or told of in a feed, is off the count; when a tenant is at its
limit, the ledger is asked about its oldest ones. So the count costs nothing while it is low, and
after a restart it begins at nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.errors import RateLimitError, UnknownEntryError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import TenantId
from tinsmith.server.quotas import Quotas
from tinsmith.server.settings import ServerSettings

RETRY_AFTER_S = 0.5
LOOK_S = 0.1
"""How often the ledger is asked for a tenant that is at its limit, at most."""
_ASKED_AT_ONCE = 256
_MINUTE_S = 60.0


class Admission:
    """Counts what tenants have under way, and refuses what is too much. For one event loop."""

    def __init__(self, ledger: Ledger, settings: ServerSettings, quotas: Quotas) -> None:
        self._ledger = ledger
        self._settings = settings
        self._quotas = quotas
        self._tenants: dict[TenantId, _UnderWay] = {}

    async def admit(self, tenant_id: TenantId, size: int) -> None:
        """Let one more command come in, and count it as coming until `appended` is called.

        Raises:
            RateLimitError: The tenant has too much under way, has asked too often, or has used up
                its tokens.
        """
        quotas = await self._quotas.of(tenant_id)
        await self._quotas.check_tokens(tenant_id)
        under_way = self._under_way(tenant_id)
        self._check_pace(under_way, quotas)
        most = quotas.get("commands_in_flight", self._settings.commands_in_flight)
        most_bytes = quotas.get("bytes_in_flight", self._settings.bytes_in_flight)
        if not under_way.has_room(most, most_bytes, size):
            await self._look_again(under_way)
            if not under_way.has_room(most, most_bytes, size):
                raise RateLimitError(
                    f"{len(under_way.sizes)} commands with {under_way.total_bytes} bytes are under "
                    f"way; {most} with {most_bytes} may be",
                    retry_after_s=RETRY_AFTER_S,
                )
        under_way.coming += 1
        under_way.coming_bytes += size

    def appended(self, tenant_id: TenantId, size: int) -> None:
        """Say that a command which was let in has been appended, or was not after all."""
        under_way = self._under_way(tenant_id)
        under_way.coming -= 1
        under_way.coming_bytes -= size

    def accepted(self, tenant_id: TenantId, request_id: str, size: int) -> None:
        """Count a command."""
        self._under_way(tenant_id).add(request_id, size)

    def settled(self, tenant_id: TenantId, request_id: str) -> None:
        """Take a command off the count."""
        under_way = self._tenants.get(tenant_id)
        if under_way is not None:
            under_way.remove(request_id)

    def under_way(self) -> dict[TenantId, tuple[int, int]]:
        """Commands and bytes under way, by tenant."""
        return {
            tenant_id: (len(found.sizes), found.total_bytes)
            for tenant_id, found in self._tenants.items()
        }

    def _under_way(self, tenant_id: TenantId) -> _UnderWay:
        found = self._tenants.get(tenant_id)
        if found is None:
            found = self._tenants[tenant_id] = _UnderWay()
        return found

    def _check_pace(self, under_way: _UnderWay, quotas: Mapping[str, int]) -> None:
        most = quotas.get("requests_per_minute")
        if most is None:
            return
        wait_s = under_way.take_turn(self._ledger.now(), most)
        if wait_s > 0:
            raise RateLimitError(f"{most} requests in a minute are allowed", retry_after_s=wait_s)

    async def _look_again(self, under_way: _UnderWay) -> None:
        """Ask the ledger about those that were not asked about for longest."""
        now = self._ledger.now()
        if now < under_way.looked_at + LOOK_S:
            return  # whoever is refused again and again must not cost others their turn
        under_way.looked_at = now
        for request_id in list(under_way.sizes)[:_ASKED_AT_ONCE]:
            try:
                command = await self._ledger.command(request_id)
            except UnknownEntryError:
                under_way.remove(request_id)
                continue
            size = under_way.remove(request_id)
            if not command.is_settled:
                under_way.add(request_id, size)  # behind the others, which are asked about next


class _UnderWay:
    """What one tenant has under way, oldest first."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.total_bytes = 0
        self.coming = 0
        self.coming_bytes = 0
        self.looked_at = -LOOK_S
        self._turns: float = 0.0
        self._turns_at = 0.0

    def has_room(self, most: int, most_bytes: int, size: int) -> bool:
        # A single command that is larger than the limit may go alone.
        count, total_bytes = len(self.sizes) + self.coming, self.total_bytes + self.coming_bytes
        return count < most and (not count or total_bytes + size <= most_bytes)

    def add(self, request_id: str, size: int) -> None:
        if request_id not in self.sizes:
            self.sizes[request_id] = size
            self.total_bytes += size

    def remove(self, request_id: str) -> int:
        size = self.sizes.pop(request_id, 0)
        self.total_bytes -= size
        return size

    def take_turn(self, now: float, per_minute: int) -> float:
        """Take one of so many turns in a minute; returns how long to wait if there is none."""
        pace = per_minute / _MINUTE_S
        gained = (now - self._turns_at) * pace if self._turns_at else float(per_minute)
        self._turns = min(float(per_minute), self._turns + gained)
        self._turns_at = now
        if self._turns < 1:
            return (1 - self._turns) / pace if pace > 0 else _MINUTE_S
        self._turns -= 1
        return 0.0
