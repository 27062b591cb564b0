from __future__ import annotations

import json

import pytest

from tinsmith.cli.failures import CommandError, described, in_short, report, told
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    InternalServerError,
    NotFoundError,
)


def test_an_error_says_what_the_service_said_and_not_its_body() -> None:
    error = NotFoundError(
        "Error code: 404 - {'detail': 'no run r'}", body={"detail": "no run r"}, request_id="q"
    )

    assert described(error) == {
        "type": "NotFoundError",
        "message": "no run r",
        "remedy": "it may be deleted or expired, or belong to somebody else",
        "status": 404,
        "request_id": "q",
    }
    assert in_short(error) == "not found: no run r (404)"


@pytest.mark.parametrize(
    ("error", "beginning", "remedy"),
    [
        (AuthenticationError("no key"), "tinsmith: not signed in: no key", "tinsmith auth login"),
        (BillingError("no funds"), "tinsmith: billing: no funds", "billing page"),
        (InternalServerError("broken"), "tinsmith: the service failed: broken", "later"),
        (APIStatusError("teapot", status_code=418), "tinsmith: refused with 418: teapot", ""),
        (APITimeoutError("slow"), "tinsmith: timed out: slow", "--timeout"),
        (APIConnectionError("closed"), "tinsmith: connection failed: closed", "TINKER_BASE_URL"),
        (CommandError("nothing to do"), "tinsmith: nothing to do", ""),
        (FileNotFoundError(2, "No such file", "x"), "tinsmith: FileNotFoundError: ", ""),
    ],
)
def test_an_error_for_people_says_what_kind_it_is_and_what_to_do(
    error: Exception, beginning: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(error, wants_json=False)

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(beginning)
    assert remedy in shown.err


def test_an_error_for_programs_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report(CommandError("two\nlines\x1b[0m", remedy="none"), wants_json=True)

    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["error"]["message"] for line in lines] == ["two\nlines\x1b[0m"]


def test_a_mistake_of_ours_keeps_its_traceback_unless_a_program_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistake = ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        told(mistake, wants_json=False)
    status = told(mistake, wants_json=True)

    assert status == 1
    assert json.loads(capsys.readouterr().err)["error"]["type"] == "ZeroDivisionError"


def test_a_message_from_elsewhere_cannot_play_tricks_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(NotFoundError("gone\x1b[2J\nall is well"), wants_json=False)

    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\nall is well" not in shown
