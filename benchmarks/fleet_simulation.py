"""Placement and scheduling of a fleet that no machine here could run, on a simulated clock.

    python -m benchmarks.fleet_simulation [--replicas 10 100 1000]

The decisions are made by the real code, `engine/fleet/placement.py` and
`service/scheduler/batching.py`, and their CPU time is real. Everything else is simulated: a replica
is a number of seconds of work, and time jumps from one event to the next. Each replica has a
hundred adapters of ten clients, so that a thousand replicas have 100,000 adapters of 10,000
clients.

Adapters differ: what they ask of a replica follows a log-normal distribution, in which the largest
of a hundred asks for about ten times the median. Together they ask for 70 % of the fleet.

- *placement*: adapters arrive within an hour. Loads are known as a replica knows its own: as the
  average of the last minute.
- *scheduling*: replicas that become free choose their next batch from the queues of all models.
- *recovery*: a replica is lost with its adapters. It starts again, loads their snapshots and
  replays what those lack.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import heapq
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from tinsmith.engine.base import AdapterId, AdapterSpec, BaseModel, EngineCapacity
from tinsmith.engine.fake.engine import fake_model
from tinsmith.engine.fleet.fleet_engine import FleetEngine
from tinsmith.engine.fleet.placement import ReplicaView, place_adapter
from tinsmith.engine.fleet.replica import LOAD_S, ReplicaSpec
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.service.ledger.records import Command, QueueId, SessionId, TenantId
from tinsmith.service.scheduler.batching import choose_batch, estimated_tokens
from tinsmith.service.scheduler.command_queues import TRAINING, CommandQueues, TenantShares
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types import AdamOptimizerConfig, LoraConfig

ADAPTERS_PER_REPLICA = 100
CLIENTS_PER_REPLICA = 10
MOST_ADAPTERS = 256
CREATED_PER_REPLICA = 10
ASKED = 0.7
"""The part of the fleet that all adapters together ask for."""
SPREAD = 1.0
"""The standard deviation of the logarithm of what an adapter asks for."""
RANKS = (8, 16, 32, 64)
MODELS = {"a": 0.6, "b": 0.3, "c": 0.1}
"""Base models, and the part of adapters and replicas that each has."""
SERVES_ALL = 0.05
"""The part of replicas that serve all of them."""
ARRIVE_S = 3600.0
LOOK_S = 1.0
"""How often the loads are measured; a decision sees those of the last second."""
COMMAND_S = 0.5
"""What a command takes alone; in a batch it takes a tenth of that more."""
BATCH_SHARE = 0.1
PAYLOAD_BYTES = 16 * 2000
START_S = 30.0
"""How long a replica takes to start and load its base model."""
LOAD_SNAPSHOT_S = 0.2
CHOOSING = 10
"""How many replicas choose in a fleet that is overloaded; the others' queues are only there."""

Place = Callable[[Sequence[ReplicaView], str], str | None]


class Adapter(NamedTuple):
    """What is known of an adapter in the simulation."""

    model: str
    rank: int
    client: int
    asks: float
    """The share of a replica's time that it needs."""


class Placed(NamedTuple):
    """How well adapters were placed."""

    worst: float
    """The largest load of a replica, of the mean."""
    overloaded: float
    """The part of replicas that are asked for more than they have."""
    decision_s: float
    homes: list[list[Adapter]]


class Scheduled(NamedTuple):
    """What choosing batches took."""

    batch_s: float
    """CPU time of one choice."""
    commands: float
    """Commands in a batch."""
    ready: float
    """Queues that were ready."""
    fairness: float
    """Jain's index of what busy tenants of one replica were given; 1 is equal."""


def adapters(count: int, replicas: int, chance: random.Random) -> list[Adapter]:
    """The adapters of a fleet."""
    mean = ASKED * replicas / count
    centre = math.log(mean) - SPREAD**2 / 2
    names, weights = list(MODELS), list(MODELS.values())
    clients = max(1, CLIENTS_PER_REPLICA * replicas)
    return [
        Adapter(
            chance.choices(names, weights)[0],
            chance.choice(RANKS),
            chance.randrange(clients),
            chance.lognormvariate(centre, SPREAD),
        )
        for _ in range(count)
    ]


