"""One writer for the terminal: while a status line is shown, all other output scrolls above it.

A status line, such as a progress bar, stands at the bottom and is drawn over and over. What else is
written to stdout or stderr meanwhile would end up in the middle of it. So both streams, and the
log handlers that write to them, go through here for as long as a line is shown: it is erased, whole
lines are written, and it is drawn again.

In a notebook's cell the same is done without control sequences, which it does not know. Nothing is
shown, and nothing replaced, where stderr is neither.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from typing import Any, TextIO


class Terminal:
    """The status lines of this process and what is written above them; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[object, str] = {}
        """By owner; the latest is the one that is seen."""
        self._shown_length = 0
        self._stderr: TextIO | None = None
        self._replaced: list[_Above] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []

    @property
    def columns(self) -> int:
        """How long a status line may be."""
        return shutil.get_terminal_size().columns - 1

    @property
    def is_shown(self) -> bool:
        """Whether there is a status line."""
        return bool(self._lines)

    def show(self, owner: object, line: str) -> None:
        """Show a status line, in the place of the owner's last one."""
        with self._lock:
            if self._stderr is None:
                self._replace_streams()
            self._lines.pop(owner, None)
            self._lines[owner] = line
            self._draw()

    def hide(self, owner: object) -> None:
        """Take the owner's status line away; the one before it, if there is one, is seen again."""
        with self._lock:
            if self._lines.pop(owner, None) is None:
                return
            if self._lines:
                self._draw()
                return
            self._erase()
            self._restore_streams()

    def leave(self, owner: object, line: str) -> None:
        """Hide the owner's status line, and leave this one standing in its place."""
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
        # One that is wider than the terminal would go on in the next row, and stay there.
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
            if isinstance(handler.stream, _Above):  # else somebody has changed it since
                handler.setStream(stream)
        self._stderr, self._replaced, self._handlers = None, [], []

    def forget(self) -> None:
        """Begin anew in a forked child: another thread may have held the lock."""
        self._lock = threading.RLock()
        if self._stderr is not None:
            self._lines.clear()
            self._shown_length = 0
            self._restore_streams()


class _Above:
    """A stream whose lines are written above the status line; all else is the stream's own."""

    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal = terminal
        self.stream = stream
        self._rests: dict[int, str] = {}
        """By thread: what is not a whole line yet."""

    def write(self, text: str) -> int:
        if not self._terminal.is_shown:  # kept beyond that, as by a progress bar of the user's
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
        """What is not a whole line yet waits for its end, or for the status line's."""
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
    """Whether somebody sees a line on stderr that is drawn over and over."""
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules
