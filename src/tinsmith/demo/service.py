"""`tinsmith serve` in a process of its own, which can be killed and started again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tinsmith.errors import TinkerError

LOOK_S = 0.1

_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this machine itself, whatever proxy the environment names."""


class Service:
    """See the top of the module. It listens on a free port of this machine."""

    def __init__(self, data: Path, model: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._data = data
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = data / "service.log"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C too, which does not reach it
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def start(self) -> float:
        """Start it, wait until it is ready, and tell how many seconds that took.

        Raises:
            TinkerError: It ended instead.
        """
        started = time.monotonic()
        self._data.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tinsmith", "serve", "--engine=embedded"]
        command += [f"--model={self._model}", f"--data={self._data}", f"--port={self._port}"]
        with self.log.open("ab") as log:
            # The terminal's Ctrl-C is for the demo, which then ends the service in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdout=log, stderr=log, start_new_session=True
            )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise TinkerError(
                    f"the service ended with status {self._process.returncode}",
                    remedy=f"its log is {self.log}",
                )
            time.sleep(LOOK_S)
        return time.monotonic() - started

    def kill(self) -> None:
        """As `kill -9` does: it has no chance to save anything."""
        assert self._process is not None, "it is not running"
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            _directly.open(f"{self.url}/readyz", timeout=5) as page,
        ):
            return bool(page.status == 200)
        return False
