"""Errors as HTTP responses and back, and the delays that servers ask for (S20, S31)."""

from __future__ import annotations

import locale
import math
import pickle
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith import errors as e
from tinsmith.errors import ValidationError
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire import json_format
from tinsmith.wire.failures import (
    DEFAULT_CAP_S,
    error_from_failed,
    error_from_reply,
    failed_from_error,
    format_retry_after,
    is_retried,
    reply_from_error,
    retry_after_s,
    status_class,
    status_of,
)

STATUSES = {
    400: e.BadRequestError,
    401: e.AuthenticationError,
    402: e.BillingError,
    403: e.PermissionDeniedError,
    404: e.NotFoundError,
    409: e.ConflictError,
    422: e.UnprocessableEntityError,
    429: e.RateLimitError,
    500: e.InternalServerError,
    503: e.InternalServerError,
    599: e.InternalServerError,
    408: e.APIStatusError,
    410: e.APIStatusError,
    418: e.APIStatusError,
}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (e.CheckpointNotFoundError("tinker://r/weights/c is not there"), 404),
        (e.CheckpointExistsError("it is there"), 400),
        (e.CheckpointFormatError("no adapter"), 422),
        (e.CheckpointUnavailableError("/srv/secret cannot be read"), 503),
        (e.StorageFullError("/srv/secret is full"), 503),
        (e.CheckpointDamagedError("/srv/secret/file differs"), 500),
    ],
)
def test_checkpoint_errors_have_a_status_and_reveal_no_folder(
    error: e.CheckpointError, status: int
) -> None:
    reply = reply_from_error(error)

    assert reply.status == status
    assert b"/srv" not in b"".join(reply.parts)
    assert "/srv" not in failed_from_error(error).error
    assert ("retry-after-ms" in {name.lower() for name in reply.headers}) is (status == 503)


# A refusal, as the client sees it


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_becomes_the_error_that_programs_catch(status: int) -> None:
    error = error_from_reply(status, {}, b'{"detail": "no"}', request_id="r-1")

    assert type(error) is status_class(status) is STATUSES[status]
    assert error.status_code == status
    assert error.request_id == "r-1"
    assert str(error) == f"Error code: {status} - no"
    assert error.body == {"detail": "no"}


@pytest.mark.parametrize(
    ("body", "message", "held"),
    [
        (b'{"detail": "no"}', "Error code: 400 - no", {"detail": "no"}),
        (b'{"error": "no"}', "Error code: 400 - no", {"error": "no"}),
        (b'{"detail": [1]}', "Error code: 400 - {'detail': [1]}", {"detail": [1]}),
        (b"[1]", "Error code: 400 - [1]", [1]),
        (b'"no"', "Error code: 400 - 'no'", "no"),
        (b"null", "Error code: 400 - None", None),
        (b"<html>no</html>", "<html>no</html>", "<html>no</html>"),
        (b"", "Error code: 400", ""),
        (b"\xff\xfe", "\ufffd\ufffd", "\ufffd\ufffd"),
    ],
)
def test_a_message_shows_the_body_as_json_as_text_or_not_at_all(
    body: bytes, message: str, held: object
) -> None:
    for form in (body, memoryview(body)):
        error = error_from_reply(400, {}, form)

        assert str(error) == message
        assert error.body == held


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("https://h.example/api/v1/x?signature=secret", "'https://h.example'"),
        ("https://me:secret@h.example:8443/api", "'https://h.example:8443'"),
        ("/api/v2/x?signature=secret", "'another path'"),
    ],
)
def test_a_redirect_error_names_the_host_without_possible_secrets(address: str, told: str) -> None:
    error = error_from_reply(307, {"Location": address}, b"")

    assert str(error) == (
        f"Error code: 307; it redirects to {told}: check that the base URL is the service's"
    )
    assert error.status_code == 307


def test_an_invalid_redirect_location_is_not_shown() -> None:
    assert str(error_from_reply(307, {"location": "https://[h"}, b"")) == "Error code: 307"
    assert str(error_from_reply(400, {"location": "https://h"}, b"")) == "Error code: 400"


