"""How long the other side asked to wait: the `retry-after` headers, read and written.

The client's retry code gets a delay in seconds, or `None` where the headers say nothing usable and
it should compute its own backoff. Servers get both headers for a delay they have chosen.

`retry-after-ms` counts first. `retry-after` follows RFC 9110: whole seconds, or a date in any of
the three forms HTTP has used; fractions of a second are taken too, as the official SDK does. What
does not fit is no error: a header is advice, and a hostile one must not stop a retry.

Knows nothing of backoff, jitter or how often to retry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.errors import ValidationError

DEFAULT_CAP_S: Final = 60.0
"""A longer wait is cut to this. The official SDK ignores longer ones and comes back sooner."""

_LONGEST_VALUE = 64  # characters; the longest honest value, an RFC 850 date, has 33

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE)

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAY_NAME = "(?:mon|tue|wed|thu|fri|sat|sun)"
_LONG_DAY_NAME = "(?:monday|tuesday|wednesday|thursday|friday|saturday|sunday)"
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
_DAY = "(?P<day>[0-9]{2})"
_TIME = "(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"

# Names of days and months are spelled out here: strptime would read them in the process's locale.
_DATE_FORMS = (
    f"{_DAY_NAME}, {_DAY} {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT",  # IMF-fixdate
    f"{_LONG_DAY_NAME}, {_DAY}-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT",  # RFC 850
    f"{_DAY_NAME} {_MONTH} (?P<day>[ 0-9][0-9]) {_TIME} (?P<year>[0-9]{{4}})",  # asctime
)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def retry_after_s(
    headers: Mapping[str, str],
    *,
    now: Callable[[], datetime] = _utc_now,
    cap_s: float | None = DEFAULT_CAP_S,
) -> float | None:
    """Read the delay that a reply's headers ask for.

    Never raises, whatever the values are.

    Args:
        headers: The reply's headers; their names in any case.
        now: The clock that dates are compared with; asked only when a date came.
        cap_s: A longer delay is cut to this; `None` lets every finite delay through.

    Returns:
        Seconds to wait, 0.0 for a date that has passed; `None` if neither header holds a date or a
        finite number that is not negative.
    """
    delay_s = _delay_s(headers, now)
    if delay_s is None or cap_s is None:
        return delay_s
    return min(delay_s, cap_s)


def format_retry_after(delay_s: float) -> dict[str, str]:
    """Write both headers for a delay; a negative one, such as a deadline just missed, becomes 0.

    Both are rounded up, so that nobody comes back too early. The official SDK takes no notice of 0
    and of anything above 60 s.

    Raises:
        ValidationError: The delay, in milliseconds, is not a finite number.
    """
    if not math.isfinite(delay_s * 1000):
        raise ValidationError(f"retry delay {delay_s} s cannot be sent; give a finite number")
    # Rounded first: 2.007 s must not become 2008 ms because of its last binary digit.
    delay_ms = math.ceil(round(max(delay_s, 0.0) * 1000, 3))
    return {"retry-after-ms": str(delay_ms), "retry-after": str(-(-delay_ms // 1000))}


def _delay_s(headers: Mapping[str, str], now: Callable[[], datetime]) -> float | None:
    milliseconds = _number(_value(headers, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = _value(headers, "retry-after")
    seconds = _number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def _value(headers: Mapping[str, str], wanted: str) -> str:
    """The header's value without the space around it; empty if it is missing or absurdly long."""
    for name, value in headers.items():
        if name.lower() == wanted:
            return value.strip(" \t") if len(value) <= _LONGEST_VALUE else ""
    return ""


def _number(text: str) -> float | None:
    # float() alone would also take "nan", "1_0" and the digits of every script.
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _seconds_until(text: str, now: Callable[[], datetime]) -> float | None:
    flags = re.ASCII | re.IGNORECASE  # `re` keeps what it has compiled
    match = next((m for form in _DATE_FORMS if (m := re.fullmatch(form, text, flags))), None)
    if match is None:
        return None
    present = now().astimezone(UTC)
    try:
        moment = _moment(match, present)
    except (ValueError, OverflowError):  # 30 February, 25 o'clock, the year 0
        return None
    return max((moment - present).total_seconds(), 0.0)


def _moment(match: re.Match[str], present: datetime) -> datetime:
    month = _MONTHS.index(match["month"].lower()) + 1
    day, hour, minute, second = (int(match[part]) for part in ("day", "hour", "minute", "second"))
    year = int(match["year"])
    if len(match["year"]) == 2:
        year = _full_year(year, (month, day, hour, minute, second), present)
    if second == 60:  # a leap second, which HTTP allows and datetime does not
        return datetime(year, month, day, hour, minute, 59, tzinfo=UTC) + timedelta(seconds=1)
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC)


def _full_year(two_digits: int, rest: tuple[int, ...], present: datetime) -> int:
    """The latest year with these digits that puts the date at most 50 years ahead (RFC 9110)."""
    latest = (present.year + 50, *present.timetuple()[1:6])
    year = latest[0] - latest[0] % 100 + two_digits
    return year if (year, *rest) <= latest else year - 100
