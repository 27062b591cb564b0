"""What the loss of a replica costs the tenants of the others.

    python -m benchmarks.replica_loss [--rounds 3] [--seconds 4]

A scheduler over SQLite and three replicas, each a process, whose engines sleep instead of
computing, so that replicas do not compete for this machine's cores. Twelve tenants have one model
each and a command in flight. One replica is killed (-9); what the tenants of the other two get done
from then until its models run again is compared with the same time before.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.integration.service.scheduler.bench import BASE, Bench
from tinsmith.engine.base import AdapterId
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fleet.fleet_engine import FleetEngine
from tinsmith.engine.fleet.replica import ReplicaSpec
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.service.ledger.sqlite import SqliteLedger
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings

REPLICAS = 3
MODELS = [f"session-{number}:train:0" for number in range(4 * REPLICAS)]
BATCH_S = 0.05
WARM_UP_S = 1.0


class Loss(NamedTuple):
    """What one loss did."""

    recovered_s: float
    """From the kill until each of the lost models has settled a command."""
    before: float
    """Commands per second of the other tenants, before."""
    meanwhile: float
    """... and from the kill to the recovery."""


async def measure(folder: Path, seconds: float) -> Loss:
    """Train for a while, kill a replica, and train until its models are back."""
    engine = EngineSpec(
        engine="fake", models=(ModelSource(BASE, BASE),), fake=FakeSettings(batch_s=BATCH_S)
    )
    specs = [ReplicaSpec(name=f"r{number}", engine=engine) for number in range(REPLICAS)]
    async with await SqliteLedger.open(folder / "ledger") as ledger:
        bench = Bench(folder, ledger)
        fleet = FleetEngine(specs, folder=folder / "fleet")
        bench.engine = fleet
        bench.scheduler = Scheduler(ledger, fleet, bench.store, SchedulerSettings())
        await bench.open()
        try:
            return await _lose_one(bench, fleet, seconds)
        finally:
            await bench.close()


async def _lose_one(bench: Bench, fleet: FleetEngine, seconds: float) -> Loss:
    settled: dict[str, list[float]] = collections.defaultdict(list)
    for model in MODELS:
        await bench.result(await bench.create(model, tenant=model[:10]))

    async def train(model: str) -> None:
        for number in itertools.count(1):
            await bench.result(await bench.step(model, number, tenant=model[:10]))
            settled[model].append(time.monotonic())

    tasks = [asyncio.create_task(train(model)) for model in MODELS]
    await asyncio.sleep(WARM_UP_S + seconds)
    [lost, *_] = fleet.replicas()
    homes = {model: fleet.replica_of(AdapterId(model)) for model in MODELS}
    gone = [model for model, home in homes.items() if home == lost.name]
    killed_at = time.monotonic()
    assert gone
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    while not all(settled[model][-1] > killed_at + BATCH_S for model in gone):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    back_at = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    def rate(since: float, until: float) -> float:
        others = (settled[model] for model in MODELS if model not in gone)
        return sum(since < at <= until for at in itertools.chain(*others)) / (until - since)

    return Loss(back_at - killed_at, rate(killed_at - seconds, killed_at), rate(killed_at, back_at))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="before the loss")
    given = parser.parse_args()
    found = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="tinsmith-loss-") as folder:
            found.append(asyncio.run(measure(Path(folder), given.seconds)))
        print(found[-1], file=sys.stderr, flush=True)
    print("| lost models run again after | other tenants before | meanwhile | share |")
    print("|---|---|---|---|")
    for one in sorted(found, key=lambda one: one.meanwhile / one.before):
        print(
            f"| {one.recovered_s:.1f} s | {one.before:.0f} commands/s | "
            f"{one.meanwhile:.0f} commands/s | {one.meanwhile / one.before:.0%} |"
        )
    median = statistics.median(one.meanwhile / one.before for one in found)
    print(f"\nmedian {median:.0%}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
