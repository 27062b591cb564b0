"""A program at a real pseudo-terminal, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

COLUMNS, ROWS = 80, 24
ENDS_WITHIN_S = 240.0


class Screen:
    """The rows that a terminal of `COLUMNS` shows, from the first to the last."""

    def __init__(self) -> None:
        self.rows = [""]
        self.every_row: set[str] = set()
        """Each row as it stood whenever the cursor left it or it was erased."""
        self._column = 0

    def feed(self, text: str) -> None:
        for piece in text.replace("\x1b[K", "\x00"):
            if piece in "\r\n\x00":
                self.every_row.add(self.rows[-1])
            if piece == "\r":
                self._column = 0
            elif piece == "\n":
                self.rows.append("")
                self._column = 0
            elif piece == "\x00":
                self.rows[-1] = self.rows[-1][: self._column]
            else:
                self._put(piece)

    def _put(self, letter: str) -> None:
        if self._column == COLUMNS:  # a terminal goes on in the next row
            self.every_row.add(self.rows[-1])
            self.rows.append("")
            self._column = 0
        row = self.rows[-1].ljust(self._column)
        self.rows[-1] = row[: self._column] + letter + row[self._column + 1 :]
        self._column += 1


def run_at_terminal(
    command: list[str],
    *,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    until: Callable[[Screen, subprocess.Popen[bytes]], None] = lambda _screen, _process: None,
) -> tuple[int, Screen]:
    """Run a program at a terminal to its end; `until` is called whenever it has written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, pending = Screen(), b""
    env = {**(environment or os.environ), "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder
    ) as process:
        os.close(theirs)
        ends_at = time.monotonic() + ENDS_WITHIN_S
        try:
            while time.monotonic() < ends_at:
                if not select.select([ours], [], [], 1.0)[0]:
                    continue
                try:
                    read = os.read(ours, 65536)
                except OSError:  # its last writer has gone
                    break
                if not read:
                    break
                whole, newline, pending = (pending + read).rpartition(b"\n")
                screen.feed((whole + newline).decode(errors="replace").replace("\r\n", "\n"))
                until(screen, process)
        finally:
            if time.monotonic() >= ends_at:
                process.kill()
            os.close(ours)
    return process.returncode, screen
