"""Samples: the same for the same seed, ended as asked, and told all that was asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinsmith import types as t
from tinsmith.testing.arithmetic import Weights
from tinsmith.testing.draws import sample
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.requests import SampleRequest

SETTINGS = ServiceSettings(vocabulary_size=200, eos_token=3, max_tokens=9)
PROMPT = [10, 20, 30, 40]


def weights(*pairs: tuple[int, int]) -> Weights:
    """Weights that are all but sure of some pairs."""
    made = Weights("m", SETTINGS.vocabulary_size)
    made.learn(dict.fromkeys(pairs, 1e9), step=1.0)
    return made


def drawn(made: Weights | None = None, seed: str = "request", **fields: Any) -> t.SampleResponse:
    params = {"max_tokens": 8, **fields.pop("params", {})}
    request = SampleRequest(
        prompt=t.ModelInput.from_ints(PROMPT), sampling_params=t.SamplingParams(**params), **fields
    )
    return sample(made or weights(), request, SETTINGS, seed)


def tokens(response: t.SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


def test_same_seed_gives_the_same_tokens_whatever_the_request_is_called() -> None:
    one = drawn(seed="a", params={"seed": 5}, num_samples=3)
    other = drawn(seed="b", params={"seed": 5}, num_samples=3)

    assert one == other
    assert len({tuple(sequence) for sequence in tokens(one)}) == 3


def test_without_a_seed_the_request_decides() -> None:
    assert tokens(drawn(seed="a")) == tokens(drawn(seed="a")) != tokens(drawn(seed="b"))


def test_more_samples_leave_the_first_as_it_was() -> None:
    assert tokens(drawn(num_samples=3))[0] == tokens(drawn())[0]


def test_sample_without_a_stop_ends_at_the_end_token() -> None:
    response = drawn(weights((40, 3)))

    assert tokens(response) == [[3]]
    assert response.sequences[0].stop_reason == "stop"


@pytest.mark.parametrize("stop", [[7], ["never"], "never"])
def test_the_end_token_ends_a_sample_beside_other_stops(stop: Any) -> None:
    response = drawn(weights((40, 3), (3, 3)), params={"stop": stop})

    assert response == drawn(weights((40, 3), (3, 3)))
    assert response.sequences[0].stop_reason == "stop"


def test_empty_stop_runs_past_the_end_token() -> None:
    response = drawn(weights((40, 3), (3, 3)), params={"stop": []})

    assert tokens(response) == [[3] * 8]
    assert response.sequences[0].stop_reason == "length"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([66], [65, 66]),
        ("AB", [65, 66]),
        (["x", "BC"], [65, 66, 67]),
        (["AC"], [65, 66, 67] + [68] * 5),
    ],
)
def test_stop_by_id_and_by_text_keeps_what_completes_it(
    stop: str | list[str | int], expected: list[int]
) -> None:
    made = weights((40, 65), (65, 66), (66, 67), (67, 68), (68, 68))

    assert tokens(drawn(made, params={"stop": stop})) == [expected]


def test_unlimited_sample_has_the_service_s_length() -> None:
    assert len(tokens(drawn(params={"max_tokens": None, "stop": []}))[0]) == SETTINGS.max_tokens


def test_logprobs_are_those_of_the_model() -> None:
    made = weights()
    sequence = drawn(made, params={"temperature": 0.5, "stop": []}).sequences[0]

    contexts = [PROMPT[-1], *sequence.tokens[:-1]]
    assert sequence.logprobs == made.logprobs(zip(contexts, sequence.tokens, strict=True))


def test_prompt_logprobs_begin_with_nothing() -> None:
    made = weights()
    found = drawn(made, prompt_logprobs=True).prompt_logprobs

    assert found == [None, *made.logprobs([(10, 20), (20, 30), (30, 40)])]
    assert drawn().prompt_logprobs is None


def test_only_the_last_prompt_logprobs_are_given_if_asked() -> None:
    numbers = drawn(prompt_logprobs=True, prompt_logprobs_last_n=1).prompt_logprob_numbers

    assert numbers is not None
    assert [math.isnan(lp) for lp in numbers.tolist()] == [True, True, True, False]


def test_top_k_rows_are_best_first() -> None:
    made = weights()
    response = drawn(made, topk_prompt_logprobs=2, topk_sample_logprobs=3)

    prompt_rows, sampled_rows = response.topk_prompt_logprobs, response.sequences[0].topk_logprobs
    assert prompt_rows is not None and sampled_rows is not None
    assert list(prompt_rows) == [None, made.best(10, 2), made.best(20, 2), made.best(30, 2)]
    assert len(sampled_rows) == len(tokens(response)[0])
    assert sampled_rows[0] == made.best(40, 3)


def test_targets_are_answered_in_the_layout_they_were_asked_in() -> None:
    made = weights()
    dense = t.TensorData([[1, -1], [2, 3], [-1, -1]], "int64")
    sparse = t.TensorData([1, 2, 3], "int64", [3, 2], [0, 1, 3, 3], [0, 0, 1])
    expected = made.logprobs([(10, 1), (20, 2), (20, 3)])

    of_dense = drawn(made, target_prompt_logprobs=dense).target_prompt_logprobs
    of_sparse = drawn(made, target_prompt_logprobs=sparse).target_prompt_logprobs

    assert of_dense is not None and of_sparse is not None
    assert of_dense.tolist() == [[expected[0], 0.0], expected[1:], [0.0, 0.0]]
    assert (of_sparse.data, of_sparse.sparse_col_indices) == (expected, [0, 0, 1])


def test_alternatives_are_drawn_for_each_position_but_the_first() -> None:
    made = weights()
    alternatives = drawn(made, prompt_alt_tokens_k=2).prompt_alt_tokens

    assert alternatives is not None
    assert alternatives.tokens.shape == alternatives.logprobs.shape == [3, 2]
    first = alternatives.tokens.tolist()[0]
    assert alternatives.logprobs.tolist()[0] == made.logprobs((10, token) for token in first)
