"""Runs every SDK against a running service and collects the outcomes.

    python -m tests.compatibility.measure [--write]

Prints what failed, and whether `docs/compatibility.md` says what was measured; `--write` rewrites
it. `scripts/compatibility` runs this in the development environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from tests.compatibility import page
from tests.compatibility.known import explained
from tests.compatibility.outcomes import Outcome, Run
from tests.compatibility.sdks import NEWEST, ROOT, WHEELS, folder_of
from tests.compatibility.stage import BASE_MODEL, PROJECT
from tests.compatibility.targets import Target, served
from tests.unit.client.small_tokenizer import write_tokenizer

AT_ONCE = 2
"""Number of processes; CI has two cores."""
SDK_TIMEOUT_S = 300.0


class Client(NamedTuple):
    """The client that is run against the service."""

    title: str
    kind: str
    release: str


CLIENTS = [
    *(Client(release, "tinker", release) for release in (*WHEELS, NEWEST)),
    Client("tinsmith", "tinsmith", NEWEST),
    Client("as tinker", "as_tinker", NEWEST),
]


def measure(
    clients: list[Client], service: Callable[[Path], AbstractContextManager[Target]] = served
) -> list[Run]:
    """Run each client against a service of its own.

    One service for all would run out of room: their models together are more than the engine's 64
    adapters, and the next one waits until a session expires.
    """
    for client in clients:
        folder_of(client.release)  # fetched one after the other, before anything waits for it
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        # In the current directory a model's name is the path of its tokenizer: no hub is asked.
        scratch = Path(folder) / "scratch"
        write_tokenizer(scratch / BASE_MODEL)

        def run_alone(client: Client) -> Run:
            with service(Path(folder) / f"service-{client.title.replace(' ', '-')}") as target:
                return run(client, target, scratch)

        return list(pool.map(run_alone, clients))


def run(client: Client, target: Target, scratch: Path) -> Run:
    """Run one client in a process of its own."""
    log = scratch / f"{client.kind}-{client.release}.log"
    out = log.with_suffix(".out")
    driver = [sys.executable, "-W", "ignore", "-m", "tests.compatibility.driver"]
    # Into files: what was said before a process was ended by its time limit counts too.
    with log.open("wb") as errors, out.open("wb") as said:
        try:
            code = subprocess.run(
                [*driver, client.kind, client.title],
                cwd=scratch,
                env=environment(client, target),
                stdout=said,
                stderr=errors,
                timeout=SDK_TIMEOUT_S,
                check=False,
            ).returncode
            end = None if code == 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"not done within {SDK_TIMEOUT_S:g} s"
    lines = [line for line in out.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    told = log.read_text(encoding="utf-8", errors="replace")
    return Run(client.title, outcomes, end and f"{end}:\n{told[-4000:]}")


def environment(client: Client, target: Target) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    folder = folder_of(client.release) if client.kind == "tinker" else None
    paths = [folder, ROOT / "src", ROOT]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path is not None),
        "TINKER_BASE_URL": target.base_url,
        "TINKER_API_KEY": target.api_key,
        "TINKER_PROJECT_ID": PROJECT,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "*",
    }


def failures(runs: list[Run]) -> list[str]:
    """Failures without an explanation, and explanations without a failure."""
    found = []
    for done in runs:
        if done.end is not None:
            found.append(f"{done.title}: {done.end}")
        for outcome in done.outcomes:
            named = f"{done.title}: {outcome.kind}.{outcome.name}"
            why = explained(done.title, outcome)
            if outcome.error is not None and why is None:
                found.append(f"{named}: {outcome.error}")
            elif outcome.error is None and why is not None:
                found.append(f"{named} works, and is still listed in tests/compatibility/known.py")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Call every public method of every SDK.")
    parser.add_argument("--write", action="store_true", help="rewrite docs/compatibility.md")
    arguments = parser.parse_args()
    runs = measure(CLIENTS)
    found = failures(runs)
    for line in found:
        print(line)
    text = page.rendered(runs)
    if arguments.write and not found:
        page.PATH.write_text(text, encoding="utf-8")
    elif not page.is_current(text):
        print("docs/compatibility.md differs from what was measured; --write rewrites it")
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