def test_the_retry_after_delay_is_kept() -> None:
    assert error_from_reply(429, {"retry-after": "7"}, b"{}").retry_after_s == 7
    assert error_from_reply(429, {"retry-after-ms": "250"}, b"{}").retry_after_s == 0.25
    assert error_from_reply(429, {"retry-after": "soon"}, b"{}").retry_after_s is None


def test_an_error_keeps_the_reply_and_can_be_pickled() -> None:
    error = error_from_reply(429, {"x-request-id": "a"}, b'{"detail": "no"}')

    again = pickle.loads(pickle.dumps(error))

    assert again.response.status_code == 429
    assert again.response.headers == {"x-request-id": "a"}
    assert repr(again.response) == "FailedReply(429)"
    assert again.body == error.body


def test_the_shown_part_of_a_huge_body_is_bounded() -> None:
    text = error_from_reply(500, {}, b"x" * 10_000_000)
    listed = error_from_reply(500, {}, b'["' + b"x" * 500_000 + b'"]')

    assert len(str(text)) <= 64 * 1024
    assert len(str(listed)) <= 65 * 1024


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_clients_retry_after(status: int) -> None:
    assert is_retried(status)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 410, 413, 422])
def test_clients_do_not_retry_after(status: int) -> None:
    assert not is_retried(status)


# An error, as the server answers it


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (e.BadRequestError("x"), 400),
        (e.NotFoundError("x"), 404),
        (e.RateLimitError("x"), 429),
        (e.APIStatusError("x", status_code=410), 410),
        (e.DecodeError("x"), 400),
        (e.BodyTooLargeError("x"), 413),
        (e.ValidationError("x"), 422),
        (e.UnknownFieldError("x"), 422),
        (e.TinkerError("x"), 500),
        (e.RequestFailedError("x"), 500),
        (RuntimeError("x"), 500),
        (ValueError("x"), 500),
        (KeyboardInterrupt(), 500),
    ],
)
def test_each_error_maps_to_a_status(error: BaseException, status: int) -> None:
    assert status_of(error) == status
    assert reply_from_error(error).status == status


def test_a_rejection_round_trips() -> None:
    raised = e.RateLimitError("too many samples", remedy="send fewer", retry_after_s=1.5)

    reply = reply_from_error(raised)

    headers = {name.lower(): value for name, value in reply.headers.items()}
    error = error_from_reply(reply.status, headers, b"".join(reply.parts))
    assert type(error) is e.RateLimitError
    assert error.retry_after_s == 1.5
    assert error.body == {"detail": "too many samples; send fewer"}


@pytest.mark.parametrize("error", [e.BadRequestError(""), e.ValidationError(), Exception("")])
def test_a_rejection_always_has_a_message(error: Exception) -> None:
    """Clients take an empty 400 for a broken connection, and try again."""
    reply = reply_from_error(error)

    body = b"".join(reply.parts)
    assert json_format.decode_any(body)["detail"]
    assert reply.headers["Content-Length"] == str(len(body))


def test_foreign_errors_reveal_no_internals() -> None:
    error = RuntimeError("password is hunter2")

    assert b"hunter2" not in b"".join(reply_from_error(error).parts)
    assert "hunter2" not in failed_from_error(error).error


def test_damaged_weights_are_reported_without_their_location() -> None:
    """To try again, as with a store that is away, would not help."""
    told = failed_from_error(e.CheckpointDamagedError("/srv/secret/adapter has 3 bytes")).error

    assert "corrupt" in told
    assert "/srv" not in told


@pytest.mark.parametrize(
    "kind",
    [
        e.BaseModelFormatError,
        e.BaseModelUnavailableError,
        e.CheckpointUnavailableError,
        e.LedgerDamagedError,
        e.LedgerUnavailableError,
        e.LedgerVersionError,
        e.StorageFullError,
    ],
)
def test_server_disk_errors_are_reported_without_folders(
    kind: type[e.TinkerError],
) -> None:
    error = kind("/srv/secret/file cannot be read")

    assert b"/srv" not in b"".join(reply_from_error(error).parts)
    assert "/srv" not in failed_from_error(error).error


