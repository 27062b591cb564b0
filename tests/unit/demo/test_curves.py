from __future__ import annotations

from html.parser import HTMLParser

import pytest

from tinsmith.demo.curves import Curve, Rows, bars, page, ticks


def test_bars_rise_with_the_values() -> None:
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert bars([]) == ""
    assert bars([0.0, 0.0]) == "▁▁"


def test_the_page_shows_answers_as_text_whatever_they_hold() -> None:
    """A model may answer with a script."""
    hostile = "<script>alert(1)</script>"
    seen: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            del attrs
            seen.append(tag)

    text = page(hostile, [hostile], [Rows("t", ("a",), [(hostile,)]), Curve("c", "f", [1.0, 2.0])])
    Tags().feed(text)

    assert "script" not in seen
    assert {"svg", "polyline", "table"} <= set(seen)


def test_a_curve_of_one_value_or_none_can_be_drawn() -> None:
    assert "polyline" in page("t", [], [Curve("c", "f", [0.0]), Curve("c", "f", [])])


def test_ticks_are_round_and_reach_the_largest_value() -> None:
    assert ticks(1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1.231) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.25])
    assert ticks(57.4) == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    assert ticks(0.0) == [0.0, 1.0]


def test_a_curve_has_axes_with_ticks_and_names() -> None:
    text = page("t", [], [Curve("c", "loss per token", [1.0, 0.5, 0.25])])

    for shown in (">0<", ">0.2<", ">1<", ">2<", ">3<", ">step<", ">loss per token<"):
        assert shown in text
