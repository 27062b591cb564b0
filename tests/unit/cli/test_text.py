from __future__ import annotations

import datetime

import pytest

from tinsmith.cli.text import harmless, moment_from, printable, time_text, width_of
from tinsmith.observe.terminal import size_text

NOW = datetime.datetime(2026, 7, 13, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "N/A"),
        (-1, "N/A"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KB"),
        (123_417_395, "117.7 MB"),
        (1024**2 - 1, "1.0 MB"),
        (5 * 1024**6, "5120.0 PB"),
    ],
)
def test_sizes_are_written_in_units_of_1024(size: int | None, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        ({"seconds": 10}, "just now"),
        ({"seconds": -10}, "in less than a minute"),
        ({"minutes": 1}, "1 minute ago"),
        ({"hours": 2}, "2 hours ago"),
        ({"days": -3}, "in 3 days"),
        ({"days": 30}, "30 days ago"),
        ({"days": 31}, "2026-06-12"),
    ],
)
def test_times_are_written_relative_to_now(ago: dict[str, int], text: str) -> None:
    assert time_text(NOW - datetime.timedelta(**ago), now=NOW) == text


def test_a_time_without_a_zone_is_taken_as_utc() -> None:
    assert moment_from("2026-07-13") == datetime.datetime(2026, 7, 13, tzinfo=datetime.UTC)
    assert moment_from("2026-07-13T12:00:00Z") == NOW
    assert moment_from("2026-07-13T14:00:00+02:00") == NOW


def test_control_characters_do_not_reach_a_terminal() -> None:
    hostile = "a\x1b[2Jb\nc\x9bd"

    assert printable(hostile) == r"a\x1b[2Jb\nc\x9bd"
    assert harmless(hostile) == "a\\x1b[2Jb\nc\\x9bd"


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("日本", 4), ("e\u0301", 1), ("", 0)])
def test_text_width_is_measured_in_terminal_columns(text: str, width: int) -> None:
    assert width_of(text) == width
