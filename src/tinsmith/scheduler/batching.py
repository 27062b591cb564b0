"""Which heads of lines share one call of the engine.

Commands share a call if their base model is the same and they are of one sort: passes, or steps of
the optimizer. The tenant that was given least says what sort it is; the rest of the call goes to
whoever has something that fits, tenant by tenant, up to the engine's budget of tokens. A line's
adjacent passes may share a call too: the engine takes them in order.

How many tokens a command has is guessed from its size: it is not read before it is chosen.

Knows nothing of engines or the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence

import msgspec

from tinsmith.ledger.records import Command, LineId, TenantId
from tinsmith.scheduler.fairness import Shares
from tinsmith.scheduler.order import PASSES, STEPS, TRAINING, Order

BYTES_PER_TOKEN = 16
"""Of a training body: an id, a target, and a weight."""


class Batch(msgspec.Struct, frozen=True):
    """Commands that run together, in the order in which they were chosen."""

    base_model: str
    commands: list[Command]

    @property
    def lines(self) -> dict[LineId, list[Command]]:
        """The commands by line, each in its order."""
        found: dict[LineId, list[Command]] = {}
        for command in self.commands:
            found.setdefault(command.line, []).append(command)
        return found


def guessed_tokens(command: Command) -> int:
    """About how many tokens a command has."""
    return max(1, command.payload_bytes // BYTES_PER_TOKEN)


def choose_batch(
    order: Order,
    shares: Shares,
    base_model_of: Callable[[LineId], str],
    *,
    most_tokens: int,
    most_commands: int,
    without: Container[LineId] = (),
) -> Batch | None:
    """The next batch; None if nothing can be trained now. Charges the tenants for it.

    Lines that are among `without` are left out.
    """
    lines = [
        line for line in order.ready() if order.head(line).kind in TRAINING and line not in without
    ]
    if not lines:
        return None
    first = shares.next(list(dict.fromkeys(order.head(line).tenant_id for line in lines)))
    lead = next(line for line in lines if order.head(line).tenant_id == first)
    kinds = PASSES if order.head(lead).kind in PASSES else STEPS
    base_model = base_model_of(lead)
    queues = _queues(
        order,
        [
            line
            for line in lines
            if order.head(line).kind in kinds and base_model_of(line) == base_model
        ],
        kinds,
    )
    return Batch(base_model, _fill(queues, shares, most_tokens, most_commands))


def _queues(
    order: Order, lines: Sequence[LineId], kinds: frozenset[str]
) -> dict[TenantId, deque[deque[Command]]]:
    """What each tenant could put in: its lines, each with the commands that may follow each other.

    A tenant's lines take turns, so that one long line does not keep out the others.
    """
    queues: dict[TenantId, deque[deque[Command]]] = {}
    for line in lines:
        run = deque(order.run_of(line, kinds))
        queues.setdefault(run[0].tenant_id, deque()).append(run)
    return queues


def _fill(
    queues: dict[TenantId, deque[deque[Command]]],
    shares: Shares,
    most_tokens: int,
    most_commands: int,
) -> list[Command]:
    chosen: list[Command] = []
    tokens = 0
    while queues and len(chosen) < most_commands:
        tenant = shares.next(queues)
        lines = queues[tenant]
        cost = guessed_tokens(lines[0][0])
        if chosen and tokens + cost > most_tokens:
            # Somebody else's may still fit, and takes nothing from this tenant.
            del queues[tenant]
            continue
        line = lines.popleft()
        chosen.append(line.popleft())
        tokens += cost
        shares.give(tenant, cost)
        if line:
            lines.append(line)
        elif not lines:
            del queues[tenant]
    return chosen
