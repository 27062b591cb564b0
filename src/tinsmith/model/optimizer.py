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

A step that fails leaves no trace. That the new weights are finite is known only when they are
there, so a step gives other vectors, and whoever holds the old ones may go on reading. But one of
AdamW takes a third less time in place, and no fresh memory. So the caller says that nobody else has
the vectors, and hands back how large the numbers may be at most, as the last step told it; if that
is too much they are looked at. Where no overflow can come of them, they are changed in place, with
the same results.

AdamW is torch's own kernel, on so much at a time as caches hold; memory is read and written once.
All is float32, but for the last sums of norms. The same numbers give the same step, bit for bit,
whatever the number of threads.
"""

# N weight of the vector, R row and C column of a matrix

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import ValidationError
from tinsmith.model.spare_vectors import SpareVectors
from tinsmith.observe.training_metrics import GRAD_NORM, LEARNING_RATE, STEP, UPDATE_NORM
from tinsmith.types.training import AdamParams, OptimizerConfig, OptimParams

FIRST, SECOND = "first", "second"
MOMENTS: dict[str, tuple[str, ...]] = {"adamw": (FIRST, SECOND), "dimuon": (FIRST,)}
"""The moments that each optimizer keeps, by the name of its family."""

ROW = 1 << 10
"""Numbers whose squares are added up in float32: so few that no threads share a sum."""
CACHED = ROW << 7
"""Numbers of each vector that are stepped at a time."""
SMALLEST_NORM = 1e-12
"""Below it squares may have vanished in float32."""
LARGEST_NORM = 1e18
"""The square of a gradient must fit into float32."""
LARGEST_NUMBER = 1e37
"""Of the settings of a step."""
SAFE_NUMBER = 1e16
"""Up to it, rows of squares are far from what float32 holds."""

Matrices: TypeAlias = Callable[[Tensor], Iterable[Tensor]]
"""Gives a vector's matrices, as views of it; every weight is in one of them."""


class Step(NamedTuple):
    """What a step came to."""

    weights: Tensor
    moments: dict[str, Tensor]
    """By name."""
    metrics: dict[str, float]
    largest: float
    """No weight, first moment or root of a second moment is larger; infinite if nobody looked."""


def take_step(
    optimizer: OptimizerConfig,
    params: OptimParams,
    weights_N: Tensor,
    gradients_N: Tensor | None,
    moments: Mapping[str, Tensor],
    steps: int,
    matrices: Matrices,
    spares: SpareVectors | None = None,
    *,
    gradient_norm: float | None = None,
    largest: float = math.inf,
    is_own: bool = False,
) -> Step:
    """Work out one step, in vectors other than those given unless these may be changed.

    Args:
        optimizer: The family that the adapter was made with.
        params: The settings of this step.
        weights_N: All weights, float32.
        gradients_N: What was gathered for them; None counts as zeros.
        moments: As the last step gave them; empty before the first.
        steps: How many steps were taken before.
        matrices: How the vector is made of matrices.
        spares: Where the vectors of the step come from; without them from fresh memory.
        gradient_norm: What `norm_of` is for the gradients, if it is known.
        largest: As the last step gave it; infinite if it is not known.
        is_own: Nobody else reads the vectors: they may be changed in place, and are then the new
            ones too.

    Raises:
        ValidationError: The settings are of another family, or a number is not finite.
    """
    spares = SpareVectors() if spares is None else spares
    family = _family(optimizer, params)
    old = _old_moments(family, moments, weights_N)
    gradients_N = torch.zeros_like(weights_N) if gradients_N is None else gradients_N
    _check_settings(params)
    norm = norm_of(gradients_N) if gradient_norm is None else gradient_norm
    scale = _clip_scale(norm, float(params.grad_clip_norm))
    largest = max(largest, norm * scale)
    is_safe = _stays_safe(params, largest, steps + 1)
    if is_own and not is_safe and family == "adamw":
        # Nobody knows it yet, or it has grown: it does so faster than the numbers do.
        largest = max(_largest(weights_N, moments), norm * scale)
        is_safe = _stays_safe(params, largest, steps + 1)
    is_in_place = is_own and is_safe
    moved_N = weights_N if is_in_place else spares.take(weights_N)
    new = old if is_in_place else {name: spares.take(one) for name, one in old.items()}
    if isinstance(params, AdamParams):
        before = _State(weights_N, old[FIRST], old[SECOND])
        after = _State(moved_N, new[FIRST], new[SECOND])
        update_norm = _adamw(params, before, gradients_N, scale, after, steps + 1)
    else:
        torch.lerp(old[FIRST], gradients_N * scale, 1 - params.beta1, out=new[FIRST])
        _dimuon(params, moved_N.copy_(weights_N), new[FIRST], matrices)
        update_norm = norm_of(moved_N - weights_N)
    if not math.isfinite(update_norm):
        raise _not_finite(params)
    metrics = {
        GRAD_NORM: norm,
        UPDATE_NORM: update_norm,
        LEARNING_RATE: float(params.learning_rate),
        STEP: float(steps + 1),
    }
    largest = largest + 2 * update_norm if is_safe else math.inf
    return Step(moved_N, new, metrics, largest)


