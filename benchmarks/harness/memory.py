"""How much memory a call takes at its peak, seen from two sides.

The kernel's side: how far resident memory rose. It sees every allocator, also those inside C
libraries, but not memory that the process had freed before and takes again. Python's side:
`tracemalloc`, exact to the byte, but blind to what a C library takes from the system by itself.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# What is loaded here is in every contestant's memory: `pathlib`, `ctypes` and `tracemalloc` are
# a megabyte and a half.
_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """What the process has in physical memory now; its peak so far where the system cannot say."""
    return _status("VmRSS") if os.access(_STATUS, os.R_OK) else _peak_ever_bytes()


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
    import tracemalloc

    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _status(name: str) -> int:
    with open(_STATUS, encoding="ascii") as opened:  # noqa: PTH123 - see above
        for line in opened:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {name}")


def _reset_peak() -> bool:
    """Begin the peak anew, which only Linux can.

    Set-up may have needed more than the run, and a new process inherits its parent's peak.
    """
    try:
        with open(_CLEAR_REFS, "w", encoding="ascii") as opened:  # noqa: PTH123 - see above
            opened.write(_RESET_PEAK)
    except OSError:
        return False
    return True


def _peak_ever_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _give_back_free_memory() -> None:
    """So that memory which set-up freed is not taken again unseen; glibc alone can be asked."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
