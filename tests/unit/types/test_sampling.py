from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from tests.unit.wire import corpus
from tinsmith import SampledSequence, SampleResponse, SamplingParams, TensorData
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types import PromptAltTokens, TopkLogprobs
from tinsmith.types.buffers import FLOAT32_MAX
from tinsmith.types.record import to_plain
from tinsmith.types.topk import EMPTY_LOGPROB, TopkRows
from tinsmith.wire import json_format

IDS = [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
LOGPROBS = [[-0.5, -1.0, -2.0], [-0.25, EMPTY_LOGPROB, EMPTY_LOGPROB], [EMPTY_LOGPROB] * 3]
ROWS = [[(5, -0.5), (6, -1.0), (7, -2.0)], [(8, -0.25)], None]


def a_topk() -> TopkLogprobs:
    return TopkLogprobs(IDS, LOGPROBS)


# Parameters


def test_defaults_match_the_api() -> None:
    assert SamplingParams().model_dump() == {
        "max_tokens": None,
        "seed": None,
        "stop": None,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("topp", "top_p")],
)
def test_a_misspelt_field_is_rejected_with_a_suggestion(typo: str, meant: str) -> None:
    given: dict[str, Any] = {typo: 1}

    with pytest.raises(UnknownFieldError, match=f"no field '{typo}'; did you mean '{meant}'"):
        SamplingParams(**given)


def test_numbers_may_be_numpy_scalars_or_strings() -> None:
    given: dict[str, Any] = {
        "max_tokens": np.int64(16),
        "seed": "7",
        "temperature": np.float32(0.5),
        "top_p": "9e-1",
    }

    params = SamplingParams(**given)

    assert params == SamplingParams(max_tokens=16, seed=7, temperature=0.5, top_p=0.9)


@pytest.mark.parametrize(
    ("stop", "held"),
    [
        ("\n\n", "\n\n"),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([1, 2], [1, 2]),
        (np.array([1, 2]), [1, 2]),
        ([np.int64(1)], [1]),
        ([], []),
        (None, None),
    ],
)
def test_stop_may_be_a_string_strings_or_token_ids(stop: Any, held: Any) -> None:
    assert SamplingParams(stop=stop).stop == held


@pytest.mark.parametrize("stop", [5, [1.5], [None], b"a", [[1]], {"a": 1}])
def test_an_invalid_stop_is_rejected(stop: Any) -> None:
    with pytest.raises(ValidationError, match=r"SamplingParams\.stop"):
        SamplingParams(stop=stop)


def test_params_are_hashable_and_frozen() -> None:
    assert len({SamplingParams(seed=1), SamplingParams(seed=1)}) == 1
    with pytest.raises(AttributeError):
        SamplingParams().seed = 5  # type: ignore[misc]


# Top-k


def test_rows_are_trimmed_and_empty_ones_are_none() -> None:
    rows = TopkRows(a_topk())

    assert list(rows) == ROWS
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows == ROWS
    assert rows[-1] is None
    assert rows[:2] == ROWS[:2]
    assert rows[::-1] == ROWS[::-1]
    assert list(reversed(rows)) == ROWS[::-1]


@pytest.mark.parametrize("index", [3, -4, 100])
def test_a_missing_row_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="3 positions"):
        _ = TopkRows(a_topk())[index]


def test_rows_compare_to_lists_and_to_rows() -> None:
    rows = TopkRows(a_topk())

    assert rows == TopkRows(a_topk())
    assert rows != ROWS[:2]
    assert rows != [None, None, None]
    assert rows != 5
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert repr(rows) == "TopkRows(3 positions, k=3)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(rows)


def test_an_empty_cell_between_full_ones_is_kept() -> None:
    topk = TopkLogprobs([[5, 0, 7]], [[-1.0, EMPTY_LOGPROB, -2.0]])

    assert list(TopkRows(topk)) == [[(5, -1.0), (0, EMPTY_LOGPROB), (7, -2.0)]]


def test_matrices_may_be_lists_or_arrays_and_are_returned_as_arrays() -> None:
    topk = TopkLogprobs(np.array(IDS), np.array(LOGPROBS))

    assert topk == a_topk()
    assert (topk.length, topk.k) == (3, 3)
    assert topk.token_ids.dtype == "int32"
    assert topk.token_ids.tolist() == IDS
    assert topk.logprobs.dtype == "float32"
    assert topk.logprobs.tolist() == LOGPROBS
    assert topk.token_ids is topk.token_ids
    assert topk.logprobs is topk.logprobs


