"""What is wrong with data and prompts is said before anything runs: the field and the bound."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.engine.base import BaseModel
from tinsmith.errors import BadRequestError
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.data_checks import check_pass, check_sample
from tinsmith.types.inputs import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardInput

MODEL = BaseModel(name="m", vocabulary=100, max_context=80)
SETTINGS = ApiSettings(most_datums=4, most_pass_tokens=200, most_samples=8, most_topk=5)
LONG = list(range(70))


def a_datum(tokens: Any = (1, 2, 3), **inputs: Any) -> Datum:
    """A datum for cross entropy, with some of it replaced."""
    tokens = list(tokens)
    given: dict[str, Any] = {"target_tokens": tokens, "weights": [1.0] * len(tokens), **inputs}
    given = {name: value for name, value in given.items() if value is not None}
    return Datum.received(ModelInput.from_ints(tokens), given)


def refusal(*data: Datum, loss_fn: Any = "cross_entropy", config: Any = None) -> str:
    """What is said of a pass that cannot be."""
    with pytest.raises(BadRequestError) as refused:
        check_pass(ForwardBackwardInput(list(data), loss_fn, config), MODEL, SETTINGS)
    return str(refused.value)


@pytest.mark.parametrize("tokens", [(1, 2, 3), LONG])
def test_a_valid_forward_backward_is_accepted(tokens: Any) -> None:
    """Short ones and those that numpy looks at."""
    given = ForwardBackwardInput([a_datum(tokens)], "cross_entropy")

    assert check_pass(given, MODEL, SETTINGS) is None


@pytest.mark.parametrize(
    ("datum", "said"),
    [
        (a_datum([1, 2, 100]), "data[0].model_input.chunks[0].tokens: a token id is 100; it must"),
        (a_datum([*LONG, 100]), "a token id is 100; it must be 0 to 99"),
        (a_datum([1, -2, 3]), "a token id is -2"),
        (a_datum([]), "model_input is empty"),
        (a_datum([1] * 81), "the number of tokens is 81; the maximum is 80"),
        (a_datum(target_tokens=[1, 2, 100]), "['target_tokens']: a token id is 100"),
        (a_datum(target_tokens=[1, 2]), "['target_tokens'] has the shape [2]; model_input has 3"),
        (a_datum(weights=[1.0, 2.0]), "['weights'] has the shape [2]; model_input has 3 tokens"),
        (a_datum(weights=[1.0, float("nan"), 1.0]), "['weights'] contains NaN or infinity"),
        (a_datum(LONG, weights=[float("inf")] * 70), "['weights'] contains NaN or infinity"),
        (a_datum(weights=None), "loss_fn_inputs has no weights, which cross_entropy needs"),
        (a_datum(target_tokens=None), "loss_fn_inputs has no target_tokens"),
        (
            a_datum(weights=TensorData([1.0] * 6, "float32", [3, 2])),
            "['weights'] has the shape [3, 2], and target_tokens [3]",
        ),
        (
            a_datum(weights=TensorData([1, 1, 1], "int64", [3])),
            "['weights'].dtype is 'int64'; it must be float32",
        ),
        (
            a_datum(target_tokens=TensorData([1.0, 1.0, 1.0], "float32", [3])),
            "['target_tokens'].dtype is 'float32'; it must be int64",
        ),
        (
            a_datum(extra=TensorData([], "float32", [1, 2**62], [0, 0], [])),
            f"['extra']: the number of cells is {2**62}",
        ),
    ],
)
def test_the_error_names_the_bad_field_of_a_datum(datum: Datum, said: str) -> None:
    """Which datum, which field, what it holds and what it may hold."""
    told = refusal(datum)

    assert said in told
    assert told.startswith("data[0].")


def test_sparse_targets_of_many_data_are_bounded_together() -> None:
    """Each is a few bytes on the wire, and large in memory."""
    most = ApiSettings().most_targets
    one = a_datum(
        [1],
        target_tokens=TensorData([1], "int64", [1, most], [0, 1], [0]),
        weights=TensorData([1.0], "float32", [1, most], [0, 1], [0]),
    )
    fitting = ApiSettings().most_pass_targets // most

    check_pass(ForwardBackwardInput([one] * fitting, "cross_entropy"), MODEL, ApiSettings())
    more = ForwardBackwardInput([one] * (fitting + 1), "cross_entropy")
    with pytest.raises(BadRequestError, match="the number of cells in data"):
        check_pass(more, MODEL, ApiSettings())


@pytest.mark.parametrize("count", [4, 90])
def test_two_values_for_one_sparse_cell_are_rejected(count: int) -> None:
    """One of them would be lost. In what order the cells of a row come does not matter."""

    def one(columns: list[int]) -> Datum:
        sparse = ([1, count], [0, len(columns)], columns)
        return a_datum(
            [1],
            target_tokens=TensorData([5] * len(columns), "int64", *sparse),
            weights=TensorData([1.0] * len(columns), "float32", *sparse),
        )

    columns = list(range(count))
    check_pass(ForwardBackwardInput([one(columns[::-1])], "cross_entropy"), MODEL, SETTINGS)

    told = refusal(one([*columns[:-1], 0]))
    assert "has two numbers for one cell" in told


def test_the_error_names_the_index_of_the_bad_datum() -> None:
    """By its place among the others."""
    assert refusal(a_datum(), a_datum([1, 100])).startswith("data[1].")


def test_a_forward_backward_has_size_limits() -> None:
    """On data and on tokens, and there is at least one datum."""
    assert "data is empty" in refusal()
    assert "the number of data is 5; the maximum is 4" in refusal(*[a_datum()] * 5)
    assert "the number of tokens in data is 210; the maximum is 200" in refusal(
        *[a_datum(LONG)] * 3
    )


@pytest.mark.parametrize(
    ("loss_fn", "config", "said"),
    [
        ("nonsense", None, "loss_fn is 'nonsense'; it must be one of cross_entropy, "),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config has 'beta'; cross_entropy accepts"),
        ("ppo", {"clip": 1.0}, "ppo accepts clip_high_threshold, clip_low_threshold"),
        ("ppo", {"clip_low_threshold": float("nan")}, "it must be a finite number"),
        ("ppo", {"clip_low_threshold": "1"}, "it must be a finite number"),
        ("custom", None, "it must be the id of a custom loss"),
        ("custom", {"loss_id": 3.0}, "it must be the id of a custom loss"),
        ("ppo", None, "loss_fn_inputs has no advantages, logprobs, which ppo needs"),
    ],
)
def test_unknown_losses_and_loss_settings_are_rejected(
    loss_fn: str, config: Any, said: str
) -> None:
    """A misspelt setting would otherwise do nothing, silently."""
    assert said in refusal(a_datum(), loss_fn=loss_fn, config=config)


def test_a_custom_loss_is_handed_on_by_its_id() -> None:
    """Whose it is, is not known here."""
    given = ForwardBackwardInput([a_datum()], "custom", {"loss_id": "s:loss:0"})

    assert check_pass(given, MODEL, SETTINGS) == "s:loss:0"


def test_a_custom_loss_may_have_inputs_of_other_shapes() -> None:
    """It says itself what they are; its targets are one for each position as everywhere."""
    config = {"loss_id": "s:loss:0"}
    datum = a_datum(advantages=TensorData([1.0], "float32", []), weights=None)

    check_pass(ForwardBackwardInput([datum], "custom", config), MODEL, SETTINGS)

    short = a_datum(target_tokens=[1])
    assert "['target_tokens'] has the shape [1]" in refusal(short, loss_fn="custom", config=config)


def test_images_are_rejected_for_a_text_only_model() -> None:
    """By the model's name."""
    image = ImageChunk(data=b"x", format="png", expected_tokens=1)
    datum = Datum(
        ModelInput([EncodedTextChunk([1, 2]), image]),
        {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]},
    )

    assert "chunks[1].type is 'image'; m accepts encoded_text only" in refusal(datum)