def _not_finite(params: OptimParams) -> ValidationError:
    # Without it, a number whose gradients were all 0 moves by 0 / 0.
    lacks_eps = isinstance(params, AdamParams) and params.eps == 0
    return ValidationError(
        "the step gives weights that are not finite; it was not taken",
        remedy="take an eps above 0" if lacks_eps else "take a lower learning rate",
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


def _old_moments(
    family: str, moments: Mapping[str, Tensor], weights_N: Tensor
) -> dict[str, Tensor]:
    old: dict[str, Tensor] = {}
    for name in MOMENTS[family]:
        found = moments.get(name)
        old[name] = torch.zeros_like(weights_N) if found is None else found
        if old[name].shape != weights_N.shape or old[name].dtype != torch.float32:
            raise ValidationError(f"the moment {name!r} is not of the size of the weights")
    return old


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


def norm_of(vector_N: Tensor) -> float:
    """The norm; NaN for a vector that is not finite."""
    norm = _root_of_squares(vector_N)
    if SMALLEST_NORM < norm < math.inf:
        return norm
    largest = float(vector_N.abs().max())
    if not 0 < largest < math.inf:
        return 0.0 if largest == 0 else math.nan
    return largest * _root_of_squares((vector_N.double() / largest).float())


def _root_of_squares(vector_N: Tensor) -> float:
    norms = _RowNorms(vector_N)
    norms.put(0, vector_N)
    return norms.root_of_squares()


class _RowNorms:
    """The norms of a vector's rows, part by part. All memory is taken when it is made."""

    def __init__(self, like_N: Tensor) -> None:
        self._norms_R = like_N.new_empty(-(-len(like_N) // ROW))
        self._squares_R = torch.empty_like(self._norms_R, dtype=torch.float64)

    def put(self, start: int, some_N: Tensor) -> None:
        """Those of a part that starts with a row."""
        row, rows = start // ROW, len(some_N) // ROW
        whole_RN = some_N[: rows * ROW].view(-1, ROW)
        torch.linalg.vector_norm(whole_RN, dim=1, out=self._norms_R[row : row + rows])
        if rows * ROW < len(some_N):
            torch.linalg.vector_norm(some_N[rows * ROW :], out=self._norms_R[row + rows])

    def root_of_squares(self) -> float:
        """The norm of all."""
        # By numpy: torch's sum of many numbers depends on the number of threads.
        return math.sqrt(self._squares_R.copy_(self._norms_R).square_().cpu().numpy().sum())


def _largest(weights_N: Tensor, moments: Mapping[str, Tensor]) -> float:
    """`Step.largest`; infinite if something is not a finite number, or has no root."""
    found: list[float] = []
    for name, vector_N in {"weights": weights_N, **moments}.items():
        least, most = map(float, vector_N.aminmax())
        if name == SECOND:  # one below 0 can only come of a checkpoint that is broken
            found.append(math.inf if least < 0 else math.sqrt(most))
        else:
            found.append(max(-least, most))
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _stays_safe(params: OptimParams, largest: float, step: int) -> bool:
    """Whether a step of AdamW with numbers that are no larger can overflow nowhere.

    Moments stay below the largest of themselves and the gradients, and a weight moves by no more
    than lr · first / eps. That is worked out from the left: a large eps comes too late to help.
    """
    if not isinstance(params, AdamParams) or params.eps < 1 / SAFE_NUMBER:
        return False
    rate = params.learning_rate / (1 - params.beta1**step)
    shrink = 1 + params.learning_rate * params.weight_decay
    return largest * (shrink + (1 + rate) / min(params.eps, 1.0)) < SAFE_NUMBER


# The families


class _State(NamedTuple):
    """The vectors of AdamW."""

    weights: Tensor
    first: Tensor
    second: Tensor


def _adamw(
    params: AdamParams,
    before: _State,
    gradients_N: Tensor,
    scale: float,
    after: _State,
    step: int,
) -> float:
    """Write the state after the step, which may be that before; the norm of the update."""
    if params.learning_rate / (1 - params.beta1**step) > LARGEST_NUMBER:  # a beta1 next to 1
        raise _not_finite(params)
    step_number = torch.tensor(float(step), device=gradients_N.device)
    size = CACHED if gradients_N.device.type == "cpu" else len(gradients_N)
    # Taken before anything is changed: no memory is the one thing that can still be amiss.
    kept_N, scaled_N = (torch.empty_like(gradients_N[:size]) for _ in range(2))
    norms = _RowNorms(gradients_N)
    for start in range(0, len(gradients_N), size):
        here = slice(start, start + size)
        weights_N, first_N, second_N = (one[here] for one in after)
        if after.weights is not before.weights:
            for target, source in zip((weights_N, first_N, second_N), before, strict=True):
                target.copy_(source[here])
        moved_N = kept_N[: len(weights_N)].copy_(weights_N)
        some_N = gradients_N[here]
        if scale != 1.0:
            some_N = torch.mul(some_N, scale, out=scaled_N[: len(some_N)])
        torch._fused_adamw_(  # changes its arguments in place
            *([weights_N], [some_N], [first_N], [second_N], [], [step_number]),
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=params.eps,
            amsgrad=False,
            maximize=False,
        )
        norms.put(start, moved_N.sub_(weights_N))
    norm = norms.root_of_squares()
    # Where squares overflow the whole is looked at; there it was not changed in place.
    return norm if norm < math.inf else norm_of(after.weights - before.weights)


def _dimuon(params: OptimParams, moved_N: Tensor, first_N: Tensor, matrices: Matrices) -> None:
    """Move the weights along the moment."""
    for first_RC, moved_RC in zip(matrices(first_N), matrices(moved_N), strict=True):
        size = params.learning_rate * UPDATE_RMS * math.sqrt(max(first_RC.shape))
        moved_RC.add_(orthogonal(first_RC), alpha=-size)


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