@pytest.mark.parametrize(
    ("ids", "logprobs", "shape"),
    [
        ([1], [-1.0], None),
        ([[1]], [[-1.0, -2.0]], None),
        ([[[1]]], [[[-1.0]]], None),
        ([1, 2], [-1.0, -2.0], (2, 2)),
        ([1, 2], [-1.0], (1, 2)),
    ],
)
def test_matrices_of_different_shapes_are_rejected(ids: Any, logprobs: Any, shape: Any) -> None:
    with pytest.raises(ValidationError):
        TopkLogprobs(ids, logprobs, shape=shape)


def test_topk_survives_pickling_and_copying() -> None:
    topk = a_topk()

    for again in (pickle.loads(pickle.dumps(topk)), copy.copy(topk), copy.deepcopy(topk)):
        assert again == topk
    assert topk != TopkLogprobs([[1]], [[-1.0]])
    assert repr(topk) == "TopkLogprobs(length=3, k=3)"


# Sequences


def a_sequence(**rest: Any) -> SampledSequence:
    return SampledSequence("stop", "id", [1, 2], [-0.5, math.nan], a_topk(), **rest)


def test_a_sequence_returns_lists_and_arrays() -> None:
    sequence = a_sequence()

    assert sequence.tokens == [1, 2]
    assert sequence.tokens_np.dtype == "int32"
    assert sequence.tokens_np.tolist() == [1, 2]
    assert sequence.logprobs is not None
    assert sequence.logprobs[0] == -0.5
    assert sequence.logprobs_np is not None
    assert sequence.logprobs_np.dtype == "float32"
    assert sequence.topk_logprobs == ROWS
    assert sequence.topk_logprobs_np == a_topk()


def test_lists_and_arrays_are_made_once() -> None:
    sequence = a_sequence()

    assert sequence.tokens is sequence.tokens
    assert sequence.logprobs is sequence.logprobs
    assert sequence.tokens_np is sequence.tokens_np


def test_fields_that_were_not_requested_are_none() -> None:
    sequence = SampledSequence("length", tokens=[1])

    assert sequence.sequence_id == ""
    assert sequence.logprobs is None
    assert sequence.logprobs_np is None
    assert sequence.topk_logprobs is None
    assert sequence.topk_logprobs_np is None


def test_long_sequences_can_be_compared() -> None:
    """The official ones raise as soon as there is more than one number in an array."""
    assert a_sequence() == a_sequence()
    assert a_sequence() != a_sequence().with_sequence_id("other")
    assert a_sequence() != SampledSequence("stop", "id", [1, 2])
    assert a_sequence() != [1, 2]
    assert SampledSequence("stop", tokens_np=np.array([1, 2])) == SampledSequence(
        "stop", tokens=[1, 2]
    )


def test_a_sequence_survives_pickling_and_copying() -> None:
    sequence = a_sequence()

    for again in (
        pickle.loads(pickle.dumps(sequence)),
        copy.copy(sequence),
        copy.deepcopy(sequence),
    ):
        assert again == sequence


def test_a_sequence_is_frozen_and_its_repr_short() -> None:
    sequence = SampledSequence("stop", "id", range(100_000))

    with pytest.raises(AttributeError, match="create a new SampledSequence"):
        sequence.stop_reason = "length"
    assert repr(sequence) == (
        "SampledSequence(stop_reason='stop', sequence_id='id', 100000 tokens)"
    )


@pytest.mark.parametrize("reason", ["", "STOP", "eos", None, 0, ["stop"]])
def test_an_unknown_stop_reason_is_rejected(reason: Any) -> None:
    with pytest.raises(ValidationError, match="stop_reason"):
        SampledSequence(reason)


# Responses


def test_prompt_logprobs_are_none_where_they_are_nan() -> None:
    response = SampleResponse([], prompt_logprobs_np=np.array([math.nan, -1.5], dtype="float32"))

    assert response.prompt_logprobs == [None, -1.5]
    assert response.prompt_logprobs is response.prompt_logprobs
    assert response.prompt_logprobs_np is not None
    assert math.isnan(response.prompt_logprobs_np[0])
    assert SampleResponse([], prompt_logprobs=[None, -1.5]) == response


def test_a_response_without_extras_has_none() -> None:
    response = SampleResponse([a_sequence()])

    assert response.prompt_logprobs is None
    assert response.prompt_logprobs_np is None
    assert response.topk_prompt_logprobs is None
    assert response.target_prompt_logprobs is None
    assert response.prompt_alt_tokens is None
    assert response.prompt_cache_hit_tokens == 0


