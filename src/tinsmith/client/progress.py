"""How far a long piece of work has come, for a person at a terminal or for a function.

Nothing is shown where the output is neither a terminal nor a notebook's cell. Knows nothing of what
the work is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tinsmith.observe.progress import is_seen, write_over

SHOWN_EVERY_S = 0.1
WIDTH = 30

Progress = bool | Callable[[int, int | None], object] | None
"""True for a bar on a terminal or in a notebook, a function that is called with how many are done
and how many there are (None if that is not known), or None for nothing."""


class ProgressBar:
    """A line that is written over and over."""

    def __init__(
        self,
        what: str,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._out = out if out is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._shown_at = float("-inf")
        self._latest: tuple[int, int | None] | None = None
        self._is_latest_shown = False
        self._shown_length = 0

    def tell(self, done: int, total: int | None) -> None:
        """So many are done."""
        self._latest, self._is_latest_shown = (done, total), False
        if self._clock() - self._shown_at >= SHOWN_EVERY_S:
            self._show(done, total)

    def end(self) -> None:
        """Show where it ended, and leave that standing."""
        if self._latest is None:
            return
        if not self._is_latest_shown:
            self._show(*self._latest)
        self._out.write("\n")
        self._out.flush()

    def _show(self, done: int, total: int | None) -> None:
        now = self._clock()
        self._shown_at, self._is_latest_shown = now, True
        line = self._line(done, total, now - self._began)
        write_over(self._out, line, self._shown_length)
        self._shown_length = len(line)

    def _line(self, done: int, total: int | None, elapsed_s: float) -> str:
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        if not total:
            return f"{self._what} {done} ({rate:.0f}/s, {elapsed_s:.0f} s)"
        filled = WIDTH * done // total
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
        bar = "#" * filled + "-" * (WIDTH - filled)
        return f"{self._what} [{bar}] {done}/{total} ({rate:.0f}/s{left})"


class ProgressTeller:
    """Tells whoever wants to know; in a `with` block."""

    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._bar: ProgressBar | None = None
        self._tell: Callable[[int, int | None], object] | None = None
        if callable(progress):
            self._tell = progress
        elif progress and is_seen():
            self._bar = ProgressBar(what)
            self._tell = self._bar.tell

    def one_more(self) -> None:
        """Another one is done."""
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)

    def __enter__(self) -> ProgressTeller:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.end()
