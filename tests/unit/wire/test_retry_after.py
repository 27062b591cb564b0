"""Delays that a server asks for, in every form that headers have had (S20, S31)."""

from __future__ import annotations

import locale
import math
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import ValidationError
from tinsmith.wire.retry_after import DEFAULT_CAP_S, format_retry_after, retry_after_s

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


def test_s31_milliseconds_count_before_seconds() -> None:
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


def test_s31_space_around_a_value_is_dropped() -> None:
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


def test_s31_a_past_date_means_no_wait() -> None:
    delay = delay_s("Sun, 06 Nov 1994 08:49:06 GMT")

    assert delay == 0.0


def test_s31_a_clock_in_another_zone_is_understood() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))

    delay = delay_s("Sun, 06 Nov 1994 08:49:37 GMT", now=elsewhere)

    assert delay == 30.0


def test_s31_the_clock_is_asked_only_for_dates() -> None:
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


def test_s31_a_leap_second_is_read() -> None:
    present = datetime(2016, 12, 31, 23, 59, 50, tzinfo=UTC)

    delay = delay_s("Sat, 31 Dec 2016 23:59:60 GMT", now=present)

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
        "Sun, 06 Nov 1994 08:49:37",
        "Sun, 06 Nov 1994 08:49:37 PST",
        "Sun, 06 Nov 1994 25:00:00 GMT",
        "Sun, 06 Nov 1994 08:61:00 GMT",
        "Sun, 30 Feb 1994 00:00:00 GMT",
        "Sun, 00 Jan 1994 00:00:00 GMT",
        "Sun, 06 Nov 0000 08:49:37 GMT",
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
def test_a_delay_that_is_not_finite_is_refused(wait_s: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        format_retry_after(wait_s)
