"""Commands per second with 1, 2 and 4 API servers over one PostgreSQL database.

    python -m benchmarks.api_servers [--seconds 6] [--rounds 3] [--servers 1 2 4]

Real processes: PostgreSQL, one scheduler with the fake engine, the API servers, and clients in
processes of their own, which keep a few training commands in flight each. Everything shares this
machine's cores, so that more servers have no more CPU; what is asked is whether the ledger's write
lock makes more servers slower. Each server reports how long its changes have held the lock; the
seconds per command give the rate at which it would be held all the time, whatever the number of
servers.

Each round starts everything anew, and rounds alternate between the numbers of servers. The best
round counts, in which other programs disturbed least; the range is shown beside it. It takes two to
three minutes.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract import postgres_server
from tests.e2e.service.several_servers import Fleet, fleet

CLIENTS = 32
PROCESSES = 2
IN_FLIGHT = 8
METRICS_S = 6.0
"""Servers read the ledger's figures every five seconds."""


class Round(NamedTuple):
    """What one round measured. Times are of all servers together."""

    per_second: float
    held_s: float
    """How long the lock was held for one command."""
    busy: float
    """The part of the time for which it was held."""
    cpu_s: float
    """What the servers and the database computed for one command."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.seconds)
        return
    rounds: dict[int, list[Round]] = collections.defaultdict(list)
    for number in range(arguments.rounds):
        for servers in arguments.servers[:: -1 if number % 2 else 1]:
            rounds[servers].append(measure(servers, arguments.seconds))
            print(servers, rounds[servers][-1], file=sys.stderr, flush=True)
    print(table(rounds))


def measure(servers: int, seconds: float) -> Round:
    """One round with so many API servers."""
    with (
        tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder,
        fleet(Path(folder), "--snapshots-every-commands", "2000") as started,
    ):
        apis, _ = started.start_all(servers, 1)
        before, used = lock_held_s(started), cpu_s(started)
        began = time.monotonic()
        done = run_load([api.base_url for api in apis], seconds)
        took_s, used = time.monotonic() - began, cpu_s(started) - used
        time.sleep(METRICS_S)
        after = lock_held_s(started)
    held_s = after - before
    return Round(done / seconds, held_s / done, held_s / took_s, used / done)


def cpu_s(started: Fleet) -> float:
    """The CPU time of all servers and of the database until now."""
    servers = {server.pid for server in started.servers}
    database = postgres_server.server().get_pid()
    total_s = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        pid, parent = int(folder.name), int(fields[1])
        if pid in servers or database in (pid, parent):
            ticks = fields[11:15] if pid == database else fields[11:13]
            total_s += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total_s


def lock_held_s(started: Fleet) -> float:
    """How long the lock was held, in seconds, by all servers together."""
    name, total_s = "tinsmith_ledger_lock_held_seconds_total ", 0.0
    for server in started.servers:
        with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        total_s += float(next((one.split()[1] for one in lines if one.startswith(name)), 0.0))
    return total_s


def run_load(urls: list[str], seconds: float) -> int:
    """Commands that clients in processes of their own got settled in so many seconds."""
    command = [sys.executable, "-m", "benchmarks.api_servers", "--seconds", str(seconds)]
    running = [
        subprocess.Popen([*command, "--load", *urls], stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    return sum(int(one.communicate()[0].split()[-1]) for one in running)


def load(urls: list[str], seconds: float) -> None:
    """Train with several clients for a while; prints how many commands were settled."""
    import tinsmith

    counts: collections.Counter[int] = collections.Counter()
    ready = threading.Barrier(CLIENTS // PROCESSES)

    def train(number: int) -> None:
        url = urls[number % len(urls)]
        with tinsmith.ServiceClient(base_url=url, api_key="tml-any") as service:
            training = service.create_lora_training_client("Qwen/Qwen3-8B:fake", rank=1, seed=1)
            waiting: collections.deque[Any] = collections.deque()
            ready.wait()
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                waiting.append(training.optim_step(tinsmith.AdamParams(learning_rate=0.1)))
                if len(waiting) >= IN_FLIGHT:
                    waiting.popleft().result(120)
                    counts[number] += 1

    threads = [
        threading.Thread(target=train, args=(number,)) for number in range(CLIENTS // PROCESSES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts.values()), flush=True)


def table(rounds: dict[int, list[Round]]) -> str:
    """The best round of each number of servers, as a table in Markdown."""
    lines = [
        "| servers | commands/s | range | lock held per command | lock held | CPU per command |",
        "|---|---|---|---|---|---|",
    ]
    for servers, found in sorted(rounds.items()):
        best, worst = max(found), min(found)
        lines.append(
            f"| {servers} | {best.per_second:.0f} | {worst.per_second:.0f}–{best.per_second:.0f} | "
            f"{best.held_s * 1e6:.0f} µs: at most {1 / best.held_s:.0f}/s | "
            f"{best.busy:.0%} of the time | {best.cpu_s * 1e3:.2f} ms |"
        )
    return "\n".join([*lines, "", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"])


if __name__ == "__main__":
    main()
