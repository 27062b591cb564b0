"""Whether a command costs more as a service grows: models, settled commands, tenants.

    python -m benchmarks.growth [--commands 400] [--rounds 3] [--settled 1000 100000 1000000]

Real services, each a process with SQLite and the fake engine, and one client process: this one.
Their ledgers are filled through the ledger's own interface before they start. Commands are
optimizer steps, eight in flight, which go round over the models. All services run at the same time
and are measured in turns, so that what else the machine does affects all of them; a figure is the
median over the rounds. CPU time is the service's own, over all of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tinsmith
from benchmarks.workloads.service import MODEL, SCRATCH, Served
from tinsmith.service.api.keys import add_tenant, create_key
from tinsmith.service.ledger.records import (
    QueueId,
    RequestId,
    SessionId,
    Settlement,
    Submission,
    TenantId,
)
from tinsmith.service.ledger.sqlite import SqliteLedger

IN_FLIGHT = 8
MODELS_AT_ONCE = 32
QUEUE_COMMANDS = 1000
"""How many settled commands a model of the past had."""
PAYLOAD = b"x" * 200
"""About the size of the request and of the result of an optimizer step."""
CLOSE_S = 60.0
PARAMS = tinsmith.AdamParams(learning_rate=1e-4)


class Size(NamedTuple):
    """How large a service is."""

    models: int
    settled: int
    tenants: int


class Turn(NamedTuple):
    """What one turn measured, per command."""

    cpu_s: float
    p50_s: float


def sizes(models: Sequence[int], settled: Sequence[int], tenants: Sequence[int]) -> list[Size]:
    """The smallest, each larger value with the others at their smallest, and the largest."""
    least = Size(models[0], settled[0], tenants[0])
    found = [least]
    found += [least._replace(models=more) for more in models[1:]]
    found += [least._replace(settled=more) for more in settled[1:]]
    # Each tenant needs a model, so both rows have the same number of them.
    for more in tenants[1:]:
        found += [least._replace(models=more), least._replace(models=more, tenants=more)]
    return list(dict.fromkeys([*found, Size(models[-1], settled[-1], tenants[-1])]))


async def fill(folder: Path, settled: int) -> None:
    """Add commands that were appended, settled, acknowledged, and covered by a snapshot."""
    async with await SqliteLedger.open(folder) as ledger:
        for number in range(0, settled, QUEUE_COMMANDS):
            queue_id = QueueId(f"past-{number}:train:0")
            count = min(QUEUE_COMMANDS, settled - number)
            await asyncio.gather(
                *(ledger.append(_submission(queue_id, seq_id)) for seq_id in range(count))
            )
            await ledger.claim("past", limit=count)
            requests = [RequestId(f"{queue_id}:{seq_id}") for seq_id in range(count)]
            await ledger.settle([Settlement(request_id=one, payload=PAYLOAD) for one in requests])
            await ledger.acknowledge(requests)
            await ledger.record_snapshot(queue_id, count, None)


def _submission(queue_id: QueueId, seq_id: int) -> Submission:
    return Submission(
        queue_id=queue_id,
        seq_id=seq_id,
        kind="optim_step",
        tenant_id=TenantId("tenant-0"),
        session_id=SessionId(queue_id.partition(":")[0]),
        fingerprint=b"%032d" % seq_id,
        payload=PAYLOAD,
    )


async def add_keys(folder: Path, tenants: int) -> list[str]:
    """A key for each tenant."""
    async with await SqliteLedger.open(folder) as ledger:
        made = [await add_tenant(ledger, f"tenant-{number}") for number in range(tenants)]
        return [(await create_key(ledger, tenant, "bench"))[1] for tenant in made]


class Grown:
    """A service of one size, and clients with its models."""

    def __init__(self, size: Size, filled: Path, folder: Path) -> None:
        self.size = size
        shutil.copytree(filled, folder / "ledger")
        self._keys = asyncio.run(add_keys(folder / "ledger", size.tenants))
        most = str(size.models + 1)
        self._service = Served(folder, "--limits-models", most, "--limits-adapters", most)
        self._clients = [
            tinsmith.ServiceClient(base_url=self._service.url, api_key=key) for key in self._keys
        ]
        self._trainings: list[tinsmith.TrainingClient] = []

    async def add_models(self) -> None:
        """Make the models, the tenants' in turns, and run a command of each."""
        clients = itertools.islice(itertools.cycle(self._clients), self.size.models)
        places = asyncio.Semaphore(MODELS_AT_ONCE)

        async def add(client: tinsmith.ServiceClient) -> tinsmith.TrainingClient:
            async with places:
                made = await client.create_lora_training_client_async(MODEL, rank=1)
                await (await made.optim_step_async(PARAMS))
                return made

        self._trainings = await asyncio.gather(*map(add, clients))

    async def turn(self, commands: int) -> Turn:
        """Run so many commands."""
        trainings = itertools.islice(itertools.cycle(self._trainings), commands)
        latencies: list[float] = []

        async def worker() -> None:
            for training in trainings:
                asked = time.perf_counter()
                await (await training.optim_step_async(PARAMS))
                latencies.append(time.perf_counter() - asked)

        used = self._service.cpu_s()
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        cpu_s = self._service.cpu_s() - used
        return Turn(cpu_s / commands, statistics.median(latencies))

    def end(self) -> None:
        """Close the clients and end the service."""
        for client in self._clients:
            client.close().result(CLOSE_S)
        self._service.kill()


def measure(
    all_sizes: Sequence[Size], commands: int, rounds: int, folder: Path
) -> dict[Size, list[Turn]]:
    """The turns of each size."""
    filled: dict[int, Path] = {}
    for settled in sorted({size.settled for size in all_sizes}):
        began = time.perf_counter()
        filled[settled] = folder / f"settled-{settled}"
        asyncio.run(fill(filled[settled], settled))
        _tell(f"{settled} settled commands in {time.perf_counter() - began:.0f} s")
    services: list[Grown] = []
    turns: dict[Size, list[Turn]] = {size: [] for size in all_sizes}
    try:
        for number, size in enumerate(all_sizes):
            services.append(Grown(size, filled[size.settled], folder / f"service-{number}"))
            asyncio.run(services[-1].add_models())
            _tell(f"{size} is ready")
        for number in range(rounds + 1):
            for service in services[:: -1 if number % 2 else 1]:
                turn = asyncio.run(service.turn(commands))
                if number:  # the first warms up
                    turns[service.size].append(turn)
        return turns
    finally:
        for service in services:
            service.end()


def table(turns: dict[Size, list[Turn]]) -> str:
    """The medians, and each size's CPU time as a multiple of the first's."""
    lines = [
        "| models | settled commands | tenants | CPU per command | of the smallest | p50 |",
        "|---|---|---|---|---|---|",
    ]
    least = statistics.median(turn.cpu_s for turn in next(iter(turns.values())))
    for size, found in turns.items():
        cpu_s = statistics.median(turn.cpu_s for turn in found)
        p50_s = statistics.median(turn.p50_s for turn in found)
        lines.append(
            f"| {size.models:,} | {size.settled:,} | {size.tenants} | {cpu_s * 1e3:.2f} ms | "
            f"{cpu_s / least:.2f}× | {p50_s * 1e3:.1f} ms |"
        )
    return "\n".join([*lines, "", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"])


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commands", type=int, default=400, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--settled", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 64])
    given = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="growth-", dir=SCRATCH) as folder:
        all_sizes = sizes(given.models, given.settled, given.tenants)
        print(table(measure(all_sizes, given.commands, given.rounds, Path(folder))))


if __name__ == "__main__":
    main()
