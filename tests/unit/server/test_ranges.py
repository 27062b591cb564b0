"""Which part of a file is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.server.ranges import wanted_part


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("", None),
        ("bytes=0-", (0, 10)),
        ("bytes=0-0", (0, 1)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-500", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-400", (0, 10)),
        ("bytes=-0", ()),
        ("bytes=10-", ()),
        ("bytes=99-100", ()),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=\u0661-\u0662", None),
    ],
)
def test_a_part_is_read_as_http_means_it(header: str, part: tuple[int, ...] | None) -> None:
    assert wanted_part(header, 10) == part


@given(st.text(max_size=30) | st.from_regex(r"bytes=[0-9]*-[0-9]*"), st.integers(0, 10**12))
def test_a_part_is_always_inside(header: str, size: int) -> None:
    part = wanted_part(header, size)

    assert not part or 0 <= part[0] < part[1] <= size