def test_responses_can_be_compared_pickled_and_copied() -> None:
    response = corpus.a_response()

    for again in (
        pickle.loads(pickle.dumps(response)),
        copy.copy(response),
        copy.deepcopy(response),
    ):
        assert again == response
        assert again.prompt_alt_tokens == response.prompt_alt_tokens
    assert response != SampleResponse([])
    assert response != 5
    assert corpus.a_response() == response


def test_a_response_is_frozen_and_its_repr_short() -> None:
    response = SampleResponse([], prompt_logprobs=[-1.0] * 100_000)

    with pytest.raises(AttributeError, match="create a new SampleResponse"):
        response.sequences = []
    assert repr(response) == "SampleResponse(sequences=[])"


def test_sequence_ids_are_given_in_order() -> None:
    response = SampleResponse([a_sequence(), a_sequence()], prompt_cache_hit_tokens=3)

    named = response.with_sequence_ids(["a", "b"])

    assert [sequence.sequence_id for sequence in named.sequences] == ["a", "b"]
    assert named.prompt_cache_hit_tokens == 3
    assert [sequence.sequence_id for sequence in response.sequences] == ["id", "id"]


@pytest.mark.parametrize("ids", [[], ["a", "b"]])
def test_more_or_fewer_ids_than_sequences_are_rejected(ids: list[str]) -> None:
    with pytest.raises(ValueError, match="sequence ids"):
        SampleResponse([a_sequence()]).with_sequence_ids(ids)


def test_alternative_tokens_are_compared_by_value() -> None:
    one, other = (
        PromptAltTokens(TensorData([1], "int64"), TensorData([-1.0], "float32")) for _ in range(2)
    )

    assert one == other
    assert one != 5
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.tokens = other.tokens


def test_a_response_of_older_releases_is_read() -> None:
    plain = corpus.PLAIN_OF_CUSTOM["SampleResponse"]

    response = SampleResponse._from_plain(plain)

    assert response.sequences == [SampledSequence("stop", tokens=[1, 2], logprobs=[-1.5, -2])]
    assert response.prompt_logprobs == [None, -1.5]
    assert response.topk_prompt_logprobs == [
        None,
        [(1, -0.5), (2, -1.5)],
        [(3, pytest.approx(-0.1))],
    ]
    assert json.loads(json.dumps(to_plain(response)))["prompt_logprobs"] == [None, -1.5]


@pytest.mark.parametrize(
    "rows",
    [
        5,
        "ab",
        [5],
        ["ab"],
        [{"a": 1}],
        [[5]],
        [[[]]],
        [[[1]]],
        [[[1, 2, 3]]],
        [[[1.5, -1]]],
        [[["a", -1]]],
        [[[1, None]]],
        [[[[1], [2]]]],
        [[[1, [2, 3]]], [[1, 2]]],
        [[{"0": 1, "1": 2}]],
        [*[None] * 1000, [[1, -1]] * 1000],
    ],
    ids=lambda rows: repr(rows)[:20],
)
def test_invalid_top_k_rows_are_rejected(rows: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        SampleResponse._from_plain({"sequences": [], "topk_prompt_logprobs": rows})


def test_top_k_rows_of_one_length_may_be_mostly_none() -> None:
    """As for a long prompt of which only the last positions were asked about."""
    rows: list[Any] = [*[None] * 1000, [[1, -0.5]] * 20]

    response = SampleResponse._from_plain({"sequences": [], "topk_prompt_logprobs": rows})

    assert response.topk_prompt_logprobs == [*[None] * 1000, [(1, -0.5)] * 20]


def test_infinite_logprobs_are_written_as_the_largest_number_and_read_back() -> None:
    response = SampleResponse(
        [SampledSequence("stop", tokens=[1], logprobs=[-math.inf])],
        prompt_logprobs=[None, -math.inf, -0.5],
        topk_prompt_logprobs_np=TopkLogprobs([[1, 2]], [[-0.5, -math.inf]]),
    )

    written = json_format.encode(response)
    read = json_format.decode(written, SampleResponse)

    assert json.loads(written)["prompt_logprobs"] == [None, -FLOAT32_MAX, -0.5]
    assert read.topk_prompt_logprobs == [[(1, -0.5), (2, pytest.approx(-FLOAT32_MAX))]]
    assert read.sequences[0].logprobs == [-FLOAT32_MAX]