# Samples


def a_sample(prompt: Any = (1, 2, 3), params: Any = None, **fields: Any) -> SampleRequest:
    """A sample, with some of it replaced."""
    return SampleRequest(
        prompt=ModelInput.from_ints(list(prompt)),
        sampling_params=SamplingParams(**(params or {})),
        **fields,
    )


@pytest.mark.parametrize(
    "request_",
    [
        a_sample(),
        a_sample(params={"max_tokens": 77, "seed": 2**64 - 1, "stop": ["x"], "top_k": 1}),
        a_sample([1] * 80, params={"max_tokens": 1}),
        a_sample(params={"stop": []}),
        a_sample(params={"stop": "end"}),
        a_sample(params={"stop": [5, 99], "temperature": 0.0}),
        a_sample(prompt_logprobs=True, prompt_logprobs_last_n=2, topk_prompt_logprobs=5),
        a_sample(target_prompt_logprobs=TensorData([-1, 99], "int64", [2, 1])),
    ],
)
def test_a_good_sample_is_accepted(request_: SampleRequest) -> None:
    """Each form that the API has."""
    check_sample(request_, MODEL, SETTINGS)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (a_sample([]), "prompt is empty"),
        (a_sample([100]), "prompt.chunks[0].tokens: a token id is 100; it must be 0 to 99"),
        (a_sample([1] * 81), "prompt: the number of tokens is 81"),
        (a_sample([1] * 80, {"max_tokens": 2}), "max_tokens is 2; the prompt has 80 tokens"),
        (a_sample(params={"max_tokens": 78}), "max_tokens is 78; the prompt has 3 tokens"),
        (a_sample(params={"max_tokens": 0}), "max_tokens is 0; it must be at least 1"),
        (a_sample(params={"temperature": -1.0}), "temperature is -1.0; it must be 0 or more"),
        (a_sample(params={"top_p": 0.0}), "top_p is 0.0; it must be above 0"),
        (a_sample(params={"top_p": 1.5}), "top_p is 1.5"),
        (a_sample(params={"top_k": -2}), "top_k is -2"),
        (
            a_sample(params={"seed": 2**64}),
            "seed is 18446744073709551616; it must fit into 64 bits",
        ),
        (a_sample(params={"stop": [100]}), "stop is 100; it must be 0 to 99"),
        (a_sample(params={"stop": ["a", 3]}), "stop mixes texts and token ids"),
        (a_sample(params={"stop": ""}), "stop is ''; it must have 1 to 1000 characters"),
        (a_sample(params={"stop": list(range(65))}), "the number of sampling_params.stop is 65"),
        (a_sample(num_samples=0), "num_samples is 0; it must be 1 to 8"),
        (a_sample(num_samples=9), "num_samples is 9; it must be 1 to 8"),
        (a_sample(topk_prompt_logprobs=6), "topk_prompt_logprobs is 6; it must be 0 to 5"),
        (a_sample(topk_sample_logprobs=-1), "topk_sample_logprobs is -1"),
        (a_sample(prompt_alt_tokens_k=6), "prompt_alt_tokens_k is 6"),
        (a_sample(prompt_logprobs_last_n=1), "prompt_logprobs_last_n needs"),
        (
            a_sample(prompt_logprobs=True, prompt_logprobs_last_n=3),
            "prompt_logprobs_last_n is 3; it must be 1 to 2",
        ),
        (
            a_sample(target_prompt_logprobs=TensorData([1], "int64", [1, 1])),
            "the prompt has 3 tokens, so there must be 2 rows",
        ),
        (
            a_sample(target_prompt_logprobs=TensorData([1, 100], "int64", [2, 1])),
            "target_prompt_logprobs: a token id is 100; it must be -1 to 99",
        ),
        (
            a_sample(target_prompt_logprobs=TensorData([], "int64", [2, 2**61], [0, 0, 0], [])),
            "target_prompt_logprobs: the number of cells is",
        ),
    ],
)
def test_the_error_names_the_bad_field_of_a_sample(request_: SampleRequest, said: str) -> None:
    """The field, what it holds and what it may hold."""
    with pytest.raises(BadRequestError) as refused:
        check_sample(request_, MODEL, SETTINGS)

    assert said in str(refused.value)
