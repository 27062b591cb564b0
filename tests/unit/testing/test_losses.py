"""Losses against their formulas, and gradients against small differences."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinsmith import types as t
from tinsmith.errors import ValidationError
from tinsmith.testing.arithmetic import Gradient, Weights
from tinsmith.testing.losses import _TERMS, context_tokens, run_loss

TOKENS, TARGETS = [5, 6, 7], [6, 7, 8]
Q, A = [-3.0, -9.0, -2.0], [1.0, -0.5, 2.0]


def run(
    loss_fn: Any, config: dict[str, Any] | None = None, **inputs: Any
) -> tuple[list[float], float, Gradient]:
    """Log-probabilities, loss and gradient of one datum."""
    inputs = {"target_tokens": TARGETS, **inputs}
    datum = t.Datum.received(t.ModelInput.from_ints(TOKENS), inputs)
    gradient: Gradient = {}
    output = run_loss(Weights("m", 100), t.ForwardBackwardInput([datum], loss_fn, config), gradient)
    return output.loss_fn_outputs[0]["logprobs"].data, output.metrics["loss:sum"], gradient


def test_cross_entropy_is_exactly_the_weighted_sum() -> None:
    logprobs, loss, gradient = run("cross_entropy", weights=[0.0, 0.1, 2.0])

    tenth = t.TensorData([0.1], "float32").data[0]
    assert loss == math.fsum([-tenth * logprobs[1], -2.0 * logprobs[2]])
    assert list(gradient.values()) == [0.0, tenth, 2.0]


def test_importance_sampling_weighs_by_the_ratio() -> None:
    logprobs, loss, gradient = run("importance_sampling", logprobs=Q, advantages=A)

    ratios = [math.exp(lp - q) for lp, q in zip(logprobs, Q, strict=True)]
    terms = [r * a for r, a in zip(ratios, A, strict=True)]
    assert loss == pytest.approx(-sum(terms))
    assert list(gradient.values()) == pytest.approx(terms)


@pytest.mark.parametrize("config", [None, {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}])
def test_ppo_takes_the_smaller_of_clipped_and_not(config: dict[str, float] | None) -> None:
    logprobs, loss, _ = run("ppo", config, logprobs=Q, advantages=A)

    low, high = (0.8, 1.2) if config is None else (0.1, 9.0)
    ratios = [math.exp(lp - q) for lp, q in zip(logprobs, Q, strict=True)]
    terms = [min(r * a, min(max(r, low), high) * a) for r, a in zip(ratios, A, strict=True)]
    assert loss == pytest.approx(-sum(terms))


def test_cispo_and_dro() -> None:
    logprobs, cispo, _ = run("cispo", logprobs=Q, advantages=A)
    _, dro, _ = run("dro", {"beta": 0.2}, logprobs=Q, advantages=A)

    rows = list(zip(logprobs, Q, A, strict=True))
    assert cispo == pytest.approx(-sum(min(math.exp(lp - q), 4.0) * lp * a for lp, q, a in rows))
    assert dro == pytest.approx(-sum(lp * a - 0.1 * (lp - q) ** 2 for lp, q, a in rows))


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "dro"])
@pytest.mark.parametrize("lp", [-2.0, -1.9, -6.0])
def test_gradient_is_the_slope_of_the_loss(loss_fn: str, lp: float) -> None:
    term, names = _TERMS[loss_fn]
    row = [-2.05, 1.5][: len(names)]
    step = 1e-6

    higher, lower = term(lp + step, {}, *row)[0], term(lp - step, {}, *row)[0]

    assert term(lp, {}, *row)[1] == pytest.approx(-(higher - lower) / (2 * step), abs=1e-5)


def test_several_targets_to_a_position_keep_their_shape_dense_and_sparse() -> None:
    dense = {"target_tokens": [[1, 2], [3, 4], [5, 0]], "weights": [[1.0, 1.0]] * 2 + [[1.0, 0.0]]}
    sparse = {
        "target_tokens": t.TensorData(
            [1, 2, 3, 4, 5], "int64", [3, 2], [0, 2, 4, 5], [0, 1, 0, 1, 0]
        ),
        "weights": t.TensorData([1.0] * 5, "float32", [3, 2], [0, 2, 4, 5], [0, 1, 0, 1, 0]),
    }
    outputs = []
    for inputs in (dense, sparse):
        datum = t.Datum.received(t.ModelInput.from_ints(TOKENS), inputs)
        given = t.ForwardBackwardInput([datum], "cross_entropy")
        outputs.append(run_loss(Weights("m", 100), given, {}))

    assert outputs[0] == outputs[1]
    assert outputs[0].loss_fn_outputs[0]["logprobs"].shape == [3, 2]


def test_chunks_add_up_to_the_whole() -> None:
    inputs = {"target_tokens": TARGETS, "weights": [1.0, 0.3, 0.7]}
    data = [t.Datum.received(t.ModelInput.from_ints(TOKENS), inputs) for _ in range(4)]
    whole: Gradient = {}
    chunked: Gradient = {}

    weights = Weights("m", 100)
    run_loss(weights, t.ForwardBackwardInput(data, "cross_entropy"), whole)
    for datum in data:
        run_loss(weights, t.ForwardBackwardInput([datum], "cross_entropy"), chunked)

    assert chunked == pytest.approx(whole)


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({"weights": [1.0]}, "1 weights for 3"),
        ({}, "no 'weights'"),
        ({"target_tokens": [1], "weights": [1.0]}, "3 input tokens and 1 targets"),
    ],
)
def test_datum_that_does_not_fit_is_told_apart(inputs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        run("cross_entropy", **inputs)


def test_unknown_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match="no loss 'nothing'"):
        run("nothing")


def test_images_and_audio_take_their_places() -> None:
    image = t.ImageChunk(data=b"1234", format="png", expected_tokens=2)
    pointer = t.ImageAssetPointerChunk(location="abc", format="png")
    audio = t.DmelChunk(dmel=bytes([0, 1, 3]))
    given = t.ModelInput([t.EncodedTextChunk([9]), image, pointer, audio])

    assert context_tokens(given) == [9, 4, 4, 3, 3, 3, 3]
