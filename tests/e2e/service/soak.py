"""A long run of many short sessions, to see that nothing grows: memory, threads, sockets, files.

    python -m tests.e2e.service.soak --minutes 60
    python -m tests.e2e.service.soak --minutes 60 --engine embedded --model NAME=FOLDER

It needs Linux, whose /proc it reads. `test_soak.py` is the short form.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import tinsmith
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tinsmith.service.ledger.sqlite import CACHE_KIB

WARM_SHARE = 0.4
"""What caches and pools fill up in this part of the run is not counted."""
MORE_BYTES = 24 << 20
"""How much a process may grow after that: pages of allocators come and go."""
MORE_THREADS = 2
MORE_FILES = 8


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds."""

    rss_bytes: int
    threads: int
    files: int
    """Sockets among them."""


class Soaked(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, and what was held after the warm-up and at the end, by process."""

    sessions: int
    before: dict[str, Held]
    after: dict[str, Held]

    def growth(self, *, cache_bytes: int = 0) -> list[str]:
        """What has grown by more than it may; empty is good.

        Args:
            cache_bytes: What the service's caches may fill up by, in a run that is long enough.
        """
        found: list[str] = []
        for name, first in self.before.items():
            last = self.after[name]
            for what, more in (
                ("rss_bytes", MORE_BYTES + (cache_bytes if name == "service" else 0)),
                ("threads", MORE_THREADS),
                ("files", MORE_FILES),
            ):
                old, new = getattr(first, what), getattr(last, what)
                if new > old + more:
                    found.append(f"{name}: {what} {old} -> {new}")
        return found


def held(pid: int) -> Held:
    """What a process holds now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Held(
        rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
        threads=int(status["Threads"]),
        files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
    )


def processes(served: Served) -> dict[str, int]:
    """The client, the service, and the engine if it is a process of its own."""
    found = {"client": os.getpid(), "service": served.pid}
    children = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
    for number, child in enumerate(children):
        found[f"engine {number}"] = int(child)
    return found


def session(served: Served, model: str, number: int) -> None:
    """What a short program does: trains, saves, samples, and leaves."""
    tokens = tinsmith.ModelInput.from_ints([5, 6, 7, number % 200 + 8])
    datum = tinsmith.Datum(tokens, {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})
    with tinsmith.ServiceClient(base_url=served.base_url, api_key="tml-soak") as client:
        training = client.create_lora_training_client(model, rank=4)
        for _ in range(3):
            training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        sampler = training.save_weights_and_get_sampling_client()
        params = tinsmith.SamplingParams(max_tokens=8, seed=number, stop=[])
        sampler.sample_many([tokens] * 8, params)


def run(served: Served, model: str, duration_s: float) -> Soaked:
    """Sessions one after another, for that long."""
    started = time.monotonic()
    before: dict[str, Held] | None = None
    sessions = 0
    for sessions in _counted(started, duration_s):
        session(served, model, sessions)
        if before is None and time.monotonic() - started > WARM_SHARE * duration_s:
            before = _all(served)
    return Soaked(sessions=sessions + 1, before=before or _all(served), after=_all(served))


def _counted(started: float, duration_s: float) -> Iterator[int]:
    number = 0
    while time.monotonic() - started < duration_s:
        yield number
        number += 1


def _all(served: Served) -> dict[str, Held]:
    gc.collect()
    return {name: held(pid) for name, pid in processes(served).items()}


def main() -> None:
    """Run as the arguments say; the status is 1 if something has grown."""
    parser = argparse.ArgumentParser(description="many short sessions, to see that nothing grows")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--engine", default="fake")
    parser.add_argument("--model", default=BASE_MODEL)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), engine=given.engine, model=given.model) as served,
    ):
        found = run(served, given.model.partition("=")[0], given.minutes * 60)
    print(f"{found.sessions} sessions")
    for name in found.after:
        print(f"{name}: {found.before[name]} -> {found.after[name]}")
    grown = found.growth(cache_bytes=CACHE_KIB << 10)
    print("\n".join(grown) or "nothing has grown")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
