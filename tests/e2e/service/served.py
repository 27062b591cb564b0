"""A service in a process of its own, which tests start, kill and start again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BASE_MODEL = "Qwen/Qwen3-8B:fake"
START_S = 90.0
"""How long a start may take on a busy machine."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Served:
    """`tinsmith serve` on a folder and a port that stay the same over restarts."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "tinsmith"),
        engine: str = "fake",
        model: str = BASE_MODEL,
    ) -> None:
        self._program = program
        self._chosen = ("--engine", engine, "--model", model)
        self.folder = folder
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "serve.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it; return when it says that it is ready."""
        command = [
            *(sys.executable, *self._program, "serve", *self._chosen),
            *("--data", str(self.folder / "data"), "--port", str(self.port)),
            *self._arguments,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when it answers that it is well."""
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            assert self._process is not None
            assert self._process.poll() is None, f"it ended:\n{self.log_text()}"
            assert time.monotonic() < deadline, f"it did not start:\n{self.log_text()}"
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether it answers that it is well."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/api/v1/healthz", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """End it with no chance to do anything about it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(START_S)

    def wait_end(self) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        assert self._process is not None
        return self._process.wait(START_S)

    def end(self) -> None:
        """Let nothing of it stay behind."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def log_text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")[-20_000:] if self.log.exists() else ""


@contextlib.contextmanager
def serving(
    folder: Path,
    *arguments: str,
    program: tuple[str, ...] = ("-m", "tinsmith"),
    engine: str = "fake",
    model: str = BASE_MODEL,
) -> Iterator[Served]:
    """A running service, for the length of a test."""
    folder.mkdir(parents=True, exist_ok=True)
    served = Served(folder, *arguments, program=program, engine=engine, model=model)
    try:
        served.start()
        yield served
    finally:
        served.end()
