"""S27–S30: chunks of one call are cut and joined as by the official SDK, and never crash.

The official reduction has a domain: one colon in each name, numbers that numpy can add up, and at
least one output. Inside it ours gives the same; outside it ours still gives a value.
"""

from __future__ import annotations

import itertools
import math
import types as python_types
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinker import types as official
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP, combine_fwd_bwd_output_results
from tinker.lib.public_interfaces import training_client
from tinker.types import ClientConfigResponse

from tests.contract.strategies import as_ours, contract, datums, texts
from tinsmith import types as ours
from tinsmith.client import dispatch
from tinsmith.types.record import to_plain

REDUCTIONS = sorted(REDUCE_MAP)
moderate = st.floats(-1e12, 1e12) | st.integers(-(2**53), 2**53).map(float)


def official_output(metrics: dict[str, float], count: int) -> Any:
    return official.ForwardBackwardOutput("ArrayRecord", [{} for _ in range(count)], metrics)


def our_output(metrics: dict[str, float], count: int) -> ours.ForwardBackwardOutput:
    return ours.ForwardBackwardOutput("ArrayRecord", [{} for _ in range(count)], metrics)


def assert_same_metrics(
    mine: dict[str, float], theirs: dict[str, float], *, largest: float
) -> None:
    """Equal but for rounding, which grows with the largest number: we add up exactly, numpy not."""
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if name.endswith((":mean", ":sum", ":slack")):
            assert math.isclose(mine[name], value, abs_tol=1e-14 * largest), name
        else:
            assert repr(mine[name]) == repr(value), name


# What the official SDK can join


metric_names = st.tuples(
    st.text(max_size=6).filter(lambda name: ":" not in name),
    st.sampled_from([*REDUCTIONS, "p99", "", "unique_1", "MEAN"]),
).map(":".join)


@st.composite
def joinable_chunks(draw: st.DrawFn) -> list[tuple[dict[str, float], int]]:
    """Chunks with mostly the same metrics; at least one of them has an output."""
    names = draw(st.lists(metric_names, unique=True, max_size=5))
    chunks = []
    for _ in range(draw(st.integers(1, 4))):
        present = [name for name in names if draw(st.integers(0, 9))]
        chunks.append(({name: draw(moderate) for name in present}, draw(st.integers(0, 5))))
    metrics, count = chunks[0]
    chunks[0] = (metrics, count if sum(count for _, count in chunks) else 1)
    return chunks


@settings(contract, max_examples=150)
@given(joinable_chunks())
def test_s30_joined_metrics_are_the_official_ones(
    chunks: list[tuple[dict[str, float], int]],
) -> None:
    theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    mine = dispatch.join([our_output(*chunk) for chunk in chunks])

    largest = max((abs(value) for metrics, _ in chunks for value in metrics.values()), default=0)
    assert_same_metrics(mine.metrics, theirs.metrics, largest=largest)
    assert len(mine.loss_fn_outputs) == len(theirs.loss_fn_outputs)
    assert mine.loss_fn_output_type == theirs.loss_fn_output_type


@contract
@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1.0, -0.0]), min_size=1))
def test_s30_infinities_and_nan_are_joined_as_numpy_does(values: list[float]) -> None:
    names = [f"x:{reduction}" for reduction in ("mean", "sum", "min", "max", "slack", "unique")]
    chunks = [(dict.fromkeys(names, value), 1) for value in values]

    with np.errstate(invalid="ignore"):
        theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    mine = dispatch.join([our_output(*chunk) for chunk in chunks])

    for name, value in theirs.metrics.items():
        expected = max(0.0, value) if name == "x:slack" and value == value else value
        assert mine.metrics[name] == pytest.approx(expected, nan_ok=True), name


@settings(contract, max_examples=100)
@given(st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=5))
@example([-1, -1, 2**53])
def test_s30_hash2_wraps_around_at_64_bits(values: list[int]) -> None:
    chunks = [({"h:hash2": float(value)}, 1) for value in values]

    theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    mine = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert mine.metrics == theirs.metrics
    assert mine.metrics["h:hash2"] == sum(values) % 2**64


