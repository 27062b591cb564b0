"""Durable appends: our ledger beside a bare file that is appended to and synced.

All have the same callers, coroutines that each wait for their acknowledgement. The file keeps
nothing but the bytes: no identity, no index, no way to find a row again. It is synced for each row,
which is the disk's own rate, or once for all rows that came meanwhile, which is all that the disk
and Python allow.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import queue
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

SCRATCH = Path(__file__).resolve().parents[1] / "results" / "scratch"
"""On the disk of the project: a temporary folder may be in memory."""
WARM_UP_S = 0.3

Append = Callable[[int, bytes], Awaitable[object]]


def appends(store: str, callers: str, size: str, seconds: str = "1.5") -> dict[str, float]:
    """What one append took, with so many callers and payloads of so many bytes."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{store}-", dir=SCRATCH))
    run = {"ledger": _with_ledger, "file": _with_file, "each": _with_sync_for_each}[store]
    try:
        return asyncio.run(run(folder, int(callers), int(size), float(seconds)))
    finally:
        shutil.rmtree(folder)


async def _with_ledger(folder: Path, callers: int, size: int, seconds: float) -> dict[str, float]:
    from tinsmith.service.ledger.records import QueueId, SessionId, Submission, TenantId
    from tinsmith.service.ledger.sqlite import SqliteLedger

    async with await SqliteLedger.open(folder) as ledger:

        async def append(number: int, payload: bytes) -> None:
            await ledger.append(
                Submission(
                    queue_id=QueueId("session:train:0"),
                    seq_id=number,
                    kind="forward_backward",
                    tenant_id=TenantId("tenant"),
                    session_id=SessionId("session"),
                    fingerprint=hashlib.sha256(payload).digest(),
                    payload=payload,
                )
            )

        return await _measured(append, callers, size, seconds)


async def _with_sync_for_each(
    folder: Path, callers: int, size: int, seconds: float
) -> dict[str, float]:
    return await _with_file(folder, callers, size, seconds, most_rows=1)


async def _with_file(
    folder: Path, callers: int, size: int, seconds: float, most_rows: int = 1024
) -> dict[str, float]:
    log = _SyncedFile(folder / "log", most_rows)
    try:
        return await _measured(log.append, callers, size, seconds)
    finally:
        await log.close()


async def _measured(append: Append, callers: int, size: int, seconds: float) -> dict[str, float]:
    payload = os.urandom(size)
    numbers = itertools.count()
    latencies: list[float] = []
    measured_from = time.perf_counter() + WARM_UP_S
    ends_at = measured_from + seconds

    async def caller() -> None:
        while (start := time.perf_counter()) < ends_at:
            await append(next(numbers), payload)
            if start >= measured_from:
                latencies.append(time.perf_counter() - start)

    cpu_s = _cpu_s()
    await asyncio.gather(*(caller() for _ in range(callers)))
    total = next(numbers)
    cuts = quantiles(latencies, n=100)
    return {
        "wall_s": (time.perf_counter() - measured_from) / len(latencies),
        "cpu_s": (_cpu_s() - cpu_s) / total,
        "latency_p50_s": cuts[49],
        "latency_p99_s": cuts[98],
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _SyncedFile:
    """One thread that writes what is queued, syncs, and acknowledges."""

    def __init__(self, path: Path, most_rows: int) -> None:
        self._most_rows = most_rows
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def append(self, _: int, payload: bytes) -> None:
        future = self._loop.create_future()
        self._queue.put((payload, future))
        await future

    async def close(self) -> None:
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        os.close(self._descriptor)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < self._most_rows and not self._queue.empty():
                if (row := self._queue.get()) is None:
                    break
                group.append(row)
            os.writev(self._descriptor, [payload for payload, _ in group])
            os.fdatasync(self._descriptor)
            self._loop.call_soon_threadsafe(_acknowledge, [future for _, future in group])


def _acknowledge(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)