def test_unencodable_text_does_not_prevent_a_response() -> None:
    for error in (e.BadRequestError("no model \ud800"), e.RequestFailedError("no model \ud800")):
        reply = reply_from_error(error)
        failed = json_format.encode(failed_from_error(error))

        assert json_format.decode_any(b"".join(reply.parts))["detail"] == "no model ?"
        assert json_format.decode_any(failed)["error"] == "no model ?"


# A failed operation


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (e.ValidationError("x"), "user"),
        (e.BadRequestError("x"), "user"),
        (e.InternalServerError("x"), "server"),
        (e.TinkerError("x"), "server"),
        (RuntimeError("x"), "server"),
        (e.RequestFailedError("x", category=e.RequestErrorCategory.Unknown), "unknown"),
    ],
)
def test_a_failure_has_the_category_of_who_can_fix_it(error: Exception, category: str) -> None:
    assert failed_from_error(error).category is e.RequestErrorCategory(category)


def test_a_failure_round_trips() -> None:
    raised = e.RequestFailedError("out of memory", "r-1", e.RequestErrorCategory.Server)
    body = json_format.encode(failed_from_error(raised))

    error = error_from_failed(json_format.decode_any(body), "r-1")

    assert (error.message, error.request_id, error.category) == (
        "out of memory",
        "r-1",
        e.RequestErrorCategory.Server,
    )


@pytest.mark.parametrize(
    "plain", [{}, {"error": None}, {"error": {"message": 5}}, {"error": [], "category": {}}]
)
def test_a_failure_of_any_shape_becomes_an_error(plain: dict[str, Any]) -> None:
    error = error_from_failed(plain, "r-1")

    assert error.request_id == "r-1"
    assert error.category is e.RequestErrorCategory.Unknown


def test_a_failure_keeps_its_remedy() -> None:
    failed = failed_from_error(e.ValidationError("rank is 0", remedy="use 1 or more"))

    assert failed == RequestFailedResponse(
        error="rank is 0; use 1 or more", category=e.RequestErrorCategory.User
    )


def test_headers_of_an_error_are_case_insensitive_and_contain_no_cookies() -> None:
    error = error_from_reply(429, {"Retry-After": "3", "Set-Cookie": "id=secret"}, b"")

    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert copy.response.headers["RETRY-AFTER"] == copy.response.headers.get("retry-after")
        assert "Retry-after" in copy.response.headers
        assert "set-cookie" not in copy.response.headers
        assert copy.response.headers.get("missing", "none") == "none"


NOW = datetime(1994, 11, 6, 8, 49, 7, tzinfo=UTC)


def delay_s(
    value: str, *, name: str = "retry-after", now: datetime = NOW, cap_s: float | None = None
) -> float | None:
    return retry_after_s({name: value}, now=lambda: now, cap_s=cap_s)


def test_s31_no_header_means_own_backoff() -> None:
    delay = retry_after_s({"content-type": "text/plain"})

    assert delay is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0.0), ("7", 7.0), ("1.5", 1.5), (".25", 0.25), ("2.", 2.0), ("1.1e-05", 1.1e-05)],
)
def test_s31_seconds_may_be_whole_or_fractions(value: str, seconds: float) -> None:
    delay = delay_s(value)

    assert delay == seconds


def test_s31_milliseconds_take_precedence_over_seconds() -> None:
    delay = retry_after_s({"retry-after": "9", "retry-after-ms": "1500"})

    assert delay == 1.5


@pytest.mark.parametrize("junk", ["", "soon", "-5", "nan", "inf", "1e999", "9" * 5000])
def test_s31_junk_milliseconds_fall_through_to_seconds(junk: str) -> None:
    delay = retry_after_s({"retry-after-ms": junk, "retry-after": "9"})

    assert delay == 9.0


@pytest.mark.parametrize("name", ["Retry-After", "RETRY-AFTER", "retry-after"])
def test_s31_header_names_are_case_insensitive(name: str) -> None:
    delay = delay_s("3", name=name)

    assert delay == 3.0


def test_s31_whitespace_around_a_value_is_ignored() -> None:
    delay = delay_s(" \t3 ")

    assert delay == 3.0


