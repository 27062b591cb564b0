from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from tests.unit.wire import corpus
from tinsmith import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    TensorData,
)
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types import (
    ForwardBackwardInput,
    OptimizerConfigBase,
    OptimParamsBase,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


def test_adam_defaults_match_the_api() -> None:
    assert AdamParams().model_dump() == {
        "learning_rate": 0.0001,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.parametrize("rate", ["1e-4", 1e-4, np.float64(1e-4), np.array(1e-4)])
def test_a_learning_rate_may_come_from_a_settings_file(rate: Any) -> None:
    assert AdamParams(learning_rate=rate) == AdamParams(learning_rate=1e-4)
    assert DimuonParams(learning_rate=rate) == DimuonParams(learning_rate=1e-4)


@pytest.mark.parametrize("rate", [None, "fast", math.nan, math.inf, [1e-4], 10**400])
def test_a_learning_rate_that_is_not_a_number_is_rejected(rate: Any) -> None:
    with pytest.raises(ValidationError, match=r"AdamParams\.learning_rate"):
        AdamParams(learning_rate=rate)
    with pytest.raises(ValidationError, match=r"DimuonParams\.learning_rate"):
        DimuonParams(learning_rate=rate)


def test_a_misspelt_setting_is_rejected() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'learning_rate'"):
        AdamParams(learnig_rate=1e-4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lr"):
        DimuonParams(lr=1e-4)  # type: ignore[call-arg]
    with pytest.raises(UnknownFieldError, match="did you mean 'train_mlp'"):
        LoraConfig(rank=8, train_mpl=True)  # type: ignore[call-arg]


def test_a_rank_is_needed() -> None:
    with pytest.raises(TypeError, match="rank"):
        LoraConfig()  # type: ignore[call-arg]
    assert LoraConfig(rank=8).train_unembed


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"learning_rate": -1e-4},
        {"learning_rate": 1e-4, "beta1": 1.0},
        {"learning_rate": 1e-4, "beta1": -0.1},
        {"learning_rate": 1e-4, "grad_clip_norm": math.inf},
        {"learning_rate": 1e-4, "type": "adamw"},
    ],
)
def test_dimuon_settings_are_validated(settings: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, TypeError)):
        DimuonParams(**settings)


FAMILIES: list[Any] = [
    AdamOptimizerConfig(),
    DimuonOptimizerConfig(),
    DimuonParams(learning_rate=0.1, beta1=0.5),
    OptimizerConfigBase(type="muon", momentum=0.9),
    OptimParamsBase(type="muon", learning_rate=0.1, nested={"a": [1]}),
]


class SignParams(OptimParamsBase):
    """A family of the user's own, with arguments of its own."""

    __slots__ = ()

    def __init__(self, rate: float) -> None:
        super().__init__(type="sign", learning_rate=rate)


@pytest.mark.parametrize("family", [*FAMILIES, SignParams(0.5)], ids=repr)
def test_optimizer_families_survive_pickling_and_copying(family: Any) -> None:
    for again in (pickle.loads(pickle.dumps(family)), copy.copy(family), copy.deepcopy(family)):
        assert type(again) is type(family)
        assert again == family
        assert hash(again) == hash(family)
        assert again.type == family.type


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_optimizer_families_round_trip_through_plain_data(family: Any) -> None:
    base: Any = OptimizerConfigBase if isinstance(family, OptimizerConfigBase) else OptimParamsBase

    again = base._from_plain(family.model_dump())

    assert again == family
    assert type(again) is type(family)


def test_different_optimizer_families_are_not_equal() -> None:
    assert AdamOptimizerConfig() == AdamOptimizerConfig() != DimuonOptimizerConfig()
    assert OptimParamsBase(type="a") != OptimizerConfigBase(type="a")
    assert OptimParamsBase(type="a", x=1) != OptimParamsBase(type="a", x=2)
    assert OptimParamsBase(type="a") != 5


def test_extra_fields_of_an_optimizer_family_are_attributes() -> None:
    family = OptimParamsBase(type="muon", momentum=0.9)

    assert family.momentum == 0.9
    with pytest.raises(AttributeError, match="no field 'rate'"):
        _ = family.rate
    with pytest.raises(AttributeError, match="create a new OptimParamsBase"):
        family.momentum = 0.8


@pytest.mark.parametrize("plain", [None, [], {}, {"type": 5}, {"type": None}, "adamw"])
def test_an_optimizer_family_needs_a_type(plain: Any) -> None:
    for base in (OptimizerConfigBase, OptimParamsBase):
        with pytest.raises(ValueError, match="type"):
            base._from_plain(plain)
    with pytest.raises(ValidationError, match="must be text"):
        OptimParamsBase(type=5)  # type: ignore[arg-type]


def test_the_literals_of_an_optimizer_family_are_validated() -> None:
    with pytest.raises(ValidationError, match="always 'adamw'"):
        AdamOptimizerConfig(type="adam")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="always 1"):
        DimuonOptimizerConfig(version=2)  # type: ignore[arg-type]


# Training data and results


def an_input(**rest: Any) -> ForwardBackwardInput:
    datum = Datum(ModelInput.from_ints([1, 2]), {"weights": [0.5, math.nan]})
    return ForwardBackwardInput([datum], "cross_entropy", **rest)


