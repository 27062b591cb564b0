"""How a large body is cut into what is written at a time."""

from __future__ import annotations

import pytest

from tinsmith.client.transports.connection import HIGH_WATER_BYTES, pieces_of

SMALL, LARGE = 4000, HIGH_WATER_BYTES * 2 + 1


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        pytest.param([SMALL] * 32, 1, id="small ones leave together"),
        pytest.param([SMALL] * 64, 2, id="as many as fit"),
        pytest.param([HIGH_WATER_BYTES], 1, id="just fitting"),
        pytest.param([LARGE], 3, id="a large one in slices"),
        pytest.param([SMALL, LARGE, SMALL], 5, id="a large one among small ones"),
        pytest.param([0, 0], 1, id="empty ones"),
        pytest.param([], 0, id="none"),
    ],
)
def test_a_body_is_written_in_few_pieces_of_bounded_size(sizes: list[int], count: int) -> None:
    parts = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]

    pieces = list(pieces_of(list(parts)))

    assert len(pieces) == count
    assert all(len(piece) <= HIGH_WATER_BYTES for piece in pieces)
    assert b"".join(pieces) == b"".join(parts)
