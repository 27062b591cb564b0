"""`tinsmith serve` in a separate process that can be killed and restarted."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from tinsmith.errors import TinkerError

POLL_S = 0.1

# The service is on this machine, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServiceProcess:
    """A service on a free port of this machine, running while the context is open.

    Args:
        data: The service's data folder, which also gets its log.
        model: The value of `--model`.
    """

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
        except BaseException:  # also Ctrl-C, which the process itself does not receive
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def start(self) -> float:
        """Start the process, wait until it is ready, and return how many seconds that took.

        Raises:
            TinkerError: The process exited.
        """
        started = time.monotonic()
        self._data.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tinsmith", "serve", "--engine=embedded"]
        command += [f"--model={self._model}", f"--data={self._data}", f"--port={self._port}"]
        with self.log.open("ab") as log:
            # In a session of its own: the demo handles Ctrl-C, then stops the service in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdout=log, stderr=log, start_new_session=True
            )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise TinkerError(
                    f"the service exited with status {self._process.returncode}",
                    remedy=f"see its log, {self.log}",
                )
            time.sleep(POLL_S)
        return time.monotonic() - started

    def kill(self) -> None:
        """Kill the process as `kill -9` does; it cannot save anything."""
        assert self._process is not None, "the service is not running"
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            _opener.open(f"{self.url}/readyz", timeout=5) as page,
        ):
            return bool(page.status == 200)
        return False
