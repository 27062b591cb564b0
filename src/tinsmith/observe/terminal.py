"""Status lines and progress bars on the terminal, with all other output above them.

A status line is redrawn at the bottom of the terminal. Other output would garble it. So while one
is shown, stdout, stderr and the log handlers that write to them go through this module, which
erases the status line, writes whole lines, and draws it again.

In a notebook this is done without control sequences, which notebooks do not support. If stderr is
neither a terminal nor a notebook, nothing is shown or replaced.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from typing import Any, Self, TextIO

MISSING = "N/A"
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(size_bytes: int | None) -> str:
    """A size in units of 1024, such as `117.7 MB`."""
    if size_bytes is None or size_bytes < 0:
        return MISSING
    size, units = float(size_bytes), list(_UNITS)
    # 1023.95 would be rounded to 1024.0 of the smaller unit.
    while size >= 1023.95 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


class Terminal:
    """The status lines of this process, and the output above them; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[object, str] = {}
        """By owner; the latest one is visible."""
        self._shown_length = 0
        self._stderr: TextIO | None = None
        self._replaced: list[_Above] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []

    @property
    def columns(self) -> int:
        """The longest status line."""
        return shutil.get_terminal_size().columns - 1

    @property
    def is_shown(self) -> bool:
        """Whether there is a status line."""
        return bool(self._lines)

    def show(self, owner: object, line: str) -> None:
        """Show a status line, replacing that of the same owner."""
        with self._lock:
            if self._stderr is None:
                self._replace_streams()
            self._lines.pop(owner, None)
            self._lines[owner] = line
            self._draw()

    def hide(self, owner: object) -> None:
        """Remove the owner's status line; an earlier one becomes visible again."""
        with self._lock:
            if self._lines.pop(owner, None) is None:
                return
            if self._lines:
                self._draw()
                return
            self._erase()
            self._restore_streams()

    def leave(self, owner: object, line: str) -> None:
        """Replace the owner's status line by a permanent line."""
        with self._lock:
            self.hide(owner)
            self.write_above(sys.stderr, f"{line}\n")

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write whole lines to a stream, above the status line if one is shown."""
        with self._lock:
            self._erase()
            stream.write(text)
            stream.flush()
            self._draw()

    def _draw(self) -> None:
        if not self._lines or self._stderr is None:
            return
        line = next(reversed(self._lines.values()))
        # A line wider than the terminal would wrap, and could not be erased.
        line = line if len(line) <= self.columns else f"{line[: self.columns - 1]}…"
        self._write_over(line)

    def _erase(self) -> None:
        if self._shown_length:
            self._write_over("")

    def _write_over(self, line: str) -> None:
        assert self._stderr is not None, "a line is shown"
        covering = " " * max(0, self._shown_length - len(line))
        is_terminal = self._stderr.isatty()
        end = "" if line or is_terminal else "\r"
        self._stderr.write(f"\r\x1b[K{line}" if is_terminal else f"\r{line}{covering}{end}")
        self._stderr.flush()
        self._shown_length = len(line)

    def _replace_streams(self) -> None:
        self._stderr = sys.stderr
        above = {id(stream): _Above(self, stream) for stream in (sys.stdout, sys.stderr) if stream}
        self._replaced = list(above.values())
        for logger in (logging.getLogger(), logging.getLogger("tinsmith")):
            for handler in logger.handlers:
                stream = getattr(handler, "stream", None)
                if isinstance(handler, logging.StreamHandler) and id(stream) in above:
                    self._handlers.append((handler, handler.stream))
                    handler.setStream(above[id(stream)])
        sys.stdout = above.get(id(sys.stdout), sys.stdout)
        sys.stderr = above.get(id(sys.stderr), sys.stderr)

    def _restore_streams(self) -> None:
        for above in self._replaced:
            above.write_rest()
            if sys.stdout is above:
                sys.stdout = above.stream
            if sys.stderr is above:
                sys.stderr = above.stream
        for handler, stream in self._handlers:
            if isinstance(handler.stream, _Above):  # else it was changed in the meantime
                handler.setStream(stream)
        self._stderr, self._replaced, self._handlers = None, [], []

    def forget(self) -> None:
        """Reset in a forked child: another thread may have held the lock."""
        self._lock = threading.RLock()
        if self._stderr is not None:
            self._lines.clear()
            self._shown_length = 0
            self._restore_streams()


class _Above:
    """A stream whose lines are written above the status line."""

    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal = terminal
        self.stream = stream
        self._rests: dict[int, str] = {}
        """The incomplete line of each thread."""

    def write(self, text: str) -> int:
        if not self._terminal.is_shown:  # somebody kept a reference, such as another progress bar
            return self.stream.write(text)
        thread = threading.get_ident()
        whole, newline, rest = (self._rests.pop(thread, "") + text).rpartition("\n")
        if rest:
            self._rests[thread] = rest
        if newline:
            self._terminal.write_above(self.stream, whole + newline)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """An incomplete line is written later, with its end or when the status line is removed."""
        self.stream.flush()

    def write_rest(self) -> None:
        if self._rests:
            self.stream.write("".join(self._rests.values()))
            self.stream.flush()
            self._rests.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


terminal = Terminal()
os.register_at_fork(after_in_child=terminal.forget)


def is_seen() -> bool:
    """Whether stderr can show a status line."""
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


_WIDTH = 24
_NARROWEST = 8
_REDRAW_S = 0.1
_MIN_FRACTION = 50
"""Speed and remaining time are shown once one fiftieth is done."""


class Progress:
    """A progress bar; thread-safe.

    Shown during its `with` block, if stderr is a terminal or a notebook and the output format is
    `table`.

    Args:
        label: What is in progress.
        total: The total amount; None if unknown.
        in_bytes: Whether amounts are in bytes.
        format_: The output format.
        is_left: Whether the bar stays on the screen at the end.
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
        """Set the total amount, and how much of it was already done."""
        with self._lock:
            self.total, self.done, self._done_before = total, done, done
            self._began_at = time.monotonic()
            self._draw()

    def add(self, amount: int) -> None:
        """Advance by an amount, which may be negative."""
        with self._lock:
            self.done += amount
            if time.monotonic() - self._drawn_at >= _REDRAW_S:
                self._draw()

    def __enter__(self) -> Self:
        with self._lock:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Remove the bar, or leave it if `is_left`."""
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
        """The bar as text after `elapsed_s`; shorter if there are few columns."""
        amount = size_text if self._in_bytes else str
        new = self.done - self._done_before
        # An estimate after a slow start would be far too long.
        has_estimate = new * _MIN_FRACTION >= (self.total or 0)
        rate = new / elapsed_s if elapsed_s > 0 and has_estimate else 0.0
        speed = f"{size_text(int(rate))}/s" if self._in_bytes and rate else ""
        if not self.total:
            shown = f"{self.label}  {amount(self.done)}" if self.done else self.label
            return f"{shown}, {speed}" if speed else shown
        done = min(self.done, self.total)  # files may briefly be counted twice
        amounts = f"{amount(done)} of {amount(self.total)}"
        is_timed = rate > 0 and done < self.total
        left = f"{_duration((self.total - done) / rate)} left" if is_timed else ""
        width, text = _WIDTH, ""
        for facts in ((amounts, speed, left), (amounts, left), (amounts,)):
            text = ", ".join(fact for fact in facts if fact)
            if columns is not None:
                width = min(_WIDTH, columns - len(f"{self.label} [] {text}"))
            if width >= _NARROWEST:
                break
        width = max(width, _NARROWEST)
        filled = width * done // self.total
        return f"{self.label} [{'#' * filled}{'-' * (width - filled)}] {text}"


def _duration(length_s: float) -> str:
    minutes, seconds = divmod(round(length_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