def fleet_serving(replicas: int) -> list[frozenset[str]]:
    """What each replica serves."""
    everyone = max(1, round(SERVES_ALL * replicas))
    found = [frozenset(MODELS)] * everyone
    for name, share in MODELS.items():
        found += [frozenset({name})] * round(share * (replicas - everyone))
    return (found + [frozenset(MODELS)] * replicas)[:replicas]


def simulate_placement(arriving: list[Adapter], replicas: int, place: Place) -> Placed:
    """Let adapters arrive one after another within an hour."""
    serving = fleet_serving(replicas)
    homes: list[list[Adapter]] = [[] for _ in range(replicas)]
    asked, known, held = [0.0] * replicas, [0.0] * replicas, [0] * replicas
    views = [ReplicaView(name=str(n), serves=serving[n]) for n in range(replicas)]
    looked_at, cpu_s = 0.0, 0.0

    def view(number: int) -> ReplicaView:
        return ReplicaView(
            name=str(number),
            serves=serving[number],
            room=MOST_ADAPTERS - len(homes[number]),
            held_bytes=held[number],
            load=min(1.0, known[number]),
        )

    for number, one in enumerate(arriving):
        now = ARRIVE_S * number / len(arriving)
        if now >= looked_at + LOOK_S:
            decay = math.exp(-(now - looked_at) / LOAD_S)
            looked_at = now
            for replica in range(replicas):
                known[replica] += (min(1.0, asked[replica]) - known[replica]) * (1 - decay)
            views = [view(replica) for replica in range(replicas)]
        began = time.process_time()
        name = place(views, one.model)
        cpu_s += time.process_time() - began
        assert name is not None
        chosen = int(name)
        homes[chosen].append(one)
        asked[chosen] += one.asks
        held[chosen] += one.rank
        views[chosen] = view(chosen)
    mean = sum(asked) / replicas
    return Placed(
        max(asked) / mean,
        sum(one > 1.0 for one in asked) / replicas,
        cpu_s / len(arriving),
        homes,
    )


def in_turns() -> Place:
    """Round robin, to compare with: each model's replicas in turns."""
    turns: collections.Counter[str] = collections.Counter()

    def place(views: Sequence[ReplicaView], model: str) -> str | None:
        fitting = [one for one in views if model in one.serves and one.room > 0]
        turns[model] += 1
        return fitting[turns[model] % len(fitting)].name

    return place


