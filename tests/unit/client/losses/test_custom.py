from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.client.losses.custom import Evaluated, _with_loss, evaluate_loss
from tinsmith.errors import DecodeError
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

LOGPROBS = [[-0.5, -1.25, -3.0], [-0.125, -2.0, -0.75]]


def some_data(count: int = 2) -> list[Datum]:
    return [
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]}) for _ in range(count)
    ]


def outputs(logprobs: Any = None) -> list[dict[str, TensorData]]:
    given = LOGPROBS if logprobs is None else logprobs
    return [{"logprobs": TensorData(values, "float32")} for values in given]


def entropy_like(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """C = Σ_i (i + 1) Σ_t p·lp + lp³ with p = exp(lp); every datum with a slope of its own."""
    assert len(data) == len(logprobs)
    loss = torch.zeros(())
    for index, lp in enumerate(logprobs):
        loss = loss + (index + 1) * (lp.exp() * lp + lp**3).sum()
    return loss, {"length": torch.tensor(3.0, requires_grad=True), "plain": 2}


def test_s43_the_weights_are_minus_the_analytic_gradient() -> None:
    found = evaluate_loss(entropy_like, some_data(), outputs())

    for index, (weights, values) in enumerate(zip(found.weights, LOGPROBS, strict=True)):
        lp = np.array(values)
        slope = (index + 1) * (np.exp(lp) * (lp + 1) + 3 * lp**2)
        np.testing.assert_allclose(weights.numpy(), -slope, rtol=1e-5, atol=1e-5)


def test_s43_the_weights_agree_with_finite_differences_of_the_loss() -> None:
    found = evaluate_loss(entropy_like, some_data(), outputs())
    step = 1e-6

    for index in range(2):
        for place in range(3):
            moved = [torch.tensor(values, dtype=torch.float64) for values in LOGPROBS]
            moved[index][place] += step
            above = entropy_like(some_data(), moved)[0]
            moved[index][place] -= 2 * step
            slope = (above - entropy_like(some_data(), moved)[0]) / (2 * step)
            assert float(found.weights[index][place]) == pytest.approx(-float(slope), abs=1e-5)


def test_the_loss_and_its_metrics_are_plain_numbers() -> None:
    found = evaluate_loss(entropy_like, some_data(), outputs())

    assert found.metrics == {"length": 3.0, "plain": 2.0}
    assert {type(value) for value in (found.loss, *found.metrics.values())} == {float}


def test_logprobs_are_leaves_that_share_the_memory_of_the_result() -> None:
    array = np.array(LOGPROBS[0], np.float32)
    seen: list[torch.Tensor] = []

    def keep(data: Any, logprobs: list[torch.Tensor]) -> Any:
        assert len(data) == 1
        seen.extend(logprobs)
        return logprobs[0].sum(), {}

    evaluate_loss(keep, some_data(1), [{"logprobs": TensorData.from_numpy(array)}])

    assert seen[0].is_leaf
    assert seen[0].data_ptr() == array.ctypes.data


def test_gradients_flow_into_the_user_s_own_parameters() -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))

    evaluate_loss(lambda _, lps: (scale * sum(lp.sum() for lp in lps), {}), some_data(), outputs())

    assert scale.grad is not None
    assert float(scale.grad) == pytest.approx(sum(map(sum, LOGPROBS)))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda _, lps: (lps[0].sum(), {}), "no gradient for datum 1"),
        (lambda _, lps: (lps[1].sum(), {}), "no gradient for datum 0"),
        (lambda _, lps: (lps[0].detach().sum(), {}), "does not depend on the logprobs"),
        (lambda _, lps: (sum(lp.sum().item() for lp in lps), {}), "a scalar tensor"),
        (lambda _, lps: (lps[0] + lps[1], {}), "a scalar tensor"),
        (lambda _, lps: lps[0].sum() + lps[1].sum(), r"must return \(loss, metrics\)"),
        (lambda _, lps: ((lps[0] * 0 / 0).sum() + lps[1].sum(), {}), "which is nan, .* datum 0;"),
        (lambda _, lps: (((lps[0] - lps[0]) ** 0.5 + lps[1]).sum(), {}), "NaN or infinite.* 0;"),
    ],
)
def test_a_loss_that_is_invalid_for_any_datum_is_rejected(loss_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_loss(loss_fn, some_data(), outputs())


def test_a_response_without_logprobs_is_a_service_error() -> None:
    with pytest.raises(DecodeError, match="logprobs of 1 datums, expected 2"):
        evaluate_loss(entropy_like, some_data(), [*outputs()[:1], {}])


class Squares:
    """C = Σ lp², and its gradient in a form of the test's choice."""

    def __init__(self, form: Any = list) -> None:
        self.form = form

    def gradients(
        self, data: list[Datum], logprobs: list[Any]
    ) -> tuple[float, Sequence[Any], Mapping[str, float]]:
        loss = sum(lp * lp for values in logprobs for lp in values)
        gradients = [self.form([2 * lp for lp in values]) for values in logprobs]
        return loss, gradients, {"count": len(data)}


@pytest.mark.parametrize(
    "form",
    [list, tuple, np.array, lambda v: np.array(v, np.float32), lambda v: TensorData(v, "float32")],
)
def test_s43_user_supplied_gradients_need_no_torch(form: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    found = evaluate_loss(Squares(form), some_data(), outputs())

    assert found.loss == pytest.approx(sum(lp * lp for values in LOGPROBS for lp in values))
    assert found.metrics == {"count": 2.0}
    for weights, values in zip(found.weights, LOGPROBS, strict=True):
        assert weights.tolist() == pytest.approx([-2 * lp for lp in values], abs=1e-5)


def test_gradients_keep_the_shape_of_the_logprobs() -> None:
    class Rows:
        def gradients(self, data: list[Datum], logprobs: list[Any]) -> Any:
            assert len(data) == 1
            return 0.0, [[[2.0 * cell for cell in row] for row in logprobs[0]]], {}

    found = evaluate_loss(Rows(), some_data(1), outputs([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))

    assert found.weights[0].shape == [3, 2]
    assert found.weights[0].tolist() == [[-2.0, -4.0], [-6.0, -8.0], [-10.0, -12.0]]


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([[1.0] * 3], "1 gradients for 2 datums"),
        ([[1.0] * 3, None], "no gradient for datum 1"),
        ([[1.0] * 3, [1.0, 2.0, float("nan")]], "NaN or infinite for datum 1; check for divisions"),
        ([[1.0] * 3, [1.0] * 2], r"datum 1 has shape \[2\], but its logprobs have \[3\]"),
    ],
)
def test_invalid_user_supplied_gradients_are_rejected(gradients: Any, message: str) -> None:
    class Wrong:
        def gradients(self, data: list[Datum], logprobs: list[Any]) -> Any:
            assert len(data) == len(logprobs)
            return 0.0, gradients, {}

    with pytest.raises(ValueError, match=message):
        evaluate_loss(Wrong(), some_data(), outputs())


def test_the_true_loss_is_reported_next_to_the_surrogate_loss() -> None:
    served = ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 2.0, "tokens:sum": 3.0})

    output = _with_loss(served, Evaluated(-16.0, [], {"mine": 1.0, "loss:sum": 99.0}))

    assert output.metrics == {
        "loss:sum": -16.0,
        "surrogate_loss:sum": 2.0,
        "tokens:sum": 3.0,
        "mine": 1.0,
    }
    assert served.metrics["loss:sum"] == 2.0


def test_a_response_without_a_loss_is_not_an_error() -> None:
    output = _with_loss(ForwardBackwardOutput("ArrayRecord", []), Evaluated(1.5, [], {}))

    assert output.metrics == {"loss:sum": 1.5}