def test_s30_unique_metrics_are_numbered_from_the_second_chunk_on() -> None:
    chunks = [({"seed:unique": float(value)}, 1) for value in (7, 8, 7)]

    theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    mine = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert mine.metrics == theirs.metrics
    assert mine.metrics == {"seed:unique": 7.0, "seed:unique_1": 8.0, "seed:unique_2": 7.0}


def test_s29_slack_is_the_distance_from_the_mean_to_the_largest() -> None:
    chunks = [({"x:slack": 1.0}, 1), ({"x:slack": 4.0}, 3)]

    theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    mine = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert mine.metrics == theirs.metrics == {"x:slack": 0.75}


@settings(contract, max_examples=200)
@given(st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 9)), min_size=1, max_size=6))
def test_s29_slack_is_never_negative(chunks: list[tuple[float, int]]) -> None:
    joined = dispatch.join([our_output({"x:slack": value}, count) for value, count in chunks])

    slack = joined.metrics["x:slack"]
    assert slack >= 0 or math.isnan(slack)
    if all(math.isfinite(value) and abs(value) < 1e300 for value, _ in chunks):
        assert not math.isnan(slack)


# What it cannot


any_names = (
    texts | metric_names | st.sampled_from(["loss", ":", "::", "a:b:mean", "mean", "a:mean:"])
)


@settings(contract, max_examples=150)
@given(
    st.lists(
        st.tuples(st.dictionaries(any_names, st.floats(), max_size=5), st.integers(0, 3)),
        max_size=4,
    )
)
def test_s28_no_key_value_or_weight_can_crash_the_reduction(
    chunks: list[tuple[dict[str, float], int]],
) -> None:
    joined = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert all(isinstance(value, float | int) for value in joined.metrics.values())


def test_s28_joining_nothing_gives_an_empty_output_like_the_official_sdk() -> None:
    theirs = combine_fwd_bwd_output_results([])
    mine = dispatch.join([])

    assert mine == as_ours(theirs)


# Sums that overflow on the way in one order and not in another.
huge = st.sampled_from([1.7e308, -1.7e308, 1.2e308, -1.1e308, 1e292, 3e291, 1.0])
any_floats = huge | st.floats()
ORDERED = [*(f"x:{name}" for name in REDUCTIONS if name != "unique"), "loss", "a:b:c"]


@settings(contract, max_examples=150)
@given(
    st.lists(
        st.tuples(st.fixed_dictionaries(dict.fromkeys(ORDERED, any_floats)), st.integers(0, 3)),
        min_size=2,
        max_size=4,
    )
)
@example([({"x:sum": value}, 1) for value in (1.2e308, 0.5, -1.1e308, -1.7e308)])
@example([({"x:mean": value}, 1) for value in (1.0, math.inf, -1.2e308, -1.7e308)])
def test_s30_the_order_of_chunks_does_not_matter(
    chunks: list[tuple[dict[str, float], int]],
) -> None:
    joined = [
        dispatch.join([our_output(*chunk) for chunk in order]).metrics
        for order in itertools.permutations(chunks)
    ]

    for metrics in joined:
        assert sorted(metrics) == sorted(joined[0])
        for name, value in metrics.items():
            same = math.isnan(value) and math.isnan(joined[0][name])
            assert same or value == joined[0][name], name


@pytest.mark.parametrize("name", ["loss", "a:b:c", "mean", ":", "a:b:mean"])
def test_s28_names_that_the_official_sdk_cannot_read_are_averaged(name: str) -> None:
    """Without a colon, or with two and no known reduction after the last."""
    chunks = [({name: 1.0}, 1), ({name: 5.0}, 3)]
    if name != ":":  # one colon: an empty reduction, which is unknown
        with pytest.raises(ValueError, match="unpack"):
            combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])

    joined = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert joined.metrics == ({} if name == ":" else {name: 4.0})


