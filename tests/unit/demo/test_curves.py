from __future__ import annotations

import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tinsmith
from tinsmith.demo.curves import Curve, ReportTable, bars, draw, page, ticks


def test_bars_rise_with_the_values() -> None:
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert bars([]) == ""
    assert bars([0.0, 0.0]) == "▁▁"


def test_answers_are_escaped_in_the_page() -> None:
    """A model may answer with a script."""
    hostile = "<script>alert(1)</script>"
    seen: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            del attrs
            seen.append(tag)

    text = page(
        hostile, [hostile], [ReportTable("t", ("a",), [(hostile,)]), Curve("c", "f", [1.0, 2.0])]
    )
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


LOSS = Curve("Supervised learning", "loss per token", [2.9, 1.1, 0.4, 0.2])
REWARD = Curve("Reinforcement learning", "mean reward", [0.1, 0.3, 0.8])


def size_of(path: Path) -> tuple[int, int]:
    """The width and height of a PNG file."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_picture_has_a_panel_for_each_curve(tmp_path: Path) -> None:
    draw("one", [LOSS], tmp_path / "one.png")
    draw("two", [LOSS, REWARD], tmp_path / "two.png")

    width, height = size_of(tmp_path / "one.png")
    assert size_of(tmp_path / "two.png") == (2 * width, height)


def test_the_same_curves_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first.png", "second.png"):
        draw("demo", [LOSS, REWARD], tmp_path / name)

    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_a_picture_of_a_curve_with_one_value_or_none_can_be_drawn(tmp_path: Path) -> None:
    draw("demo", [Curve("c", "f", [0.0]), Curve("c", "f", [])], tmp_path / "few.png")

    assert size_of(tmp_path / "few.png")


def test_can_draw_says_whether_matplotlib_is_installed() -> None:
    """In a Python that sees no installed packages, and in this one."""
    source = Path(tinsmith.__file__).parents[1]
    ask = (
        f"import sys; sys.path.insert(0, {str(source)!r}); from tinsmith.demo import curves; "
        "print(curves.can_draw())"
    )

    results = [
        subprocess.run([sys.executable, *options, "-c", ask], capture_output=True, check=True)
        for options in (["-I", "-S"], ["-I"])
    ]

    assert [one.stdout.split() for one in results] == [[b"False"], [b"True"]]
