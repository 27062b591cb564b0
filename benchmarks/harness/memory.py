"""How much memory a call takes at its peak, seen from two sides.

The kernel's side: how far resident memory rose. It sees every allocator, also those inside C
libraries, but not memory that the process had freed before and takes again. Python's side:
`tracemalloc`, exact to the byte, but blind to what a C library takes from the system by itself.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """What the process has in physical memory now; its peak so far where the system cannot say."""
    return _status("VmRSS") if _STATUS.exists() else _peak_ever_bytes()


def rise_of_resident_peak(run: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes resident memory rose at the peak of one run, and what the run returned."""
    gc.collect()
    _give_back_free_memory()
    is_reset = _reset_peak()
    before = resident_bytes() if is_reset else _peak_ever_bytes()
    result = run()
    after = _status("VmHWM") if is_reset else _peak_ever_bytes()
    return max(0, after - before), result


def traced_peak(run: Callable[[], Any]) -> int:
    """The most bytes that Python's allocators held for one run, beyond what they held before."""
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {name}")


def _reset_peak() -> bool:
    """Begin the peak anew, which only Linux can.

    Set-up may have needed more than the run, and a new process inherits its parent's peak.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _peak_ever_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _give_back_free_memory() -> None:
    """So that memory which set-up freed is not taken again unseen; glibc alone can be asked."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