@pytest.mark.parametrize(
    "date",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
    ],
    ids=["imf-fixdate", "rfc850", "asctime"],
)
def test_s31_all_three_date_forms_are_read(date: str) -> None:
    delay = delay_s(date)

    assert delay == 30.0


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Sun, 06 Nov 1994 08:49:37", 30.0),
        ("Sun, 06 Nov 1994 08:49:37 PST", 8 * 3600 + 30.0),
        ("Sun, 06 Nov 1994 09:49:37 +0100", 30.0),
    ],
)
def test_s31_a_date_without_a_zone_is_utc_and_another_zone_is_honoured(
    date: str, seconds: float
) -> None:
    delay = delay_s(date)

    assert delay == seconds


def test_s31_a_past_date_means_no_wait() -> None:
    delay = delay_s("Sun, 06 Nov 1994 08:49:06 GMT")

    assert delay == 0.0


def test_s31_a_clock_in_another_zone_is_understood() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))

    delay = delay_s("Sun, 06 Nov 1994 08:49:37 GMT", now=elsewhere)

    assert delay == 30.0


def test_s31_the_clock_is_read_only_for_dates() -> None:
    def clock() -> datetime:
        raise AssertionError("no date came")

    assert retry_after_s({"retry-after": "5"}, now=clock) == 5.0
    assert retry_after_s({"retry-after": "junk"}, now=clock) is None


@pytest.mark.parametrize(
    ("now", "date", "meant"),
    [
        # Exactly 50 years ahead is still the future; a second more is the past.
        ((1994, 11, 6), "Sunday, 06-Nov-44 00:00:00 GMT", (2044, 11, 6)),
        ((1994, 11, 6), "Sunday, 06-Nov-44 00:00:01 GMT", None),
        ((1994, 11, 6), "Sunday, 07-Nov-44 00:00:00 GMT", None),
        ((2099, 12, 31), "Friday, 01-Jan-00 00:00:00 GMT", (2100, 1, 1)),
        ((2026, 2, 1), "Saturday, 01-Mar-26 00:00:00 GMT", (2026, 3, 1)),
        ((2026, 2, 1), "Saturday, 01-Mar-99 00:00:00 GMT", None),
    ],
)
def test_s31_two_digit_years_lie_at_most_fifty_years_ahead(
    now: tuple[int, int, int], date: str, meant: tuple[int, int, int] | None
) -> None:
    present = datetime(*now, tzinfo=UTC)

    delay = delay_s(date, now=present)

    expected = (datetime(*meant, tzinfo=UTC) - present).total_seconds() if meant else 0.0
    assert delay == expected


def test_s31_a_leap_day_is_read_where_it_exists() -> None:
    present = datetime(2024, 2, 28, 0, 0, 0, tzinfo=UTC)

    assert delay_s("Thu, 29 Feb 2024 00:00:00 GMT", now=present) == 86_400.0
    assert delay_s("Thursday, 29-Feb-24 00:00:00 GMT", now=present) == 86_400.0
    assert delay_s("Sat, 29 Feb 2025 00:00:00 GMT", now=present) is None


@pytest.mark.parametrize(
    "date",
    [
        "Sat, 31 Dec 2016 23:59:60 GMT",
        "Saturday, 31-Dec-16 23:59:60 GMT",
        "Sat Dec 31 23:59:60 2016",
    ],
)
def test_s31_a_leap_second_is_read(date: str) -> None:
    present = datetime(2016, 12, 31, 23, 59, 50, tzinfo=UTC)

    delay = delay_s(date, now=present)

    assert delay == 10.0


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "-0.5",
        "+5",
        "nan",
        "NaN",
        "inf",
        "Infinity",
        "1e999",
        "0x10",
        "1_000",
        "１２",  # noqa: RUF001  digits of another script are the point
        "٣",
        "5 s",
        "5, 10",
        "1" * 100_000,
        "0" * 64 + "5",
        " " * 100_000,
        "1e" + "9" * 50,
        "Sun, 06 Nov 1994 25:00:00 GMT",
        "Sun, 06 Nov 1994 08:61:00 GMT",
        "Sun, 30 Feb 1994 00:00:00 GMT",
        "Sun, 00 Jan 1994 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:60 GMT",
        "Sun, 06 Nov 1994 08:49:37 GMT\n",
        "Ѕun, 06 Nov 1994 08:49:37 GMT",  # noqa: RUF001  a Cyrillic letter
        "ſun, 06 Nov 1994 08:49:37 GMT",  # noqa: RUF001  whose capital is S
        "\0",
        "\ud800",
    ],
)
def test_s31_junk_means_own_backoff(value: str) -> None:
    delay = delay_s(value)

    assert delay is None


