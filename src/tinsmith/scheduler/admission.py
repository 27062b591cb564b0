"""Samples that wait to be admitted to the engine, and how much more may be claimed.

Samples of one tenant are admitted in the order in which they came, tenants by fair shares
(`fairness.py`). What one takes is guessed from its size and how much it may draw is not known
before it is read, so that a sample counts as so many bytes and a fixed part.

No tenant may fill the engine. Each may hold `SLOTS_PER_FREE` times as many of its slots as stay
free, and the last free one goes to a tenant that holds none. So a tenant alone has eight ninths of
them, the more tenants there are the fewer each has, and one that comes finds a slot.

Knows nothing of engines or the database.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from tinsmith.ledger.records import Command, LineId, RequestId, TenantId
from tinsmith.scheduler.fairness import Shares

SAMPLE_TOKENS = 256
"""What a sample counts beside its prompt, whatever it draws."""
BYTES_PER_TOKEN = 5
"""Of a prompt that is written as JSON."""
SLOTS_PER_FREE = 8
"""How many slots of the engine a tenant may hold for each that is free."""


class SampleQueue:
    """Samples that wait, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[TenantId, OrderedDict[RequestId, Command]] = {}
        self._tenant_of: dict[RequestId, TenantId] = {}
        self._shares = Shares()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def add(self, command: Command) -> None:
        """Let a sample wait. One that waits already does not wait twice."""
        request_id = command.request_id
        if request_id not in self._tenant_of:
            self._tenants.setdefault(command.tenant_id, OrderedDict())[request_id] = command
            self._tenant_of[request_id] = command.tenant_id

    def drop(self, request_id: RequestId) -> bool:
        """Take out a sample that was cancelled; False if it does not wait."""
        tenant = self._tenant_of.get(request_id)
        if tenant is None:
            return False
        self._take(tenant, request_id)
        return True

    def take(self, most: int, *, slots: int, held: Counter[TenantId]) -> list[Command]:
        """The next samples, at most so many.

        Args:
            most: How many.
            slots: How many samples the engine takes.
            held: How many of them each tenant has there.
        """
        chosen: list[Command] = []
        held = held.copy()
        while len(chosen) < most and (free := slots - held.total()) > 0:
            waiting = [one for one in self._tenants if held[one] <= SLOTS_PER_FREE * (free - 1)]
            if not waiting:
                break
            tenant = self._shares.next(waiting)
            command = self._take(tenant, next(iter(self._tenants[tenant])))
            self._shares.give(tenant, SAMPLE_TOKENS + command.payload_bytes / BYTES_PER_TOKEN)
            held[tenant] += 1
            chosen.append(command)
        return chosen

    def waiting_since(self, before: float) -> set[LineId]:
        """The samplers with samples that came before a moment and still wait."""
        return {
            command.line
            for waiting in self._tenants.values()
            for command in waiting.values()
            if command.created_at < before
        }

    def tenants(self) -> int:
        """How many tenants wait."""
        return len(self._tenants)

    def _take(self, tenant: TenantId, request_id: RequestId) -> Command:
        command = self._tenants[tenant].pop(request_id)
        del self._tenant_of[request_id]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        return command
