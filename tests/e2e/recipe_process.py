"""Runs programs of `tinker-cookbook` one after another, each in a fork of a process that is warm.

Loading the libraries takes several times as long as a recipe's few steps: they are loaded once, and
every recipe then runs as `python -m` would run it. `recipes.py` starts this with the Python of the
cookbook, writes a line of JSON for each run, and reads one with its status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ENDS_WITHIN_S = 900
"""A program that takes longer is ended by a signal."""
LIBRARIES = (
    "datasets",
    "torch",
    "tinker_cookbook.distillation.train_on_policy",
    "tinker_cookbook.rl.train",
    "tinker_cookbook.supervised.train",
)


def main() -> None:
    """Serve runs until there is nothing more to read."""
    sys.path[0] = str(Path.cwd())  # as with `-m`
    if sys.argv[1] != "official":
        importlib.import_module("tinsmith.as_tinker").as_tinker()
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(asked: dict[str, Any]) -> None:
    """Become the program; does not return."""
    signal.alarm(ENDS_WITHIN_S)
    status = 1
    said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["arguments"]
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        _end(status)


def _end(status: int) -> None:
    """Leave as the interpreter would: what is registered for the end is run, threads are not."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