def test_inputs_are_compared_pickled_and_copied() -> None:
    given = an_input(loss_fn_config={"clip": 0.2, "mode": "a"})

    for again in (pickle.loads(pickle.dumps(given)), copy.copy(given), copy.deepcopy(given)):
        assert again == given
    assert given != an_input()
    assert an_input(loss_fn_config={}) == an_input()
    assert given != 5


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"x"])
def test_a_loss_setting_must_be_a_number_or_a_string(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"loss_fn_config\['clip'\]"):
        an_input(loss_fn_config={"clip": value})


def test_a_repr_of_much_data_stays_short() -> None:
    given = ForwardBackwardInput([Datum(ModelInput.from_ints([1]))] * 10_000, "ppo")

    assert repr(given) == (
        "ForwardBackwardInput(data=[10000 datums], loss_fn='ppo', loss_fn_config=None)"
    )
    assert len(repr(ForwardBackwardOutput("ArrayRecord", [{}] * 10_000))) < 100


OUTPUT = {"logprobs": TensorData([-1.0], "float32")}


@pytest.mark.parametrize(
    ("metrics", "outputs", "loss"),
    [
        ({"loss:mean": 1.0, "loss": 2.0, "loss:sum": 3.0}, [OUTPUT], 1.0),
        ({"loss": 2.0, "loss:sum": 3.0}, [OUTPUT], 2.0),
        ({"loss:sum": 3.0}, [OUTPUT, OUTPUT], 1.5),
        ({"loss:mean": 0.0, "loss": 2.0}, [], 0.0),
    ],
)
def test_the_loss_is_chosen_from_the_metrics_in_a_fixed_order(
    metrics: dict[str, float], outputs: list[Any], loss: float
) -> None:
    assert ForwardBackwardOutput("ArrayRecord", outputs, metrics).loss == loss


@pytest.mark.parametrize(
    ("metrics", "outputs", "loss"),
    [
        (
            {"loss:sum": 6.0, "tinsmith/tokens:sum": 4.0, "tinsmith/weighted_tokens:sum": 2.0},
            [OUTPUT],
            3.0,
        ),
        ({"loss:sum": 6.0, "tinsmith/tokens:sum": 4.0}, [OUTPUT], 1.5),
        ({"loss:sum": 6.0}, [{"logprobs": TensorData([-1.0, -2.0], "float32")}] * 2, 1.5),
        ({"loss:sum": 6.0}, [], math.nan),
        ({"loss:mean": 6.0, "tinsmith/tokens:sum": 4.0}, [OUTPUT], math.nan),
    ],
)
def test_the_loss_per_token_of_a_single_reply_uses_its_own_metrics(
    metrics: dict[str, float], outputs: list[Any], loss: float
) -> None:
    found = ForwardBackwardOutput("ArrayRecord", outputs, metrics).loss_per_token

    assert found == loss or (math.isnan(found) and math.isnan(loss))


@pytest.mark.parametrize("metrics", [{}, {"loss:sum": 3.0}, {"accuracy:mean": 1.0}])
def test_a_missing_loss_is_nan(metrics: dict[str, float]) -> None:
    assert math.isnan(ForwardBackwardOutput("ArrayRecord", [], metrics).loss)


def test_metrics_are_mutable() -> None:
    output = ForwardBackwardOutput("ArrayRecord", [])

    output.metrics["mine"] = 1.0

    assert output.metrics == {"mine": 1.0}
    assert ForwardBackwardOutput("ArrayRecord", []).metrics == {}
    with pytest.raises(AttributeError):
        output.metrics = {}


def test_outputs_are_compared_pickled_and_copied() -> None:
    output = corpus.an_output()

    for again in (pickle.loads(pickle.dumps(output)), copy.copy(output), copy.deepcopy(output)):
        assert again == output
    assert output != ForwardBackwardOutput("ArrayRecord", [])
    assert output != 5


def test_a_checkpoint_has_a_page_in_the_console() -> None:
    saved = SaveWeightsResponse(path="tinker://run:train:0/weights/a b")
    sampler = SaveWeightsForSamplerResponse(path="tinker://run/sampler_weights/1")

    console = "https://tinker.thinkingmachines.ai"
    path = "tinker%3A%2F%2Frun%2Fsampler_weights%2F1"
    assert saved.get_console_url() == f"{console}/checkpoints/run%3Atrain%3A0/weights%2Fa%20b"
    assert sampler.get_console_url() == f"{console}/checkpoints/run/sampler_weights%2F1"
    assert sampler.get_playground_url() == (
        f"{console}/playground?mode=checkpoint&checkpoint={path}"
    )


def test_the_error_names_the_position_of_an_element_that_is_not_a_datum() -> None:
    with pytest.raises(TypeError, match=r"data\[1\] must be a Datum, not str"):
        ForwardBackwardInput([Datum(ModelInput.empty()), "x"], "cross_entropy")  # type: ignore[list-item]


def test_numpy_scalars_are_accepted_as_numbers_in_loss_settings() -> None:
    given = ForwardBackwardInput([], "ppo", {"clip_low_threshold": np.float32(0.5)})  # type: ignore[dict-item]

    assert given.loss_fn_config == {"clip_low_threshold": 0.5}


def test_settings_of_an_optimizer_family_must_be_finite() -> None:
    with pytest.raises(ValidationError, match="rate must be finite"):
        OptimParamsBase(type="own", rate=float("nan"))
