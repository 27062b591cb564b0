"""Steps of an optimizer over the flat vector of an adapter: AdamW and Dimuon.

AdamW is that of `torch.optim.AdamW`: the weights shrink by lr·weight_decay apart from the gradient,
and moments are corrected for their start at 0. With g the gradient, clipped,

    first  ← beta1·first + (1 − beta1)·g
    second ← beta2·second + (1 − beta2)·g²
    w      ← (1 − lr·weight_decay)·w − lr · first/(1 − beta1^t) / (√(second/(1 − beta2^t)) + eps)

Dimuon is not published. Ours is Muon (Jordan et al., 2024) on each factor of each layer:

    first ← beta1·first + (1 − beta1)·g
    w     ← w − lr · 0.2·√(larger side) · orthogonal(first)

`orthogonal` has the singular vectors of its argument and singular values near 1, by five steps of
Newton and Schulz. The factor before it (Liu et al., 2025) makes a step as large as one of AdamW is,
so that learning rates can be carried over. A matrix that has had no gradient does not move.

Gradients are clipped by the norm of the whole vector: where it is above `grad_clip_norm`, they are
scaled to it.

A step is worked out in full before anything is changed. All is float32, in pieces that fit into the
cache; norms are added up as float64. The same numbers give the same step, bit for bit, whatever the
size of the pieces.
"""

# N weight of the vector, R row and C column of a matrix

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import ValidationError
from tinsmith.types.training import AdamParams, OptimizerConfig, OptimParams

FIRST, SECOND = "first", "second"
MOMENTS: dict[str, tuple[str, ...]] = {"adamw": (FIRST, SECOND), "dimuon": (FIRST,)}
"""The moments that each optimizer keeps, by the name of its family."""

PIECE = 1 << 16
"""Weights that are stepped at a time: a quarter of a megabyte for each vector."""
LARGEST_NORM = 1e18
"""The square of a gradient must fit into float32."""
LARGEST_NUMBER = 1e37
"""Of the settings of a step."""

Matrices: TypeAlias = Callable[[Tensor], Iterable[Tensor]]
"""Gives a vector's matrices, as views of it; every weight is in one of them."""


class Step(NamedTuple):
    """What a step came to."""

    weights: Tensor
    """A new vector; the one before is as it was."""
    moments: dict[str, Tensor]
    """By name. Those that were given, changed in place, or new ones."""
    metrics: dict[str, float]


def take_step(
    optimizer: OptimizerConfig,
    params: OptimParams,
    weights_N: Tensor,
    gradients_N: Tensor | None,
    moments: Mapping[str, Tensor],
    steps: int,
    matrices: Matrices,
    *,
    piece: int = PIECE,
) -> Step:
    """Work out one step.

    Args:
        optimizer: The family that the adapter was made with.
        params: The settings of this step.
        weights_N: All weights, float32.
        gradients_N: What was gathered for them; None counts as zeros.
        moments: As the last step gave them; empty before the first.
        steps: How many steps were taken before.
        matrices: How the vector is made of matrices.
        piece: How many weights to step at a time. Changes nothing but the time it takes.

    Raises:
        ValidationError: The settings are of another family, or a number is not finite. The moments
            are as they were.
    """
    family = _family(optimizer, params)
    kept = _kept_moments(family, moments, weights_N)
    gradients_N = torch.zeros_like(weights_N) if gradients_N is None else gradients_N
    _check_settings(params)
    norm = _norm(gradients_N)
    scale = _clip_scale(norm, float(params.grad_clip_norm))
    plan: _Plan
    if isinstance(params, AdamParams):
        plan = _AdamW(params, kept, gradients_N, scale, steps + 1, piece)
    else:
        plan = _Dimuon(params, kept, gradients_N, scale, matrices, piece)
    moved_N = plan.moved(weights_N)
    update_norm = _norm(moved_N, weights_N)
    if not math.isfinite(update_norm):
        raise _not_finite()
    plan.settle()
    metrics = {
        "grad_norm": norm,
        "update_norm": update_norm,
        "learning_rate": float(params.learning_rate),
        "step": float(steps + 1),
    }
    return Step(moved_N, kept, metrics)


def _not_finite() -> ValidationError:
    return ValidationError(
        "the step gives weights that are not finite; it was not taken",
        remedy="take a lower learning rate",
    )


def _family(optimizer: OptimizerConfig, params: OptimParams) -> str:
    family = "adamw" if isinstance(params, AdamParams) else params.type
    if family != optimizer.type:
        raise ValidationError(
            f"the model was made with the optimizer {optimizer.type!r}, the step is one of "
            f"{family!r}"
        )
    if family not in MOMENTS:
        raise ValidationError(
            f"there is no optimizer {family!r}", remedy=f"known are {', '.join(MOMENTS)}"
        )
    return family


def _kept_moments(
    family: str, moments: Mapping[str, Tensor], weights_N: Tensor
) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for name in MOMENTS[family]:
        found = moments.get(name)
        kept[name] = torch.zeros_like(weights_N) if found is None else found
        if kept[name].shape != weights_N.shape or kept[name].dtype != torch.float32:
            raise ValidationError(f"the moment {name!r} is not of the size of the weights")
    return kept


def _check_settings(params: OptimParams) -> None:
    names = ("learning_rate", "eps", "weight_decay") if isinstance(params, AdamParams) else ()
    for name in names or ("learning_rate",):
        value = float(getattr(params, name))
        if not 0 <= value <= LARGEST_NUMBER:
            raise ValidationError(f"{name} is {value}; it may be 0 to {LARGEST_NUMBER:g}")
    for name in ("beta1", "beta2") if isinstance(params, AdamParams) else ("beta1",):
        if not 0 <= float(getattr(params, name)) < 1:
            raise ValidationError(f"{name} is {getattr(params, name)}; it may be 0 to below 1")


