"""Calls every public method of one SDK, by each of its names, and reports each outcome.

    python -m tests.compatibility.driver tinker|tinsmith|as_tinker TITLE

The service is named by `TINKER_BASE_URL` and `TINKER_API_KEY`. Prints one line of JSON for each
call: `{"method": "RestClient.whoami", "name": "whoami_async", "error": null}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

from tests.compatibility.caller import Caller
from tests.compatibility.calls.table import CALLS
from tests.compatibility.stage import Stage
from tests.compatibility.surface import CLIENTS, faces, public_methods

CALL_TIMEOUT_S = 60.0
NOT_COVERED = "not covered: no call is written for it in tests/compatibility/calls"


def main(kind: str, title: str) -> None:
    sdk = the_sdk(kind)
    stage = Stage(sdk, os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"], title)
    offered = faces(offered_by(sdk, stage.is_tinsmith))
    for method in sorted(offered, key=place):
        for name in offered[method]:
            face = name.partition(".")[2]
            outcome = {"method": method, "name": face, "error": attempt(stage, method, face)}
            print(json.dumps(outcome), flush=True)


def the_sdk(kind: str) -> ModuleType:
    if kind == "as_tinker":
        importlib.import_module("tinsmith").as_tinker()
    return importlib.import_module("tinsmith" if kind == "tinsmith" else "tinker")


def offered_by(sdk: ModuleType, is_tinsmith: bool) -> set[str]:
    """Our types have more methods than the official ones; they have tests of their own."""
    methods = public_methods(sdk)
    if not is_tinsmith:
        return methods
    return {name for name in methods if name.partition(".")[0] in CLIENTS or name in CALLS}


def place(method: str) -> tuple[int, str]:
    known = list(CALLS)
    return (known.index(method) if method in CALLS else len(known), method)


def attempt(stage: Stage, method: str, face: str) -> str | None:
    """The error; None if there was none."""
    if method not in CALLS:
        return NOT_COVERED
    call = Caller(face)
    errors: list[str] = []

    def run() -> None:
        try:
            CALLS[method](stage, call)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, it is the outcome
            errors.append(told(exc))

    # A thread, because no release lets every call be bounded in time.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CALL_TIMEOUT_S)
    if thread.is_alive():
        return f"not done within {CALL_TIMEOUT_S:g} s"
    if errors:
        return errors[0]
    return None if call.was_called else "the call that is written for it never calls it"


def told(exc: BaseException) -> str:
    """The error, and the line of our code that caused it."""
    ours = [
        f for f in traceback.extract_tb(exc.__traceback__) if "/tests/compatibility/" in f.filename
    ]
    where = f" at {ours[-1].line}" if ours else ""
    return f"{type(exc).__name__}: {exc}{where}"[:2000]


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(*arguments)
    # Threads of calls that never ended must not keep the process.
    sys.stdout.flush()
    os._exit(0)