def test_s28_a_mean_over_no_outputs_counts_each_chunk_once() -> None:
    """The official SDK divides by zero here."""
    chunks = [({"loss:mean": 1.0}, 0), ({"loss:mean": 5.0}, 0)]

    with pytest.raises(ZeroDivisionError):
        combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])
    assert dispatch.join([our_output(*chunk) for chunk in chunks]).metrics == {"loss:mean": 3.0}


def test_s28_an_infinite_mean_over_no_outputs_does_not_affect_the_rest() -> None:
    """Zero times infinity is NaN; a chunk of weight zero says nothing, so it is left out."""
    chunks = [({"x:mean": math.inf}, 0), ({"x:mean": 2.0}, 1)]

    with np.errstate(invalid="ignore"):
        theirs = combine_fwd_bwd_output_results([official_output(*chunk) for chunk in chunks])

    assert math.isnan(theirs.metrics["x:mean"])
    assert dispatch.join([our_output(*chunk) for chunk in chunks]).metrics == {"x:mean": 2.0}


def test_s28_both_loss_keys_are_kept() -> None:
    chunks = [({"loss": 1.0, "loss:mean": 2.0}, 1), ({"loss": 3.0, "loss:mean": 4.0}, 1)]

    joined = dispatch.join([our_output(*chunk) for chunk in chunks])

    assert joined.metrics == {"loss": 2.0, "loss:mean": 3.0}
    assert joined.loss == 3.0


# The loss


@pytest.mark.parametrize(
    ("metrics", "count", "loss"),
    [
        ({"loss:mean": 1.0, "loss": 2.0, "loss:sum": 12.0}, 4, 1.0),
        ({"loss": 2.0, "loss:sum": 12.0}, 4, 2.0),
        ({"loss:sum": 12.0}, 4, 3.0),
        ({"loss:mean": 1.0}, 0, 1.0),
        ({"loss:sum": 12.0}, 0, math.nan),
        ({"other:sum": 12.0}, 4, math.nan),
        ({}, 0, math.nan),
    ],
)
def test_s27_loss_prefers_the_mean_then_the_bare_name_then_the_sum(
    metrics: dict[str, float], count: int, loss: float
) -> None:
    assert our_output(metrics, count).loss == pytest.approx(loss, nan_ok=True)


def test_s27_the_official_output_has_no_loss_and_ours_sends_none() -> None:
    output = our_output({"loss:sum": 1.0}, 1)

    assert not hasattr(official_output({}, 0), "loss")
    assert sorted(to_plain(output)) == ["loss_fn_output_type", "loss_fn_outputs", "metrics"]


# Cutting


@settings(contract, max_examples=100)
@given(st.lists(datums(), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 200))
def test_s23_calls_are_chunked_where_the_official_sdk_chunks_them(
    data: list[Any], max_datums: int, max_bytes: int
) -> None:
    config = ClientConfigResponse(
        fwdbwd_max_chunk_len=max_datums, fwdbwd_max_chunk_bytes_count=max_bytes
    )
    client: Any = python_types.SimpleNamespace(
        holder=python_types.SimpleNamespace(_client_config=config)
    )
    cut = training_client.TrainingClient._chunked_requests_generator(client, data)
    theirs = [(len(chunk), size) for chunk, size in cut]

    mine = dispatch.split(
        [as_ours(datum) for datum in data], max_datums=max_datums, max_bytes=max_bytes
    )

    assert [(len(chunk), sum(map(dispatch.datum_bytes, chunk))) for chunk in mine] == theirs
    assert all(mine)
    assert [datum for chunk in mine for datum in chunk] == [as_ours(datum) for datum in data]
    for chunk in mine:
        is_within = sum(map(dispatch.datum_bytes, chunk)) <= max_bytes
        assert len(chunk) == 1 or is_within
