from __future__ import annotations

from html.parser import HTMLParser

from tinsmith.demo.curves import Curve, Rows, bars, page


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
