"""Adapters of the fake engine: weights, moments, accumulated gradients, and the training works.

A work is computed completely before the adapter changes, so a failed work leaves it unchanged.
"""

from __future__ import annotations

import math

import numpy as np

from tinsmith.engine.base import AdapterSpec, PassWork, StepWork
from tinsmith.engine.fake import arithmetic
from tinsmith.engine.fake.arithmetic import Array, Tensors, Vocabulary
from tinsmith.engine.fake.losses import datum_loss
from tinsmith.errors import ValidationError
from tinsmith.observe.training_metrics import GRAD_NORM, LOSS, STEP, TOKENS
from tinsmith.types.inputs import Datum, LossFnOutput
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import (
    AdamParams,
    ForwardBackwardOutput,
    OptimParams,
    OptimStepResponse,
)


class Adapter:
    """The state of one adapter."""

    def __init__(self, spec: AdapterSpec, base_CK: Array, weights: Tensors) -> None:
        self.spec = spec
        self.weights = weights
        self.first_moments: Tensors = {}
        self.second_moments: Tensors = {}
        self.gradients: Tensors = {}
        self.steps = 0
        self._base_CK = base_CK
        self._table_CK: Array | None = None

    @property
    def table_CK(self) -> Array:  # noqa: N802 - its dimensions
        """The log-probability of each class given each context, with the current weights."""
        if self._table_CK is None:
            self._table_CK = arithmetic.log_table(self._base_CK, self.weights)
        return self._table_CK

    def run_pass(self, work: PassWork, vocabulary: Vocabulary) -> ForwardBackwardOutput:
        """Run a forward pass over data, and accumulate gradients if the work asks for them."""
        if work.loss_fn == "custom":
            raise ValidationError(
                "the fake engine runs built-in losses only, not uploaded ones",
                remedy="use the embedded engine: tinsmith serve --engine embedded",
            )
        slopes_CK = np.zeros((arithmetic.CONTEXTS, arithmetic.CLASSES))
        outputs: list[LossFnOutput] = []
        total, positions = 0.0, 0
        for index, datum in enumerate(work.data):
            rows, targets = _positions(datum, index)
            lp = vocabulary.logprobs(self.table_CK, rows, targets)
            loss, slopes = datum_loss(work.loss_fn, lp.astype(np.float64), datum, work.loss_config)
            total += loss
            positions += targets.size
            outputs.append({"logprobs": TensorData.from_numpy(lp)})
            slopes_CK += arithmetic.slopes_table(
                rows.reshape(-1), vocabulary.classes(targets).reshape(-1), slopes.reshape(-1)
            )
        if not math.isfinite(total) or not np.isfinite(slopes_CK).all():
            raise ValidationError(
                f"the loss is {total}; no gradients were accumulated",
                remedy="check loss_fn_inputs for NaN, infinities and huge values",
            )
        if work.with_gradients:
            self._gather(arithmetic.gradients(self.weights, self.table_CK, slopes_CK))
        metrics = {LOSS: total, TOKENS: float(positions)}
        return ForwardBackwardOutput("ArrayRecord", outputs, metrics)

    def _gather(self, more: Tensors) -> None:
        if not self.gradients:
            self.gradients = more
            return
        self.gradients = {name: self.gradients[name] + more[name] for name in more}

    def flat(self, tensors: Tensors) -> Array:
        """All tensors as one vector, missing ones as 0; many small arrays are 10 times slower."""
        if not tensors:
            return np.zeros(sum(one.size for one in self.weights.values()), np.float32)
        return np.concatenate([tensors[name].reshape(-1) for name in self.weights])

    def parted(self, flat: Array) -> Tensors:
        """The vector split into named matrices; the inverse of `flat`."""
        parts: Tensors = {}
        start = 0
        for name, like in self.weights.items():
            parts[name] = flat[start : start + like.size].reshape(like.shape)
            start += like.size
        return parts

    def step(self, work: StepWork) -> OptimStepResponse:
        """Apply the accumulated gradients and reset them to zero."""
        family = "adamw" if isinstance(work.params, AdamParams) else work.params.type
        if family != self.spec.optimizer.type:
            raise ValidationError(
                f"the model was created for the optimizer {self.spec.optimizer.type!r}, "
                f"but the step is for {family!r}"
            )
        gradient = self.flat(self.gradients)
        norm = math.sqrt(float((gradient.astype(np.float64) ** 2).sum()))
        clip = float(work.params.grad_clip_norm)
        scale = clip / norm if 0 < clip < norm else 1.0
        move = _adamw if family == "adamw" else _dimuon
        moved = move(self, scale * gradient, work.params)
        if not np.isfinite(moved[0]).all():
            raise ValidationError(
                "the step would make weights that are not finite; it was not applied"
            )
        self.weights, self.first_moments, self.second_moments = map(self.parted, moved)
        self.gradients = {}
        self.steps += 1
        self._table_CK = None
        return OptimStepResponse(metrics={GRAD_NORM: norm, STEP: float(self.steps)})


def _positions(datum: Datum, index: int) -> tuple[Array, Array]:
    """The context row and token of each target, in the targets' shape."""
    tensor = datum.loss_fn_inputs.get("target_tokens")
    if tensor is None:
        raise ValidationError(f"datum {index} has no 'target_tokens' in its loss_fn_inputs")
    targets = tensor.to_numpy().astype(np.int64)
    rows = arithmetic.context_rows(arithmetic.input_tokens(datum.model_input))
    if targets.ndim not in (1, 2) or len(targets) != len(rows):
        raise ValidationError(
            f"datum {index} has {len(rows)} input tokens and targets of shape {targets.shape}"
        )
    if targets.ndim == 2:
        rows = np.repeat(rows[:, None], targets.shape[1], axis=1)
    return rows, targets


def _adamw(adapter: Adapter, gradient: Array, params: OptimParams) -> tuple[Array, Array, Array]:
    """AdamW: decoupled weight decay, bias-corrected moments."""
    assert isinstance(params, AdamParams)
    weight = adapter.flat(adapter.weights).astype(np.float64)
    first, second = adapter.flat(adapter.first_moments), adapter.flat(adapter.second_moments)
    m = params.beta1 * first + (1 - params.beta1) * gradient
    v = params.beta2 * second + (1 - params.beta2) * gradient**2
    count = adapter.steps + 1
    m_hat, v_hat = m / (1 - params.beta1**count), v / (1 - params.beta2**count)
    weight -= params.learning_rate * params.weight_decay * weight
    weight -= params.learning_rate * m_hat / (np.sqrt(v_hat) + params.eps)
    return weight.astype(np.float32), m.astype(np.float32), v.astype(np.float32)


def _dimuon(adapter: Adapter, gradient: Array, params: OptimParams) -> tuple[Array, Array, Array]:
    """A stand-in for Dimuon: a step along the orthogonalised momentum, as in Muon."""
    m = params.beta1 * adapter.flat(adapter.first_moments) + gradient
    steps: Tensors = {}
    for name, m_of_one in adapter.parted(m).items():
        u, _, vt = np.linalg.svd(m_of_one, full_matrices=False)
        steps[name] = u @ vt if np.any(m_of_one) else np.zeros_like(m_of_one)
    weight = adapter.flat(adapter.weights).astype(np.float64)
    weight -= params.learning_rate * adapter.flat(steps)
    return weight.astype(np.float32), m.astype(np.float32), np.zeros_like(m, np.float32)
