"""What a person at a terminal sees: log lines scroll above bars, and never mix with them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.screens import Screen, run_at_terminal
from tests.numerics.small_models import make_model

NOISY = """
import logging, sys, threading, time
from tinsmith.observe.terminal import Progress
from tinsmith.observe.log_fields import configure_logging

configure_logging()
log = logging.getLogger("tinsmith.test")

def make_noise(number):
    for count in range(50):
        log.info("log line %d-%d ends here", number, count)
        stream = sys.stderr if count % 2 else sys.stdout
        print("printed line", number, count, "ends here", file=stream)

with Progress("BAR" + "x" * 60, 1000, in_bytes=True) as bar:
    threads = [threading.Thread(target=make_noise, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        bar.add(1)
        time.sleep(0.001)
    print("not a whole line", end="")
print()
log.info("log line after ends here")
"""


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH")}
    return {**kept, "TINSMITH_HOME": str(home), "HOME": str(home), "NO_PROXY": "127.0.0.1"}


def test_log_lines_prints_and_a_progress_bar_never_share_a_row() -> None:
    """Also if the bar is wider than the terminal, and several threads write."""
    status, screen = run_at_terminal([sys.executable, "-c", NOISY])

    assert status == 0
    shown = [row for row in screen.rows if row.strip()]
    pattern = re.compile(
        r"\S+ INFO    tinsmith.test: log line \S+ ends here|printed line \d+ \d+ ends here"
    )
    odd = [row for row in shown if not pattern.fullmatch(row) and row != "not a whole line"]
    assert odd == []
    assert len(shown) == 4 * 100 + 2
    bars = [row for row in screen.every_row if "BAR" in row]
    assert bars, "a bar was shown"
    assert all(row.startswith("BAR") and "ends here" not in row for row in bars)


def test_only_plain_text_is_written_without_a_terminal() -> None:
    ended = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, check=True)

    written = ended.stdout + ended.stderr
    assert b"\r" not in written
    assert b"\x1b" not in written
    assert b"BAR" not in written


def test_a_failed_pull_leaves_no_progress_bar_and_its_error_has_its_own_rows(
    tmp_path: Path,
) -> None:
    """On a terminal of 80 columns too, in which a long line would go on in the next row."""
    more = {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "."}
    status, screen = run_at_terminal(
        [sys.executable, "-m", "tinsmith", "model", "pull"],
        environment={**environment(tmp_path), **more},
        folder=tmp_path,
    )

    assert status == 1
    bars = {row for row in screen.every_row if "SmolLM2" in row and ": contacting the Hub" in row}
    assert bars, "a bar was shown"
    assert all(row.endswith(": contacting the Hub") for row in bars)
    left = [row for row in screen.rows if "contacting the Hub" in row or "downloading [" in row]
    assert left == [], "and was taken away"
    assert next(row for row in screen.rows if row).startswith(
        "tinsmith: could not download HuggingFaceTB/"
    )


def test_service_log_lines_and_a_progress_bar_never_share_a_row(tmp_path: Path) -> None:
    make_model(tmp_path / "small", "Llama", vocab_size=64, hidden_size=32)
    command = [sys.executable, "-m", "tinsmith", "serve", "--port=0", "--log-level=debug"]

    stopped: list[bool] = []

    def stop(screen: Screen, process: subprocess.Popen[bytes]) -> None:
        if not stopped and any("serving on" in row for row in screen.rows):
            stopped.append(True)  # once more would end it at once
            process.send_signal(signal.SIGINT)

    status, screen = run_at_terminal(
        [*command, "--engine=embedded", f"--model=small={tmp_path / 'small'}"],
        environment=environment(tmp_path),
        until=stop,
    )

    assert status == 0
    bars = {row for row in screen.every_row if "small: loading" in row}
    assert bars == {"small: loading"}
