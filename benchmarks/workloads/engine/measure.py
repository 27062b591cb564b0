"""What each contestant tells of its turn: time, memory, and how near it was to the machine's limit.

The limit is the rate at which torch multiplies matrices of a layer's shape, taken in the same
process just before. Time and memory are those of the process and of all below it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROWS, _INPUTS, _OUTPUTS = 1024, 576, 1536
_TIMES = 4


class Turn:
    """Measures from where it is made to `figures`."""

    def __init__(self, dtype: Any = None) -> None:
        self._matmul_flops = matmul_flops(dtype)
        self._first_s: float | None = None
        self._wall, self._cpu = time.perf_counter(), _cpu_s()

    def saw_token(self) -> None:
        """The first token is there; later calls are ignored."""
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._wall

    def first_tokens(self, seconds: list[float]) -> None:
        """When the first token of each that counts was there, since the turn began."""
        self._first_s = sorted(seconds)[len(seconds) // 2]

    def since_start_s(self) -> float:
        """How long it has run."""
        return time.perf_counter() - self._wall

    def figures(self, tokens: float, flops: float) -> dict[str, float]:
        """Those of the whole turn; CPU and wall time are per token.

        Args:
            tokens: How many came of it, or how many a pass went over.
            flops: What they need at least, by the number of weights.
        """
        wall_s, cpu_s = time.perf_counter() - self._wall, _cpu_s() - self._cpu
        found = {
            "cpu_s": cpu_s / tokens,
            "wall_s": wall_s / tokens,
            "tokens_per_cpu_s": tokens / cpu_s,
            "tokens_per_s": tokens / wall_s,
            "matmul_share": flops / cpu_s / self._matmul_flops,
            "matmul_gflops": self._matmul_flops / 1e9,
            "resident_bytes": float(_resident_bytes()),
        }
        if self._first_s is not None:
            found["first_token_s"] = self._first_s
        return found


def warm_up(run: Callable[[], object]) -> None:
    """Train as a program that has done so for a while.

    What a process takes of memory for the first time is not what a pass costs. The first step
    takes moments, and what it leaves behind is used from the second pass on.
    """
    for _ in range(2):
        run()
    settle()


def settle() -> None:
    """Keep what libraries made from garbage collections, as our service does, and vLLM.

    One that came by chance would cost whoever has its turn a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def matmul_flops(dtype: Any = None) -> float:
    """Operations per CPU-second of this machine, at best."""
    import torch

    x = torch.ones(_ROWS, _INPUTS, dtype=dtype)
    weight = torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_TIMES):
            started = time.thread_time()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.thread_time() - started)
    return 2 * _ROWS * _INPUTS * _OUTPUTS / best


def _cpu_s() -> float:
    found = time.process_time()
    for pid in _below(os.getpid()):
        found += sum(map(int, _stat(pid)[11:13])) / _TICKS_PER_S
    return found


def _resident_bytes() -> int:
    """The peak of this process, and what those below it have now."""
    status = Path("/proc/self/status").read_text()
    found = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    for pid in _below(os.getpid()):
        found += int(_stat(pid)[21]) * _PAGE_BYTES
    return found


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)


def _stat(pid: int) -> list[str]:
    """The fields of a process's `stat`, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
