"""How a command ends: signals, pipes, services that fail or are not there."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess

import pytest

from tests.integration.cli.command import TIME_LIMIT_S, Commands
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService


@pytest.mark.parametrize("format_", ["table", "json"])
def test_ctrl_c_while_waiting_exits_with_130_and_no_traceback(
    tinsmith: Commands, service: ScriptedService, format_: str
) -> None:
    hold = service.faults.hold(on="list_training_runs")
    process = tinsmith.start("run", "list", "-f", format_)
    hold.wait_held(1)

    ended = tinsmith.interrupted(process)

    assert (ended.status, ended.out) == (130, "")
    assert ended.err == ("\n" if format_ == "table" else "")


def test_sigterm_exits_with_143(tinsmith: Commands, service: ScriptedService) -> None:
    hold = service.faults.hold(on="list_training_runs")
    process = tinsmith.start("run", "list")
    hold.wait_held(1)

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIME_LIMIT_S)

    assert (process.returncode, out, err) == (143, "", "")


def test_a_closed_pipe_ends_the_command_without_an_error(
    tinsmith: Commands, training: TrainingClient
) -> None:
    for number in range(3):
        training.save_state(f"n{number}").result()
    reader, writer = os.pipe()
    os.close(reader)
    process = tinsmith.start("checkpoint", "list", stdout=writer)
    os.close(writer)

    _, err = process.communicate(timeout=TIME_LIMIT_S)

    assert (process.returncode, err) == (141, "")


def test_a_pipe_to_head_shows_the_first_line(tinsmith: Commands) -> None:
    with tinsmith.start("--help", stderr=subprocess.DEVNULL) as process:
        head = subprocess.run(
            ["head", "-1"], stdin=process.stdout, capture_output=True, text=True, check=True
        )

    assert head.stdout.startswith("usage: tinsmith")


def test_a_closed_port_is_reported_within_seconds(tinsmith: Commands) -> None:
    """Within the limit of any command here; the official one takes 360 s."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    ended = tinsmith.run("run", "list", "--base-url", f"http://127.0.0.1:{port}", "-f", "json")

    assert ended.status == 1
    assert ended.error["type"] == "APIConnectionError"
    assert ended.error["remedy"]


def test_a_402_is_reported_immediately(tinsmith: Commands, service: ScriptedService) -> None:
    detail = {"detail": "the account is empty"}
    service.faults.add(on="client_config", times=None, status=402, body=detail)

    ended = tinsmith.run("run", "list", "-f", "json")

    assert ended.status == 1
    assert (ended.error["status"], ended.error["message"]) == (402, "the account is empty")


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (400, "invalid request"),
        (401, "not logged in"),
        (403, "permission denied"),
        (404, "not found"),
        (422, "invalid value"),
    ],
)
def test_a_rejection_is_reported_as_text_and_as_json(
    tinsmith: Commands, service: ScriptedService, status: int, word: str
) -> None:
    service.faults.add(
        on="get_training_run", times=None, status=status, body={"detail": "because of this"}
    )

    shown = tinsmith.run("run", "info", "r")
    plain = tinsmith.run("run", "info", "r", "-f", "json")

    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith(f"tinsmith: {word}: because of this ({status})")
    assert (plain.status, plain.out) == (1, "")
    assert (plain.error["status"], plain.error["message"]) == (status, "because of this")


def test_a_temporary_service_failure_is_retried(
    tinsmith: Commands, service: ScriptedService
) -> None:
    service.faults.add(on="list_training_runs", times=2, status=503)

    assert tinsmith.run("run", "list").status == 0


def test_the_timeout_can_be_set(tinsmith: Commands, service: ScriptedService) -> None:
    service.faults.hold(on="get_training_run")

    ended = tinsmith.run("run", "info", "r", "--timeout", "0.5", "-f", "json")

    assert ended.status == 1
    assert ended.error["type"] == "APITimeoutError"
    assert "0.5 s" in ended.error["message"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_service_that_stays_busy_is_retried_until_the_timeout(
    tinsmith: Commands, service: ScriptedService, status: int
) -> None:
    service.faults.add(on="get_training_run", times=None, status=status)

    ended = tinsmith.run("run", "info", "r", "--timeout", "2", "-f", "json")

    assert ended.status == 1
    assert ended.error["status"] == status
    assert len(service.requests("get_training_run")) > 1


@pytest.mark.parametrize("words", [("run", "list"), ("model", "list"), ("auth", "status")])
def test_no_command_loads_torch_or_transformers(tinsmith: Commands, words: tuple[str, ...]) -> None:
    ended = tinsmith.run(*words, environment={"PYTHONPROFILEIMPORTTIME": "1"})

    lines = [line for line in ended.err.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert ended.status == 0
    assert "tinsmith" in loaded
    assert loaded & {"torch", "transformers", "numpy", "tinker", "pydantic"} == set()


def test_no_telemetry_is_sent(tinsmith: Commands, service: ScriptedService) -> None:
    tinsmith.run("run", "list")
    tinsmith.run("run", "info", "not-there")

    assert service.requests("telemetry") == []


def test_text_from_the_service_cannot_inject_terminal_escapes(
    tinsmith: Commands, service: ScriptedService
) -> None:
    service.faults.add(
        on="get_training_run", times=None, status=404, body={"detail": "\x1b[2Jgone\nreally"}
    )

    ended = tinsmith.run("run", "info", "r")

    assert "\x1b" not in ended.err
    assert "\nreally" not in ended.err


def test_a_malformed_reply_fails_with_a_clear_message(
    tinsmith: Commands, service: ScriptedService
) -> None:
    service.faults.add(on="get_training_run", times=None, status=200, body={"colour": "red"})

    ended = tinsmith.run("run", "info", "r", "-f", "json")

    assert ended.status == 1
    assert ended.error["type"] == "APIResponseValidationError"


def on_terminal(tinsmith: Commands, *words: str) -> tuple[str, str]:
    """Run a command with stderr on a terminal; gives stdout and what the terminal got."""
    leader, follower = pty.openpty()
    process = tinsmith.start(*words, stderr=follower)
    os.close(follower)
    shown = b""
    while process.poll() is None or select.select([leader], [], [], 0)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                shown += os.read(leader, 10_000)
            except OSError:  # everything was read, and the other side is closed
                break
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    os.close(leader)
    assert process.returncode == 0, shown
    return out, shown.decode()


def test_a_progress_bar_is_shown_on_a_terminal_and_removed(
    tinsmith: Commands, checkpoint: str
) -> None:
    out, shown = on_terminal(tinsmith, "checkpoint", "download", checkpoint)

    assert "Downloading [" in shown
    assert shown.endswith("\r\x1b[K")
    assert "\x1b" not in out


def test_no_bar_is_shown_in_json_mode_or_without_a_terminal(
    tinsmith: Commands, checkpoint: str
) -> None:
    _, shown = on_terminal(tinsmith, "checkpoint", "download", checkpoint, "-f", "json")
    ended = tinsmith.run("checkpoint", "download", checkpoint, "--force")

    assert shown == ""
    assert (ended.status, ended.err) == (0, "")
