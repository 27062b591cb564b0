"""Chooses which commands at the heads of the queues share one call of the engine.

Commands share a call if they train the same base model and are of one sort: forward/backward
passes, or optimizer steps. The tenant that has used least decides which sort runs; the rest of the
batch is filled tenant by tenant, up to the token budget. Adjacent passes of one queue may share a
call too: the engine runs them in order.

The number of tokens is estimated from the payload's size, because a command is read only after it
was chosen. Knows nothing of engines or the database.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Container, Iterable

import msgspec

from tinsmith.service.ledger.records import Command, QueueId, TenantId
from tinsmith.service.scheduler.command_queues import (
    PASSES,
    STEPS,
    TRAINING,
    CommandQueues,
    TenantShares,
)

BYTES_PER_TOKEN = 16
"""Of a training body: a token id, a target, and a weight."""


class Batch(msgspec.Struct, frozen=True):
    """Commands that run together, in the order in which they were chosen."""

    base_model: str
    commands: list[Command]

    @property
    def by_queue(self) -> dict[QueueId, list[Command]]:
        """The commands of each queue, in order."""
        found: dict[QueueId, list[Command]] = {}
        for command in self.commands:
            found.setdefault(command.queue_id, []).append(command)
        return found


def estimated_tokens(command: Command) -> int:
    """Roughly how many tokens a command has; at least 1."""
    return max(1, command.payload_bytes // BYTES_PER_TOKEN)


def choose_batch(
    queues: CommandQueues,
    shares: TenantShares,
    base_model_of: Callable[[QueueId], str],
    *,
    most_tokens: int,
    most_commands: int,
    without: Container[QueueId] = (),
    is_fitting: Callable[[QueueId], bool] = lambda _: True,
) -> Batch | None:
    """Choose the next batch and charge its tenants; None if nothing can be trained now.

    Queues in `without`, and those that are not fitting, are left out.
    """
    heads = {
        queue_id: head
        for queue_id in queues.ready()
        if (head := queues.head(queue_id)).kind in TRAINING
        and queue_id not in without
        and is_fitting(queue_id)
    }
    if not heads:
        return None
    tenant = shares.next(list(dict.fromkeys(head.tenant_id for head in heads.values())))
    lead = next(head for head in heads.values() if head.tenant_id == tenant)
    kinds = PASSES if lead.kind in PASSES else STEPS
    base_model = base_model_of(lead.queue_id)
    runs = [
        queues.run_of(queue_id, kinds)
        for queue_id, head in heads.items()
        if head.kind in kinds and base_model_of(queue_id) == base_model
    ]
    return Batch(base_model, _fill(runs, shares, most_tokens, most_commands))


def _fill(
    runs: Iterable[list[Command]], shares: TenantShares, most_tokens: int, most_commands: int
) -> list[Command]:
    """Take one command at a time: tenants by fair shares, a tenant's queues in rotation."""
    waiting: dict[TenantId, deque[deque[Command]]] = {}
    for run in runs:
        waiting.setdefault(run[0].tenant_id, deque()).append(deque(run))
    # Only the tenant that is served changes its place, so each batch sorts its tenants once.
    turns = [(shares.given(tenant), place, tenant) for place, tenant in enumerate(waiting)]
    heapq.heapify(turns)
    chosen: list[Command] = []
    tokens = 0
    while turns and len(chosen) < most_commands:
        _, place, tenant = heapq.heappop(turns)
        own = waiting[tenant]
        cost = estimated_tokens(own[0][0])
        if chosen and tokens + cost > most_tokens:
            continue  # another tenant's command may still fit
        queue = own.popleft()
        chosen.append(queue.popleft())
        tokens += cost
        shares.charge(tenant, cost)
        if queue:
            own.append(queue)
        if own:
            heapq.heappush(turns, (shares.given(tenant), place, tenant))
    return chosen