def _clip_scale(norm: float, clip: float) -> float:
    if not math.isfinite(norm):
        raise ValidationError(
            "the gathered gradients are not finite; the step was not taken",
            remedy="go back to a checkpoint, and look for huge values in loss_fn_inputs",
        )
    scale = clip / norm if 0 < clip < norm else 1.0
    if norm * scale > LARGEST_NORM:
        raise ValidationError(
            f"the gradients have a norm of {norm:g}, which is too large; the step was not taken",
            remedy="set grad_clip_norm",
        )
    return scale


def _norm(vector_N: Tensor, minus_N: Tensor | None = None) -> float:
    """The norm of a vector, or of the difference of two."""
    parts = []
    for span in _spans(len(vector_N), PIECE):  # not by `piece`: sums depend on their order
        part = vector_N[span].double()
        if minus_N is not None:
            part -= minus_N[span]
        parts.append(float(part.square_().cpu().numpy().sum()))
    return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan


def _spans(length: int, piece: int) -> Iterator[slice]:
    for start in range(0, length, piece):
        yield slice(start, min(start + piece, length))


class _Plan:
    """A step of one family: `moved` changes nothing, `settle` cannot fail."""

    def __init__(
        self, moments: Mapping[str, Tensor], gradients_N: Tensor, scale: float, piece: int
    ) -> None:
        self._moments = moments
        self._gradients_N = gradients_N
        self._scale = scale
        self._piece = piece

    def moved(self, weights_N: Tensor) -> Tensor:
        """The weights after the step, in a new vector."""
        raise NotImplementedError

    def settle(self) -> None:
        """Change the moments."""
        raise NotImplementedError

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Where each piece is, and its gradient, clipped."""
        for span in _spans(len(self._gradients_N), self._piece):
            gradient = self._gradients_N[span]
            yield span, gradient if self._scale == 1.0 else gradient * self._scale


class _AdamW(_Plan):
    def __init__(
        self,
        params: AdamParams,
        moments: Mapping[str, Tensor],
        gradients_N: Tensor,
        scale: float,
        step: int,
        piece: int,
    ) -> None:
        super().__init__(moments, gradients_N, scale, piece)
        self._params = params
        self._step = step

    def moved(self, weights_N: Tensor) -> Tensor:
        """See the base class."""
        params, first_N, second_N = self._params, self._moments[FIRST], self._moments[SECOND]
        size = params.learning_rate / (1 - params.beta1**self._step)
        if size > LARGEST_NUMBER:  # with a beta1 next to 1
            raise _not_finite()
        spread = math.sqrt(1 - params.beta2**self._step)
        keep = 1 - params.learning_rate * params.weight_decay
        moved_N = torch.empty_like(weights_N)
        for span, g in self._pieces():
            first = torch.lerp(first_N[span], g, 1 - params.beta1)
            root = (second_N[span] * params.beta2).addcmul_(g, g, value=1 - params.beta2).sqrt_()
            root.div_(spread).add_(params.eps)
            torch.mul(weights_N[span], keep, out=moved_N[span])
            moved_N[span].addcdiv_(first, root, value=-size)
        return moved_N

    def settle(self) -> None:
        """See the base class."""
        params = self._params
        for span, g in self._pieces():
            self._moments[FIRST][span].lerp_(g, 1 - params.beta1)
            second = self._moments[SECOND][span]
            second.mul_(params.beta2).addcmul_(g, g, value=1 - params.beta2)


class _Dimuon(_Plan):
    def __init__(
        self,
        params: OptimParams,
        moments: Mapping[str, Tensor],
        gradients_N: Tensor,
        scale: float,
        matrices: Matrices,
        piece: int,
    ) -> None:
        super().__init__(moments, gradients_N, scale, piece)
        self._params = params
        self._matrices = matrices
        self._first_N = moments[FIRST]

    def moved(self, weights_N: Tensor) -> Tensor:
        """See the base class."""
        first_N = torch.empty_like(self._first_N)
        for span, g in self._pieces():
            torch.lerp(self._first_N[span], g, 1 - self._params.beta1, out=first_N[span])
        moved_N = weights_N.clone()
        for first_RC, moved_RC in zip(
            self._matrices(first_N), self._matrices(moved_N), strict=True
        ):
            size = self._params.learning_rate * UPDATE_RMS * math.sqrt(max(first_RC.shape))
            moved_RC.add_(orthogonal(first_RC), alpha=-size)
        self._next_N = first_N
        return moved_N

    def settle(self) -> None:
        """See the base class."""
        self._first_N.copy_(self._next_N)


UPDATE_RMS = 0.2
"""About that of a step of AdamW with learning rate 1."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Steepest at 0 among the odd polynomials of degree 5 that keep singular values around 1."""
_NEWTON_SCHULZ_STEPS = 5
_SMALLEST_NORM = 1e-30


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """A matrix with the same singular vectors, and singular values between 0.6 and 1.3.

    Those that are less than about a hundredth of the largest are raised less; zero stays zero.
    """
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x: Tensor = matrix_RC.T if is_tall else matrix_RC
    # By the largest number first: squares of small numbers are not to vanish.
    x = x / x.abs().max().clamp(min=_SMALLEST_NORM)
    x = x / torch.linalg.vector_norm(x).clamp(min=1.0)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.T if is_tall else x