class Fleet:
    """Replicas that choose batches from the queues of all models, on a simulated clock.

    Each adapter has one command at a time. The next comes after a pause, so that the adapter gets
    what it asks for; in a fleet that is overloaded it comes at once.

    Args:
        homes: The adapters of each replica.
        chance: Where numbers come from.
        choosing: How many replicas choose; the commands of the others just wait.
        is_overloaded: Whether all adapters ask for all they can get.
    """

    def __init__(
        self,
        homes: list[list[Adapter]],
        chance: random.Random,
        choosing: int,
        *,
        is_overloaded: bool,
    ) -> None:
        self._queues = CommandQueues()
        self._home_of: dict[QueueId, int] = {}
        self._adapter_of: dict[QueueId, Adapter] = {}
        self._numbers: collections.Counter[QueueId] = collections.Counter()
        self._order = itertools.count()
        self._events: list[tuple[float, int, QueueId | int]] = []
        """When, and a queue whose next command comes or a replica that becomes free."""
        self._choosing = range(choosing)
        self._free = set(self._choosing)
        self._waiting = [0] * len(homes)
        self._shares = [TenantShares() for _ in self._choosing]
        self._given = [collections.Counter[TenantId]() for _ in self._choosing]
        self._is_overloaded = is_overloaded
        self._cpu_s, self._batches, self._commands, self._ready = 0.0, 0, 0, 0
        for replica, held in enumerate(homes):
            for place, one in enumerate(held):
                queue_id = QueueId(f"{replica}-{place}")
                self._home_of[queue_id], self._adapter_of[queue_id] = replica, one
                self._queues.begin(queue_id, 0)
                self._later(0.0, chance.random() * self._pause_s(one), queue_id)

    def _later(self, now: float, wait_s: float, who: QueueId | int) -> None:
        heapq.heappush(self._events, (now + wait_s, next(self._order), who))

    def _pause_s(self, one: Adapter) -> float:
        return 0.0 if self._is_overloaded else COMMAND_S / one.asks

    def run(self, batches: int) -> Scheduled:
        """Let time pass until so many batches were chosen."""
        touched: set[int] = set()
        while self._batches < batches:
            now, _, who = heapq.heappop(self._events)
            if isinstance(who, str):
                self._queues.add(self._command(who), now)
                self._waiting[self._home_of[who]] += 1
                touched.add(self._home_of[who])
            else:
                self._free.add(who)
                touched.add(who)
            if not self._events or self._events[0][0] > now:  # nothing else happens now
                for replica in sorted(touched & self._free):
                    if self._waiting[replica]:
                        self._choose(replica, now)
                touched.clear()
        fair = [_jain(list(one.values())) for one in self._given if len(one) > 1]
        return Scheduled(
            self._cpu_s / self._batches,
            self._commands / self._batches,
            self._ready / self._batches,
            sum(fair) / len(fair) if fair else 1.0,
        )

    def _choose(self, replica: int, now: float) -> None:
        """As the training loop does: look which replicas have work, and choose for this one."""
        queues, settings = self._queues, SchedulerSettings()
        began = time.process_time()
        with_work = {
            self._home_of[one]: None for one in queues.ready() if queues.head(one).kind in TRAINING
        }
        batch = choose_batch(
            queues,
            self._shares[replica],
            lambda one: self._adapter_of[one].model,
            most_tokens=settings.most_batch_tokens,
            most_commands=settings.most_batch_commands,
            is_fitting=lambda one: self._home_of[one] == replica,
        )
        self._cpu_s += time.process_time() - began
        assert replica in with_work
        assert batch is not None
        self._batches += 1
        self._ready += len(queues.ready())
        self._commands += len(batch.commands)
        self._free.discard(replica)
        takes_s = COMMAND_S * (1 + BATCH_SHARE * (len(batch.commands) - 1))
        for command in batch.commands:
            self._given[replica][command.tenant_id] += estimated_tokens(command)
            self._waiting[replica] -= 1
            queues.start(command.queue_id)
            queues.finish(command.queue_id, [command], now)
            pause_s = self._pause_s(self._adapter_of[command.queue_id])
            self._later(now, takes_s + pause_s, command.queue_id)
        self._later(now, takes_s, replica)

    def _command(self, queue_id: QueueId) -> Command:
        self._numbers[queue_id] += 1
        return Command(
            ordinal=0,
            queue_id=queue_id,
            seq_id=self._numbers[queue_id] - 1,
            kind="forward_backward",
            tenant_id=TenantId(f"client-{self._adapter_of[queue_id].client}"),
            session_id=SessionId(queue_id),
            clone=None,
            is_ordered=True,
            fingerprint=b"",
            payload_bytes=PAYLOAD_BYTES,
            created_at=0.0,
        )


def _jain(values: list[int]) -> float:
    return float(sum(values) ** 2 / (len(values) * sum(value**2 for value in values)))


class StillEngine:
    """What a fleet calls of a replica's engine to place adapters; it computes nothing."""

    def __init__(self, _: EngineSpec) -> None:
        self._model = fake_model("a")

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def wait_lost(self) -> None:
        """Never return: it is not lost."""
        await asyncio.Event().wait()

    async def create_adapter(self, _: AdapterSpec) -> None:
        """Do nothing."""

    def base_models(self) -> tuple[BaseModel, ...]:
        """One model."""
        return (self._model,)

    def capacity(self) -> EngineCapacity:
        """Room for many adapters."""
        return EngineCapacity(
            most_adapters=MOST_ADAPTERS, adapters=0, most_samples=1, samples=0, batch_tokens=65_536
        )


