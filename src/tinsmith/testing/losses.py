"""The losses, as sums over positions, and their gradients, over the arithmetic of `Weights`.

With lp the log-probability of a target, w, A and q the datum's `weights`, `advantages` and
`logprobs`, and r = exp(lp − q):

    cross_entropy         −w·lp
    importance_sampling   −r·A                           also gspo and stable_reinforce
    ppo                   −min(r·A, clip(r)·A)           clip to 0.8 … 1.2 unless configured
    cispo                 −clip(r)·lp·A                  clip to 0 … 4, not differentiated
    dro                   −(lp·A − ½·beta·(lp − q)²)     beta 0.05 unless configured
    custom                −lp                            an uploaded loss is not run

The sums are exactly rounded (`math.fsum`), so for cross_entropy `loss:sum` is Σ −w·lp of the very
log-probabilities that are answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.testing.arithmetic import Gradient, Weights
from tinsmith.types.inputs import Datum, EncodedTextChunk, ModelInput
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput

Config = Mapping[str, float | str]
Term = tuple[float, float]
"""One position's part of the loss, and how much it falls with the log-probability."""


def run_loss(
    weights: Weights, given: ForwardBackwardInput, gradient: Gradient
) -> ForwardBackwardOutput:
    """Run a batch; its gradient is added to the given one.

    Raises:
        ValidationError: A datum lacks an input of its loss, or its inputs differ in length.
    """
    if given.loss_fn not in _TERMS:
        raise ValidationError(
            f"there is no loss {given.loss_fn!r}", remedy=f"known are {', '.join(_TERMS)}"
        )
    outputs, losses = [], []
    for index, datum in enumerate(given.data):
        targets, pairs = _pairs(datum, index)
        logprobs = weights.logprobs(pairs)
        terms = _terms(datum, index, given, logprobs)
        losses += [loss for loss, _ in terms]
        for pair, (_, slope) in zip(pairs, terms, strict=True):
            gradient[pair] = gradient.get(pair, 0.0) + slope
        outputs.append({"logprobs": TensorData(logprobs, "float32", targets.shape)})
    return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": math.fsum(losses)})


def context_tokens(given: ModelInput) -> list[int]:
    """One number for each position: a text token itself, for an image or audio its size."""
    contexts: list[int] = []
    for chunk in given.chunks:
        if isinstance(chunk, EncodedTextChunk):
            contexts += chunk.tokens
        elif chunk.type == "dmel":
            contexts += [len(chunk.dmel)] * chunk.length
        else:
            size = len(chunk.data) if chunk.type == "image" else len(chunk.location)
            contexts += [size] * (chunk.expected_tokens or 1)
    return contexts


def _pairs(datum: Datum, index: int) -> tuple[TensorData, list[tuple[int, int]]]:
    """The targets, and each target with the token that it follows."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValidationError(f"datum {index} has no 'target_tokens' in its loss_fn_inputs")
    flat = _flat(targets)
    contexts = context_tokens(datum.model_input)
    width = targets.shape[1] if targets.shape is not None and len(targets.shape) == 2 else 1
    if len(flat) != width * len(contexts):
        raise ValidationError(
            f"datum {index} has {len(contexts)} input tokens and {len(flat)} targets, "
            f"{width} to a position"
        )
    return targets, [(contexts[place // width], token) for place, token in enumerate(flat)]


def _terms(
    datum: Datum, index: int, given: ForwardBackwardInput, logprobs: list[float]
) -> list[Term]:
    term, names = _TERMS[given.loss_fn]
    columns = []
    for name in names:
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is None:
            raise ValidationError(f"datum {index} has no {name!r}, which {given.loss_fn} needs")
        column = _flat(tensor)
        if len(column) != len(logprobs):
            raise ValidationError(
                f"datum {index} has {len(column)} {name} for {len(logprobs)} target_tokens"
            )
        columns.append(column)
    config = given.loss_fn_config or {}
    return [term(lp, config, *row) for lp, *row in zip(logprobs, *columns, strict=True)]


def _flat(tensor: TensorData) -> list[Any]:
    if not tensor.is_sparse:
        return tensor.data
    return [cell for row in tensor.tolist() for cell in row]


def _cross_entropy(lp: float, config: Config, w: float) -> Term:  # noqa: ARG001 - has no settings
    return -w * lp, w


def _importance_sampling(lp: float, config: Config, q: float, a: float) -> Term:  # noqa: ARG001
    ratio = _ratio(lp, q)
    return -ratio * a, ratio * a


def _ppo(lp: float, config: Config, q: float, a: float) -> Term:
    ratio = _ratio(lp, q)
    clipped = _clipped(ratio, config, 0.8, 1.2)
    is_cut = clipped * a < ratio * a
    return -min(ratio * a, clipped * a), 0.0 if is_cut else ratio * a


def _cispo(lp: float, config: Config, q: float, a: float) -> Term:
    clipped = _clipped(_ratio(lp, q), config, 0.0, 4.0)
    return -clipped * lp * a, clipped * a


def _dro(lp: float, config: Config, q: float, a: float) -> Term:
    beta = float(config.get("beta", 0.05))
    return -(lp * a - 0.5 * beta * (lp - q) ** 2), a - beta * (lp - q)


def _custom(lp: float, config: Config) -> Term:  # noqa: ARG001 - names the loss, which is not run
    return -lp, 1.0


def _ratio(lp: float, q: float) -> float:
    return math.exp(min(lp - q, 80.0))  # far beyond any honest ratio, and still a number


def _clipped(ratio: float, config: Config, low: float, high: float) -> float:
    low = float(config.get("clip_low_threshold", low))
    return min(max(ratio, low), float(config.get("clip_high_threshold", high)))


_SAMPLED = ("logprobs", "advantages")
_TERMS: dict[str, tuple[Callable[..., Term], tuple[str, ...]]] = {
    "cross_entropy": (_cross_entropy, ("weights",)),
    "importance_sampling": (_importance_sampling, _SAMPLED),
    "ppo": (_ppo, _SAMPLED),
    "cispo": (_cispo, _SAMPLED),
    "dro": (_dro, _SAMPLED),
    "gspo": (_importance_sampling, _SAMPLED),
    "stable_reinforce": (_importance_sampling, _SAMPLED),
    "custom": (_custom, ()),
}
