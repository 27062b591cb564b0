from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import tinsmith
from tinsmith.demo.curves import Curve
from tinsmith.demo.picture import draw

LOSS = Curve("Learning from examples", "loss of a token", [2.9, 1.1, 0.4, 0.2])
REWARD = Curve("Learning from rewards", "mean reward", [0.1, 0.3, 0.8])


def size_of(path: Path) -> tuple[int, int]:
    """The width and height that a PNG file tells of."""
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


def test_a_curve_of_one_value_or_none_can_be_drawn(tmp_path: Path) -> None:
    draw("demo", [Curve("c", "f", [0.0]), Curve("c", "f", [])], tmp_path / "few.png")

    assert size_of(tmp_path / "few.png")


def test_without_matplotlib_it_is_known_that_nothing_can_be_drawn() -> None:
    """Asked in a Python that sees no installed packages, and in this one."""
    source = Path(tinsmith.__file__).parents[1]
    ask = (
        f"import sys; sys.path.insert(0, {str(source)!r}); from tinsmith.demo import picture; "
        "print(picture.can_draw())"
    )

    told = [
        subprocess.run([sys.executable, *options, "-c", ask], capture_output=True, check=True)
        for options in (["-I", "-S"], ["-I"])
    ]

    assert [one.stdout.split() for one in told] == [[b"False"], [b"True"]]