def test_s31_the_last_year_is_read() -> None:
    delay = delay_s("Fri, 31 Dec 9999 23:59:59 GMT", now=datetime(9999, 12, 31, tzinfo=UTC))

    assert delay == 86_399.0


def test_s31_a_wait_above_the_cap_is_cut_to_it() -> None:
    headers = {"retry-after": "3600"}

    assert retry_after_s(headers) == DEFAULT_CAP_S == 60.0
    assert retry_after_s(headers, cap_s=5.0) == 5.0
    assert retry_after_s(headers, cap_s=None) == 3600.0
    assert delay_s("Mon, 07 Nov 1994 08:49:07 GMT", cap_s=60.0) == 60.0


def test_s31_dates_do_not_depend_on_the_locale() -> None:
    before = locale.setlocale(locale.LC_TIME)
    available = [name for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8") if _set_locale(name)]
    try:
        delay = delay_s("Wed, 07 Dec 1994 08:49:07 GMT")
    finally:
        locale.setlocale(locale.LC_TIME, before)

    assert available
    assert delay == 31 * 86_400.0


def _set_locale(name: str) -> bool:
    try:
        locale.setlocale(locale.LC_TIME, name)
    except locale.Error:
        return False
    return True


@given(st.text(), st.text(), st.none() | st.floats(min_value=0))
def test_s31_no_value_raises(milliseconds: str, seconds: str, cap_s: float | None) -> None:
    headers = {"Retry-After-Ms": milliseconds, "Retry-After": seconds}

    delay = retry_after_s(headers, now=lambda: NOW, cap_s=cap_s)

    assert delay is None or (math.isfinite(delay) and delay >= 0)


@given(
    st.from_regex(
        r"\A(Mon|Monday|Tue)[, ]{1,2}[0-9]{1,2}[- ](Feb|Dec)[- ][0-9]{2,4} [0-9:]{8}( GMT)?\Z"
    ),
    st.datetimes(timezones=st.just(UTC)),
)
def test_s31_no_date_raises(date: str, now: datetime) -> None:
    delay = delay_s(date, now=now)

    assert delay is None or delay >= 0


@given(st.datetimes(min_value=datetime(1000, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001  hypothesis asks for it
def test_s31_every_imf_date_is_read_exactly(moment: datetime) -> None:
    moment = moment.replace(microsecond=0)
    now = moment - timedelta(seconds=90)

    delay = delay_s(format_datetime(moment, usegmt=True), now=now)

    assert delay == 90.0


@pytest.mark.parametrize(
    ("wait_s", "milliseconds", "seconds"),
    [
        (0, "0", "0"),
        (-3.0, "0", "0"),
        (0.0004, "1", "1"),
        (2.007, "2007", "3"),
        (30, "30000", "30"),
    ],
)
def test_both_headers_are_written_and_rounded_up(
    wait_s: float, milliseconds: str, seconds: str
) -> None:
    headers = format_retry_after(wait_s)

    assert headers == {"retry-after-ms": milliseconds, "retry-after": seconds}


@given(st.floats(min_value=0, max_value=1e9))
def test_a_written_delay_is_read_back_and_never_shorter(wait_s: float) -> None:
    headers = format_retry_after(wait_s)

    read = retry_after_s(headers, cap_s=None)

    assert read is not None
    assert wait_s - 1e-6 <= read <= wait_s + 0.002


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -math.inf, 1e308])
def test_a_delay_that_is_not_finite_is_rejected(wait_s: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        format_retry_after(wait_s)