async def creation_s(replicas: int) -> float:
    """The CPU time of `FleetEngine.create_adapter` alone, with ten adapters on each replica."""
    engine = EngineSpec(engine="fake", models=(ModelSource("a", "a"),))
    specs = [ReplicaSpec(name=f"replica-{n}", engine=engine) for n in range(replicas)]
    make = cast("Callable[[EngineSpec], ProcessEngine]", StillEngine)
    cpu_s = 0.0
    async with FleetEngine(specs, make=make) as fleet:
        for number in range(CREATED_PER_REPLICA * replicas):
            spec = AdapterSpec(
                adapter_id=AdapterId(f"adapter-{number}"),
                base_model="a",
                lora=LoraConfig(rank=RANKS[number % len(RANKS)]),
                optimizer=AdamOptimizerConfig(),
            )
            began = time.process_time()
            await fleet.create_adapter(spec)
            cpu_s = (0.0 if number == (CREATED_PER_REPLICA - 1) * replicas else cpu_s) + (
                time.process_time() - began
            )
    return cpu_s / replicas


def recovery_s(held: list[Adapter], chance: random.Random) -> tuple[float, float]:
    """How long the adapters of a lost replica take to be back: on its successor, and spread out.

    An adapter with pauses is snapshotted in them, as soon as a second of work is not covered; one
    without pauses after thirty.
    """
    settings = SchedulerSettings()
    work_s = []
    for one in held:
        has_pauses = COMMAND_S / one.asks > settings.snapshot_idle_s
        uncovered_s = settings.snapshot_idle_work_s if has_pauses else settings.snapshot_work_s
        work_s.append(LOAD_SNAPSHOT_S + chance.uniform(0.0, uncovered_s))
    spare = 1.0 - ASKED
    return START_S + sum(work_s), max(work_s) / spare


def main() -> None:
    """Simulate, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    placing, scheduling = [], []
    for replicas in given.replicas:
        chance = random.Random(given.seed)
        arriving = adapters(ADAPTERS_PER_REPLICA * replicas, replicas, chance)
        ours = simulate_placement(arriving, replicas, place_adapter)
        turns = simulate_placement(arriving, replicas, in_turns())
        back = [recovery_s(held, chance) for held in ours.homes]
        placing.append(
            f"| {replicas:,} | {len(arriving):,} | {ours.worst:.2f} | {ours.overloaded:.1%} | "
            f"{turns.worst:.2f} | {turns.overloaded:.1%} | {ours.decision_s * 1e6:.0f} µs | "
            f"{asyncio.run(creation_s(replicas)) * 1e6:,.0f} µs | "
            f"{sum(one for one, _ in back) / replicas:.0f} s | "
            f"{sum(one for _, one in back) / replicas:.0f} s |"
        )
        for is_overloaded in (False, True):
            choosing = CHOOSING if is_overloaded else replicas
            fleet = Fleet(ours.homes, chance, choosing, is_overloaded=is_overloaded)
            found = fleet.run(given.batches // (10 if is_overloaded else 1))
            scheduling.append(
                f"| {replicas:,} | {'all adapters' if is_overloaded else f'{ASKED:.0%}'} | "
                f"{found.ready:,.0f} | {found.commands:.1f} | {found.batch_s * 1e6:,.0f} µs | "
                f"{found.batch_s / found.commands * 1e6:,.0f} µs | "
                f"{found.fairness if is_overloaded else math.nan:.2f} |".replace("nan", "–")
            )
        print(placing[-1], *scheduling[-2:], sep="\n", file=sys.stderr, flush=True)
    print(
        "| replicas | adapters | worst load | overloaded | round robin: worst | overloaded |",
        end="",
    )
    print(" CPU per decision | per creation | recovery | if spread |")
    print("|---|---|---|---|---|---|---|---|---|---|", *placing, "", sep="\n")
    print("| replicas | busy | ready queues | commands per batch | CPU per batch |", end="")
    print(" CPU per command | fairness |")
    print("|---|---|---|---|---|---|---|", *scheduling, "", sep="\n")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
