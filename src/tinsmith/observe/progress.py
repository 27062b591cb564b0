"""A bar on stderr that shows how far something is, if somebody is there to see it."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from tinsmith.observe.sizes import size_text

_WIDTH = 24
_REDRAW_S = 0.1
_FORESEEN = 50
"""Speed and time are told once such a part of the whole is done."""


class Progress:
    """How far something is; may be told from any thread.

    Shown while its `with` block lasts, if stderr is a terminal or a notebook's cell, and tables
    were asked for.

    Args:
        label: What is being done.
        total: How much there is to do; None while that is not known.
        in_bytes: Whether it is counted in bytes.
        format_: The command's format.
    """

    def __init__(
        self, label: str, total: int | None, *, in_bytes: bool = False, format_: str = "table"
    ) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._in_bytes = in_bytes
        self._is_shown = format_ == "table" and is_seen()
        self._shown_length = 0
        self._lock = threading.Lock()
        self._began_at = time.monotonic()
        self._done_before = 0
        self._drawn_at = float("-inf")

    def begin(self, total: int | None, done: int = 0) -> None:
        """Say how much there is, and how much of it was there before."""
        with self._lock:
            self.total, self.done, self._done_before = total, done, done
            self._began_at = time.monotonic()
            self._draw()

    def add(self, amount: int) -> None:
        """Say that so much more is done; a negative amount is lost again."""
        with self._lock:
            self.done += amount
            if time.monotonic() - self._drawn_at >= _REDRAW_S:
                self._draw()

    def __enter__(self) -> Self:
        with self._lock:
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._is_shown:
                self._is_shown = False
                self._write("")

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._is_shown:
            self._write(self.line(self._drawn_at - self._began_at))

    def _write(self, line: str) -> None:
        write_over(sys.stderr, line, self._shown_length)
        self._shown_length = len(line)

    def line(self, elapsed_s: float) -> str:
        """The bar as text, `elapsed_s` after it began."""
        amount = size_text if self._in_bytes else str
        shown = f"{self.label}  {amount(self.done)}" if self.done else self.label
        new = self.done - self._done_before
        # What begins slowly would tell of hours at first.
        is_foreseen = new * _FORESEEN >= (self.total or 0)
        rate = new / elapsed_s if elapsed_s > 0 and is_foreseen else 0.0
        if self.total:
            filled = min(_WIDTH, _WIDTH * self.done // self.total)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            shown = f"{self.label} [{bar}] {amount(self.done)} of {amount(self.total)}"
        if self._in_bytes and rate:
            shown += f", {size_text(int(rate))}/s"
        if self.total and rate > 0 and self.done < self.total:
            shown += f", {_duration((self.total - self.done) / rate)} left"
        return shown


def is_seen() -> bool:
    """Whether somebody sees a line on stderr that is written over and over."""
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def write_over(out: TextIO, line: str, shown_length: int) -> None:
    """Put a line in the place of one of `shown_length` letters.

    Spaces cover the rest where it is not a terminal: a notebook's cell knows nothing else.
    """
    covering = " " * max(0, shown_length - len(line))
    out.write(f"\r\x1b[K{line}" if out.isatty() else f"\r{line}{covering}")
    out.flush()


def _duration(length_s: float) -> str:
    minutes, seconds = divmod(round(length_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
