"""Clients train on a cluster that faults happen to, and get what they get from an undisturbed one.

    scripts/chaos --events 50 --seed 1
    scripts/chaos --events 50 --seed 1 --engine fake

Two runs on the same cluster: one undisturbed, one with faults that follow from the seed. Eight
clients, each a process, half of them with the official SDK. Clients and faults wait for each other:
each fault happens in the midst of training, and there are as many as were asked for.

What is proven: every loss, logprob, sample and saved weight of the second run is that of the first,
to the last bit; the database has seen every command settled exactly once, and none failed; and what
was charged is the same. `test_chaos.py` is the short form.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tinsmith
from tests.e2e.chaos.cluster import FAULTS, Cluster, Fault, cluster
from tests.e2e.service.served import BASE_MODEL
from tests.e2e.service.training_run import API_KEY, WAIT_S

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = 8
REPLICAS = "count=3,duty=both,threads=1"
LOOK_S = 0.02
SEEN = (
    "acquired the scheduler's lease",
    " was lost with ",
    "commands run again",
    "lost the connection to the ledger's database",
    "the checkpoint store is unavailable",
)
"""What servers log of faults that they have noticed."""
STALL_S = 240.0
"""How long nothing may happen; a scheduler with its replicas starts within it on a busy machine."""


class Client:
    """A process that trains, one step at a time as it is allowed to."""

    def __init__(self, sdk: str, model: str, seed: int, steps: int, urls: list[str]) -> None:
        program = ("-m", "tests.e2e.chaos.client_program", sdk, model, str(seed), str(steps))
        self.name = f"{sdk} {seed}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, *program, *urls],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._allowed = 0
        self.steps_done = 0
        self.last_line = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_line = line
            self.steps_done += line == "step\n"

    def allow(self, steps: int) -> None:
        """Let it take so many steps in all."""
        assert self._process.stdin is not None
        if steps > self._allowed and self._process.poll() is None:
            self._process.stdin.write("\n" * (steps - self._allowed))
            self._process.stdin.flush()
            self._allowed = steps

    def check(self) -> None:
        """Raise if it has failed."""
        assert self._process.poll() in (None, 0), self._failure()

    def result(self) -> dict[str, Any]:
        """Everything that was computed for it."""
        code = self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert code == 0, self._failure()
        found: dict[str, Any] = json.loads(self.last_line)
        return found

    def _failure(self) -> str:
        self._log.seek(0)
        return f"{self.name} failed:\n{self._log.read()[-4000:]}"

    def end(self) -> None:
        """Let nothing of it stay behind."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._reader.join(WAIT_S)
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


class Numbers(NamedTuple):
    """What a run came to, by client. All of it follows from the seeds."""

    computed: list[dict[str, Any]]
    weights: list[dict[str, str]]
    """The digests of the files of each last checkpoint."""
    charged: list[dict[str, float]]
    """Usage of each client's models, by kind."""


def planned_faults(seed: int, events: int) -> list[Fault]:
    """Rounds of all faults, each round in an order that follows from the seed."""
    chance, planned = random.Random(seed), list[Fault]()
    while len(planned) < events:
        planned += chance.sample(FAULTS, len(FAULTS))
    return planned[:events]


