"""A bar on stderr that shows how far something is, if somebody is there to see it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from tinsmith.observe.sizes import size_text
from tinsmith.observe.terminal import is_seen, terminal

_WIDTH = 24
_NARROWEST = 8
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
        is_left: Whether the bar is left standing at the end, instead of taken away.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        in_bytes: bool = False,
        format_: str = "table",
        is_left: bool = False,
    ) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._in_bytes = in_bytes
        self._is_shown = format_ == "table" and is_seen()
        self._is_left = is_left
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
        """Take the bar away, or leave it standing where that was asked for."""
        with self._lock:
            if not self._is_shown:
                return
            self._is_shown = False
            if self._is_left:
                terminal.leave(self, self._line_here(time.monotonic()))
            else:
                terminal.hide(self)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._is_shown:
            terminal.show(self, self._line_here(self._drawn_at))

    def _line_here(self, now: float) -> str:
        return self.line(now - self._began_at, terminal.columns)

    def line(self, elapsed_s: float, columns: int | None = None) -> str:
        """The bar as text, `elapsed_s` after it began; narrower where there is little room."""
        amount = size_text if self._in_bytes else str
        new = self.done - self._done_before
        # What begins slowly would tell of hours at first.
        is_foreseen = new * _FORESEEN >= (self.total or 0)
        rate = new / elapsed_s if elapsed_s > 0 and is_foreseen else 0.0
        speed = f"{size_text(int(rate))}/s" if self._in_bytes and rate else ""
        if not self.total:
            shown = f"{self.label}  {amount(self.done)}" if self.done else self.label
            return f"{shown}, {speed}" if speed else shown
        done = min(self.done, self.total)  # what is counted may be on the disk twice for a while
        amounts = f"{amount(done)} of {amount(self.total)}"
        is_timed = rate > 0 and done < self.total
        left = f"{_duration((self.total - done) / rate)} left" if is_timed else ""
        width, told = _WIDTH, ""
        for facts in ((amounts, speed, left), (amounts, left), (amounts,)):
            told = ", ".join(fact for fact in facts if fact)
            if columns is not None:
                width = min(_WIDTH, columns - len(f"{self.label} [] {told}"))
            if width >= _NARROWEST:
                break
        width = max(width, _NARROWEST)
        filled = width * done // self.total
        return f"{self.label} [{'#' * filled}{'-' * (width - filled)}] {told}"


def _duration(length_s: float) -> str:
    minutes, seconds = divmod(round(length_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
