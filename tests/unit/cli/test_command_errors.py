from __future__ import annotations

import json

import pytest

from tinsmith.cli.command_errors import CommandError, described, fail, one_line, report
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    InternalServerError,
    NotFoundError,
)


def test_an_error_shows_the_service_s_message_not_the_raw_body() -> None:
    error = NotFoundError(
        "Error code: 404 - {'detail': 'no run r'}", body={"detail": "no run r"}, request_id="q"
    )

    assert described(error) == {
        "type": "NotFoundError",
        "message": "no run r",
        "remedy": "it may have been deleted, have expired, or belong to someone else",
        "status": 404,
        "request_id": "q",
    }
    assert one_line(error) == "not found: no run r (404)"


@pytest.mark.parametrize(
    ("error", "beginning", "remedy"),
    [
        (AuthenticationError("no key"), "tinsmith: not logged in: no key", "tinsmith auth login"),
        (BillingError("no funds"), "tinsmith: billing problem: no funds", "billing page"),
        (InternalServerError("broken"), "tinsmith: the service failed: broken", "later"),
        (APIStatusError("teapot", status_code=418), "tinsmith: status 418: teapot", ""),
        (APITimeoutError("slow"), "tinsmith: timed out: slow", "--timeout"),
        (APIConnectionError("closed"), "tinsmith: connection failed: closed", "TINKER_BASE_URL"),
        (CommandError("nothing to do"), "tinsmith: nothing to do", ""),
        (FileNotFoundError(2, "No such file", "x"), "tinsmith: FileNotFoundError: ", ""),
    ],
)
def test_an_error_in_text_mode_shows_its_kind_and_the_remedy(
    error: Exception, beginning: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(error, wants_json=False)

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(beginning)
    assert remedy in shown.err


def test_an_error_in_json_mode_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report(CommandError("two\nlines\x1b[0m", remedy="none"), wants_json=True)

    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["error"]["message"] for line in lines] == ["two\nlines\x1b[0m"]


def test_an_internal_error_shows_its_traceback_except_in_json_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistake = ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        fail(mistake, wants_json=False)
    status = fail(mistake, wants_json=True)

    assert status == 1
    assert json.loads(capsys.readouterr().err)["error"]["type"] == "ZeroDivisionError"


def test_an_error_message_cannot_inject_terminal_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(NotFoundError("gone\x1b[2J\nall is well"), wants_json=False)

    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\nall is well" not in shown