class Faults:
    """The faults of a run, as they follow from its seed. Each has a thread while it lasts."""

    def __init__(self, hit: Cluster, seed: int, events: int) -> None:
        self._cluster = hit
        self._chance = random.Random(seed)
        self._planned = planned_faults(seed, events)
        self._pool = ThreadPoolExecutor(max(1, events))
        self._running: dict[str, Future[None]] = {}
        self._all: list[Future[None]] = []
        self._began = time.monotonic()
        self.happened = 0

    @property
    def are_over(self) -> bool:
        """Whether all have happened."""
        return self.happened == len(self._planned)

    def begin_next(self) -> None:
        """Begin the next one, unless its target still has another one."""
        fault = self._planned[self.happened]
        previous = self._running.get(fault.target)
        if previous is not None and not previous.done():
            return
        lasts_s = self._chance.uniform(0.2, 1.0) * fault.longest_s
        chance = random.Random(self._chance.random())
        self.happened += 1
        print(
            f"{time.monotonic() - self._began:7.1f} s: {self.happened}: {fault.name}"
            f" for {lasts_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        self._running[fault.target] = self._pool.submit(self._let_happen, fault, lasts_s, chance)
        self._all.append(self._running[fault.target])

    def _let_happen(self, fault: Fault, lasts_s: float, chance: random.Random) -> None:
        undo = fault.begin(self._cluster, chance)
        time.sleep(lasts_s)
        undo()

    def check(self) -> None:
        """Raise what went wrong with one that is over."""
        for one in self._all:
            if one.done():
                one.result()

    def finish(self) -> None:
        """Wait until all are undone."""
        self._pool.shutdown()
        self.check()


def train(
    hit: Cluster, urls: list[str], *, clients: int, steps: int, seed: int = 0, events: int = 0
) -> Numbers:
    """Have clients train while faults happen; returns what they got.

    Args:
        hit: The cluster.
        urls: The address of its load balancer, and those of its servers.
        clients: How many; every second one has the official SDK.
        steps: Of each client.
        seed: Of the faults.
        events: How many faults.
    """
    began = time.monotonic()
    runs = [
        Client("tinker", hit.model, number, steps, urls[:1])
        if number % 2
        else Client("tinsmith", hit.model, number, steps, urls[1:])
        for number in range(clients)
    ]
    faults = Faults(hit, seed, events)
    last, moved_at = (0.0, 0), began
    try:
        while not faults.are_over or any(run.steps_done < steps for run in runs):
            share = (faults.happened + 1) / (events + 1)
            for run in runs:
                run.check()
                run.allow(min(steps, int(share * steps) + 1))
            done = sum(run.steps_done for run in runs) / (clients * steps)
            if not faults.are_over and done >= (faults.happened + 0.5) / (events + 1) - 1e-9:
                faults.begin_next()
            faults.check()
            moved = (done, faults.happened)
            if moved != last:
                last, moved_at = moved, time.monotonic()
            assert time.monotonic() < moved_at + STALL_S, f"no progress\n{hit.logs()}"
            time.sleep(LOOK_S)
        for run in runs:
            run.allow(steps + 1)  # one more, to finish
        computed = [run.result() for run in runs]
    finally:
        faults.finish()
        for run in runs:
            run.end()
    print(f"{time.monotonic() - began:.0f} s with {faults.happened} faults", file=sys.stderr)
    return _numbers(hit, urls, computed)


def _numbers(hit: Cluster, urls: list[str], computed: list[dict[str, Any]]) -> Numbers:
    charged = []
    for one in computed:
        session = one["state"].removeprefix("tinker://").partition(":")[0]
        rows = hit.fetch(
            "SELECT kind, sum(amount) FROM usage WHERE kind = 'training'"
            f" AND session_id = '{session}' GROUP BY kind"
        )
        charged.append({kind: float(amount) for kind, amount in rows})
    weights = [_digests(urls[0], one.pop("weights")) for one in computed]
    for one in computed:
        one.pop("state")  # it names a session
    return Numbers(computed, weights, charged)


def _digests(base_url: str, path: str) -> dict[str, str]:
    rest = tinsmith.RestClient(base_url=base_url, api_key=API_KEY)
    url = rest.get_checkpoint_archive_url_from_tinker_path(path).result(WAIT_S).url
    with urllib.request.urlopen(url, timeout=60.0) as reply:
        content = io.BytesIO(reply.read())
    found = {}
    with tarfile.open(fileobj=content) as archive:
        for member in archive.getmembers():
            if (file := archive.extractfile(member)) is not None:
                found[member.name] = hashlib.sha256(file.read()).hexdigest()
    return found


def wrong_settlements(hit: Cluster) -> list[str]:
    """What the database has seen of commands that were not settled exactly once, and well."""
    wrong = [
        f"{kind} {line}:{number} is not settled: state {state}"
        for kind, line, number, state in hit.fetch(
            "SELECT kind, line, seq_id, state FROM commands WHERE state <> 2"
        )
    ]
    for command, change, count in hit.fetch(
        "SELECT command, change, count(*) FROM chaos_settlements GROUP BY command, change"
    ):
        if change != "INSERT" or count != 1:
            wrong.append(f"command {command}: {count} × {change}")
    for kind, line, number, content in hit.fetch(
        "SELECT kind, c.line, seq_id, content FROM commands c JOIN results r"
        " ON r.command = c.ordinal WHERE is_failed = 1"
    ):
        wrong.append(f"{kind} {line}:{number} failed: {bytes(content or b'')[:300]!r}")
    [[settled]] = hit.fetch("SELECT count(*) FROM commands")
    [[seen]] = hit.fetch("SELECT count(DISTINCT command) FROM chaos_settlements")
    if seen != settled:
        wrong.append(f"{settled} commands, of which {seen} were seen to be settled")
    return wrong


def differences(expected: Numbers, found: Numbers) -> list[str]:
    """Which numbers of which client differ."""
    different = []
    for name in Numbers._fields:
        pairs = zip(getattr(expected, name), getattr(found, name), strict=True)
        for number, (one, other) in enumerate(pairs):
            keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
            different += [f"client {number}: {name} {key}" for key in keys]
    return different


def run(
    folder: Path, *, events: int, seed: int, steps: int, clients: int = CLIENTS, engine: str
) -> list[str]:
    """An undisturbed run and one with faults; returns what is wrong with the second."""
    model = BASE_MODEL
    if engine == "embedded":
        from tests.numerics.small_models import make_model

        make_model(folder / "model")
        model = f"{BASE_MODEL}={folder / 'model'}"
    arguments = ("--replica", REPLICAS)
    with cluster(folder, *arguments, engine=engine, model=model) as (hit, urls):
        expected = train(hit, urls, clients=clients, steps=steps)
        found = train(hit, urls, clients=clients, steps=steps, seed=seed, events=events)
        wrong = [*wrong_settlements(hit), *differences(expected, found)]
        kinds = collections.Counter(
            dict(hit.fetch("SELECT kind, count(*) FROM commands GROUP BY kind"))
        )
        print(f"{kinds.total()} commands: {dict(kinds)}", file=sys.stderr)
        logs = "".join(one.log.read_text(errors="replace") for one in hit.servers)
        seen = {text: logs.count(text) for text in SEEN}
        print(f"seen in logs: {seen}", file=sys.stderr)
        if wrong:
            print(hit.logs(), file=sys.stderr)
        return wrong


def main() -> None:
    """Run as the arguments say; the status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=50, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--steps", type=int, help="of each client; half as many as faults")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--engine", choices=("embedded", "fake"), default="embedded")
    given = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tests/conftest.py
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with nothing left behind
    with tempfile.TemporaryDirectory(prefix="tinsmith-chaos-") as folder:
        wrong = run(
            Path(folder),
            events=given.events,
            seed=given.seed,
            steps=given.steps or max(6, given.events // 2),
            clients=given.clients,
            engine=given.engine,
        )
    print("\n".join(wrong) or "every command was settled once; results are bit-identical")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
