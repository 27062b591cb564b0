from __future__ import annotations

import inspect
import math
import weakref
from typing import Any

import pytest
import torch

from tinsmith.client.losses.composed import LossTerm, compose_losses
from tinsmith.client.losses.custom import evaluate_loss
from tinsmith.types import Datum, ModelInput, TensorData

VALUES = [-0.5, -1.0, -2.0]


def a_datum() -> Datum:
    return Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})


def linear(_: list[Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -logprobs[0].sum()


def square(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return (logprobs[0] ** 2).sum(), {"largest:max": logprobs[0].detach().abs().max()}


def weights_and_metrics(loss: Any) -> tuple[list[float], dict[str, float]]:
    outputs = [{"logprobs": TensorData(VALUES, "float32")}]
    found = evaluate_loss(loss, [a_datum()], outputs)
    assert found.loss == pytest.approx(
        sum(value for name, value in found.metrics.items() if name.endswith("/weighted:sum"))
    )
    return found.weights[0].tolist(), found.metrics


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, -2.0)])
def test_the_gradient_of_each_term_is_scaled_by_its_weight(a: float, b: float) -> None:
    loss = compose_losses(LossTerm("linear", linear, a), LossTerm("square", square, b))

    weights, _ = weights_and_metrics(loss)

    assert weights == pytest.approx([a - b * 2 * lp for lp in VALUES], abs=1e-6)


def test_each_term_is_reported_before_and_after_weighting() -> None:
    loss = compose_losses(LossTerm("linear", linear), LossTerm("square", square, 0.5))

    _, metrics = weights_and_metrics(loss)

    assert metrics == {
        "linear:sum": 3.5,
        "linear/weighted:sum": 3.5,
        "linear/weight:mean": 1.0,
        "square:sum": 5.25,
        "square/weighted:sum": 2.625,
        "square/weight:mean": 0.5,
        "square/largest:max": 2.0,
    }


def test_a_weight_may_depend_on_the_step() -> None:
    loss = compose_losses(LossTerm("linear", linear), LossTerm("square", square, lambda s: s / 10))

    early, _ = weights_and_metrics(loss.at_step(0))
    late, metrics = weights_and_metrics(loss.at_step(5))

    assert early == pytest.approx([1.0, 1.0, 1.0])
    assert late == pytest.approx([1 - 0.5 * 2 * lp for lp in VALUES])
    assert metrics["square/weight:mean"] == 0.5


def test_a_weight_that_depends_on_the_step_requires_a_step() -> None:
    loss = compose_losses(LossTerm("linear", linear, lambda s: 1.0 + s))

    with pytest.raises(ValueError, match="'linear' depends on the step"):
        weights_and_metrics(loss)
    assert weights_and_metrics(compose_losses(*loss.terms, step=0))[0] == [1.0, 1.0, 1.0]


def test_the_error_names_a_term_without_a_gradient() -> None:
    lost = LossTerm("lost", lambda _, lps: lps[0].detach().sum())

    with pytest.raises(ValueError, match="'lost' has no gradient"):
        weights_and_metrics(compose_losses(LossTerm("linear", linear), lost))


def test_a_constant_term_may_be_monitored_with_weight_0() -> None:
    watched = LossTerm("watched", lambda _, lps: lps[0].detach().sum(), 0)

    weights, metrics = weights_and_metrics(compose_losses(LossTerm("linear", linear), watched))

    assert weights == [1.0, 1.0, 1.0]
    assert (metrics["watched:sum"], metrics["watched/weighted:sum"]) == (-3.5, 0.0)


def test_a_composed_loss_can_be_called_without_gradients() -> None:
    loss, _ = compose_losses(LossTerm("linear", linear, 2))([a_datum()], [torch.tensor(VALUES)])

    assert float(loss) == 7.0


def test_a_term_must_return_a_scalar() -> None:
    with pytest.raises(ValueError, match="'rows' must return a scalar tensor"):
        weights_and_metrics(compose_losses(LossTerm("rows", lambda _, lps: lps[0])))


def test_terms_must_have_unique_names_and_there_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="named a"):
        compose_losses(LossTerm("a", linear), LossTerm("a", square))
    with pytest.raises(ValueError, match="at least one"):
        compose_losses()


@pytest.mark.parametrize("name", ["", "a:sum"])
def test_a_name_must_leave_room_for_the_reduction(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        LossTerm(name, linear)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "much", None])
def test_a_weight_must_be_a_finite_number(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of term 'a'"):
        LossTerm("a", linear, weight)
    with pytest.raises(ValueError, match="weight of term 'a'"):
        weights_and_metrics(compose_losses(LossTerm("a", linear, lambda _: weight), step=1))


def test_a_term_needs_a_function() -> None:
    with pytest.raises(TypeError, match="must have a function"):
        LossTerm("a", 1.0)  # type: ignore[arg-type]  # that is the mistake


def test_a_term_has_a_signature_and_terms_and_losses_can_be_weakly_referenced() -> None:
    """`help` reads the signature, and callers may key caches weakly by their losses."""
    term = LossTerm("linear", linear)
    loss = compose_losses(term)

    assert list(inspect.signature(LossTerm).parameters) == ["name", "fn", "weight"]
    assert (weakref.ref(term)(), weakref.ref(loss)()) == (term, loss)
