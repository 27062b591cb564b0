"""`tinsmith` as people run it: a process of its own, against a service of the test."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tinsmith.testing import ScriptedService

TIME_LIMIT_S = 300.0
"""Far more than any command takes; one that hangs fails its test."""


class Ended:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """What it printed, which must be one JSON value."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The last line of stderr, which must be an error in JSON."""
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found


class Commands:
    """Runs commands in a folder and a home of their own."""

    def __init__(self, service: ScriptedService, folder: pathlib.Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        inherited = {name: value for name, value in os.environ.items() if "TINKER" not in name}
        self.environment = {
            **inherited,
            "HOME": str(self.home),
            "TINKER_BASE_URL": service.base_url,
            "TINKER_API_KEY": service.api_key,
            "COLUMNS": "200",
            "NO_PROXY": "127.0.0.1",
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Begin a command, with pipes for its input and output."""
        environment: Mapping[str, str | None] = {
            **self.environment,
            **options.pop("environment", {}),
        }
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tinsmith", *words],
            cwd=self.folder,
            env={name: value for name, value in environment.items() if value is not None},
            text=True,
            **{
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )

    def run(self, *words: str, text: str = "", **options: Any) -> Ended:
        """Run a command to its end.

        Args:
            words: The command line.
            text: What it reads from stdin.
            options: `environment`, laid over the usual one, and those of `Popen`.
        """
        process = self.start(*words, **options)
        try:
            out, err = process.communicate(text, TIME_LIMIT_S)
        finally:
            process.kill()
        return Ended(process.returncode, out, err)

    def interrupted(self, process: subprocess.Popen[str]) -> Ended:
        """Press Ctrl-C, and see how it ends."""
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=TIME_LIMIT_S)
        finally:
            process.kill()
        return Ended(process.returncode, out, err)
