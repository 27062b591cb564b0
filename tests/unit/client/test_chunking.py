from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith import types as t
from tinsmith.client.chunking import datum_bytes, split
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.wire.proto_format import encode_forward_backward_request

MAX_BYTES = 5_000_000
MAX_DATUMS = 1024


def a_datum(token_count: int) -> t.Datum:
    """A datum of 4 bytes for each token."""
    return t.Datum(t.ModelInput.from_ints(np.zeros(token_count, dtype="int32")))


def sizes(chunks: list[list[t.Datum]]) -> list[int]:
    return [len(chunk) for chunk in chunks]


def test_64_long_datums_make_8_chunks() -> None:
    """As in the official SDK: seven chunks of nine, and one of what is left."""
    tokens = np.zeros(32_768, dtype="int32")
    inputs = {
        "target_tokens": np.zeros(32_768, dtype="int64"),
        "weights": np.ones(32_768, dtype="float32"),
    }
    data = [t.Datum(t.ModelInput.from_ints(tokens), inputs) for _ in range(64)]

    chunks = split(data, max_datums=MAX_DATUMS, max_bytes=MAX_BYTES)

    assert sizes(chunks) == [9] * 7 + [1]


def test_no_data_makes_no_chunk() -> None:
    assert split([], max_datums=MAX_DATUMS, max_bytes=MAX_BYTES) == []


def test_a_large_datum_travels_alone() -> None:
    small, large = a_datum(1), a_datum(1_000)

    chunks = split([large, small, small, large, large, small], max_datums=10, max_bytes=100)

    assert sizes(chunks) == [1, 2, 1, 1, 1]
    assert chunks[0] == chunks[2] == [large]


def test_a_chunk_is_full_when_the_limits_are_reached_exactly() -> None:
    data = [a_datum(25)] * 4  # 100 bytes each

    assert sizes(split(data, max_datums=10, max_bytes=200)) == [2, 2]
    assert sizes(split(data, max_datums=10, max_bytes=199)) == [1, 1, 1, 1]
    assert sizes(split(data, max_datums=3, max_bytes=1_000)) == [3, 1]
    assert sizes(split(data, max_datums=4, max_bytes=400)) == [4]


def test_empty_datums_are_counted_by_number() -> None:
    data = [t.Datum(t.ModelInput.empty())] * 5

    assert sizes(split(data, max_datums=2, max_bytes=0)) == [2, 2, 1]


@given(
    st.lists(st.integers(0, 40), max_size=30),
    st.integers(1, 6),
    st.integers(-1, 120),
)
def test_chunks_are_never_empty_and_keep_order_and_limits(
    token_counts: list[int], max_datums: int, max_bytes: int
) -> None:
    data = [a_datum(count) for count in token_counts]

    chunks = split(data, max_datums=max_datums, max_bytes=max_bytes)

    assert [datum for chunk in chunks for datum in chunk] == data
    assert all(chunks)
    assert max(sizes(chunks), default=0) <= max_datums
    for chunk in chunks:
        assert len(chunk) == 1 or sum(map(datum_bytes, chunk)) <= max_bytes
    for chunk, following in itertools.pairwise(chunks):
        longer = sum(map(datum_bytes, [*chunk, following[0]]))
        assert len(chunk) == max_datums or longer > max_bytes  # none is closed early


@pytest.mark.parametrize(
    ("datum", "size"),
    [
        (a_datum(3), 12),
        (t.Datum(t.ModelInput([t.ImageChunk(data=b"12345", format="png")])), 5),
        (t.Datum(t.ModelInput([t.DmelChunk(dmel=b"123")])), 3),
        (t.Datum(t.ModelInput([t.ImageAssetPointerChunk(location="s3://x", format="png")])), 6),
        (t.Datum(t.ModelInput.empty(), {"weights": [1.0, 2.0]}), 8),
        (t.Datum(t.ModelInput.empty(), {"target_tokens": [1, 2]}), 16),
        # Ten values, eleven row starts and ten columns.
        (t.Datum(t.ModelInput.empty(), {"weights": torch.eye(10)}), 40 + 88 + 80),
    ],
)
def test_the_size_of_a_datum_is_estimated_as_the_api_does(datum: t.Datum, size: int) -> None:
    assert datum_bytes(datum) == size


def test_the_estimate_is_close_to_what_is_sent() -> None:
    datum = t.Datum(
        t.ModelInput.from_ints(range(10_000)),
        {"target_tokens": np.arange(10_000), "weights": np.ones(10_000)},
    )
    request = ForwardBackwardRequest(t.ForwardBackwardInput([datum], "cross_entropy"), "m", 1)

    sent = sum(map(len, encode_forward_backward_request(request)))

    assert datum_bytes(datum) <= sent <= datum_bytes(datum) + 200
