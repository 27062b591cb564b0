"""Optimizer steps over the flat vector of an adapter: AdamW and Dimuon.

AdamW is that of `torch.optim.AdamW`, with decoupled weight decay and bias-corrected moments. With g
the clipped gradient,

    first  ← beta1·first + (1 − beta1)·g
    second ← beta2·second + (1 − beta2)·g²
    w      ← (1 − lr·weight_decay)·w − lr · first/(1 − beta1^t) / (√(second/(1 − beta2^t)) + eps)

Dimuon is not published. Ours is Muon (Jordan et al., 2024) on each factor of each layer:

    first ← beta1·first + (1 − beta1)·g
    w     ← w − lr · 0.2·√(larger side) · orthogonal(first)

`orthogonal` keeps the singular vectors of its argument and brings its singular values near 1, by
five Newton-Schulz iterations. The factor before it (Liu et al., 2025) makes a step about as large
as one of AdamW, so that learning rates carry over. A matrix without a gradient does not move.

Gradients are clipped by the norm of the whole vector to `grad_clip_norm`.

A step that fails changes nothing. Whether the new weights are finite is known only afterwards, so a
step normally writes new vectors. In place, AdamW takes a third less time and no fresh memory. So
the caller says whether it owns the vectors, and passes the bound on their magnitude that the last
step returned; if the bound is too large, the vectors are scanned. If no overflow is possible, they
are changed in place, with the same results.

AdamW is torch's fused kernel, applied to blocks that fit in cache, so that memory is read and
written once. Everything is float32, except for the final sums of norms. A step is bit-identical for
any number of threads.

**`VectorPool`** has vectors for reuse. Fresh memory is expensive, since the system maps and clears
it page by page: filling 40 MB of it, the size of a SmolLM2 adapter, takes about seven times as long
as filling memory that was used before. Training needs such vectors in every pass and step.
"""

# N weight of the vector, R row and C column of a matrix

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import ValidationError
from tinsmith.observe.training_metrics import GRAD_NORM, LEARNING_RATE, STEP, UPDATE_NORM
from tinsmith.types.training import AdamParams, OptimizerConfig, OptimParams

MOST_BYTES = 512 << 20


class VectorPool:
    """Vectors that are free for reuse. Thread-safe.

    Args:
        most_bytes: Maximum size of the pool; the oldest vectors are dropped first.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """An uninitialised vector of the same size, dtype and device."""
        with self._lock:
            for place in reversed(
                range(len(self._kept))
            ):  # the last is the most likely to be in cache
                one = self._kept[place]
                if (one.shape, one.dtype, one.device) == (like.shape, like.dtype, like.device):
                    return self._kept.pop(place)
        return torch.empty_like(like)

    def give(self, *vectors: Tensor) -> None:
        """Return vectors to the pool. The caller must not use them any more."""
        with self._lock:
            self._kept += vectors
            while sum(one.nbytes for one in self._kept) > self._most_bytes:
                self._kept.pop(0)


FIRST, SECOND = "first", "second"
MOMENTS: dict[str, tuple[str, ...]] = {"adamw": (FIRST, SECOND), "dimuon": (FIRST,)}
"""The moments that each optimizer keeps."""

ROW = 1 << 10
"""Numbers whose squares are summed in float32; few enough that threads do not split the sum."""
CACHED = ROW << 7
"""Numbers of each vector per block."""
SMALLEST_NORM = 1e-12
"""Below it squares may have underflowed in float32."""
LARGEST_NORM = 1e18
"""The square of a gradient must fit into float32."""
LARGEST_NUMBER = 1e37
"""Maximum of a step's settings."""
SAFE_NUMBER = 1e16
"""Up to it, sums of squares are far from overflowing float32."""

Matrices: TypeAlias = Callable[[Tensor], Iterable[Tensor]]
"""Returns the matrices of a vector as views; every weight is in one of them."""


class Step(NamedTuple):
    """The result of a step."""

    weights: Tensor
    moments: dict[str, Tensor]
    """By name."""
    metrics: dict[str, float]
    largest: float
    """Bound on the weights, first moments and roots of second moments; infinite if unknown."""


def take_step(
    optimizer: OptimizerConfig,
    params: OptimParams,
    weights_N: Tensor,
    gradients_N: Tensor | None,
    moments: Mapping[str, Tensor],
    steps: int,
    matrices: Matrices,
    pool: VectorPool | None = None,
    *,
    gradient_norm: float | None = None,
    largest: float = math.inf,
    is_own: bool = False,
) -> Step:
    """Compute one step, in new vectors unless the given ones may be changed.

    Args:
        optimizer: The optimizer that the adapter was created with.
        params: The settings of this step.
        weights_N: All weights, float32.
        gradients_N: The accumulated gradients; None for zeros.
        moments: From the last step; empty before the first.
        steps: Number of earlier steps.
        matrices: The matrices that the vector consists of.
        pool: Where new vectors come from; None to allocate them.
        gradient_norm: `norm_of(gradients_N)`, if known.
        largest: From the last step; infinite if unknown.
        is_own: Whether the vectors may be changed in place; they are then returned as the new ones.

    Raises:
        ValidationError: The settings are for another optimizer, or a number is not finite.
    """
    pool = VectorPool() if pool is None else pool
    family = _family(optimizer, params)
    old = _old_moments(family, moments, weights_N)
    gradients_N = torch.zeros_like(weights_N) if gradients_N is None else gradients_N
    _check_settings(params)
    norm = norm_of(gradients_N) if gradient_norm is None else gradient_norm
    scale = _clip_scale(norm, float(params.grad_clip_norm))
    largest = max(largest, norm * scale)
    is_safe = _stays_safe(params, largest, steps + 1)
    if is_own and not is_safe and family == "adamw":
        # Unknown, or grown too large: the bound grows faster than the numbers.
        largest = max(_largest(weights_N, moments), norm * scale)
        is_safe = _stays_safe(params, largest, steps + 1)
    is_in_place = is_own and is_safe
    moved_N = weights_N if is_in_place else pool.take(weights_N)
    new = old if is_in_place else {name: pool.take(one) for name, one in old.items()}
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
    # Without eps, a weight whose gradients were all 0 moves by 0 / 0.
    lacks_eps = isinstance(params, AdamParams) and params.eps == 0
    return ValidationError(
        "the step would make weights that are not finite; it was not applied",
        remedy="set eps above 0" if lacks_eps else "lower the learning rate",
    )


def _family(optimizer: OptimizerConfig, params: OptimParams) -> str:
    family = "adamw" if isinstance(params, AdamParams) else params.type
    if family != optimizer.type:
        raise ValidationError(
            f"the model was created for the optimizer {optimizer.type!r}, but the step is for "
            f"{family!r}"
        )
    if family not in MOMENTS:
        raise ValidationError(
            f"unknown optimizer {family!r}", remedy=f"use one of {', '.join(MOMENTS)}"
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
            raise ValidationError(f"the moment {name!r} does not have the size of the weights")
    return old


def _check_settings(params: OptimParams) -> None:
    names = ("learning_rate", "eps", "weight_decay") if isinstance(params, AdamParams) else ()
    for name in names or ("learning_rate",):
        value = float(getattr(params, name))
        if not 0 <= value <= LARGEST_NUMBER:
            raise ValidationError(f"{name} is {value}; it must be between 0 and {LARGEST_NUMBER:g}")
    for name in ("beta1", "beta2") if isinstance(params, AdamParams) else ("beta1",):
        if not 0 <= float(getattr(params, name)) < 1:
            raise ValidationError(
                f"{name} is {getattr(params, name)}; it must be at least 0 and below 1"
            )


def _clip_scale(norm: float, clip: float) -> float:
    if not math.isfinite(norm):
        raise ValidationError(
            "the accumulated gradients are not finite; the step was not applied",
            remedy="restart from a checkpoint, and check loss_fn_inputs for huge values",
        )
    scale = clip / norm if 0 < clip < norm else 1.0
    if norm * scale > LARGEST_NORM:
        raise ValidationError(
            f"the gradient norm of {norm:g} is too large; the step was not applied",
            remedy="set grad_clip_norm",
        )
    return scale


def norm_of(vector_N: Tensor) -> float:
    """The Euclidean norm; NaN for a vector that is not finite."""
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
    """The norms of a vector's rows, block by block. Allocates all memory up front."""

    def __init__(self, like_N: Tensor) -> None:
        self._norms_R = like_N.new_empty(-(-len(like_N) // ROW))
        self._squares_R = torch.empty_like(self._norms_R, dtype=torch.float64)

    def put(self, start: int, some_N: Tensor) -> None:
        """Add a block that starts at a row boundary."""
        row, rows = start // ROW, len(some_N) // ROW
        whole_RN = some_N[: rows * ROW].view(-1, ROW)
        torch.linalg.vector_norm(whole_RN, dim=1, out=self._norms_R[row : row + rows])
        if rows * ROW < len(some_N):
            torch.linalg.vector_norm(some_N[rows * ROW :], out=self._norms_R[row + rows])

    def root_of_squares(self) -> float:
        """The norm of the whole vector."""
        # numpy, because torch's sum depends on the number of threads.
        return math.sqrt(self._squares_R.copy_(self._norms_R).square_().cpu().numpy().sum())


def _largest(weights_N: Tensor, moments: Mapping[str, Tensor]) -> float:
    """`Step.largest` by a scan; infinite if a number is not finite or has no root."""
    found: list[float] = []
    for name, vector_N in {"weights": weights_N, **moments}.items():
        least, most = map(float, vector_N.aminmax())
        if name == SECOND:  # negative only in a corrupt checkpoint
            found.append(math.inf if least < 0 else math.sqrt(most))
        else:
            found.append(max(-least, most))
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _stays_safe(params: OptimParams, largest: float, step: int) -> bool:
    """Whether an AdamW step on numbers up to `largest` cannot overflow.

    Moments stay below the largest of themselves and the gradients, and a weight moves by at most
    lr · first / eps. That is evaluated from the left, so a large eps does not help.
    """
    if not isinstance(params, AdamParams) or params.eps < 1 / SAFE_NUMBER:
        return False
    rate = params.learning_rate / (1 - params.beta1**step)
    shrink = 1 + params.learning_rate * params.weight_decay
    return largest * (shrink + (1 + rate) / min(params.eps, 1.0)) < SAFE_NUMBER


# The optimizers


class _State(NamedTuple):
    """The state of AdamW."""

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
    """Write the state after the step, possibly in place; returns the norm of the update."""
    if params.learning_rate / (1 - params.beta1**step) > LARGEST_NUMBER:  # a beta1 next to 1
        raise _not_finite(params)
    step_number = torch.tensor(float(step), device=gradients_N.device)
    size = CACHED if gradients_N.device.type == "cpu" else len(gradients_N)
    # Allocated before anything changes: running out of memory is the only remaining failure.
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
    # If squares overflow, compute it from the whole; the step was not in place then.
    return norm if norm < math.inf else norm_of(after.weights - before.weights)


def _dimuon(params: OptimParams, moved_N: Tensor, first_N: Tensor, matrices: Matrices) -> None:
    """Move the weights along the moment."""
    for first_RC, moved_RC in zip(matrices(first_N), matrices(moved_N), strict=True):
        size = params.learning_rate * UPDATE_RMS * math.sqrt(max(first_RC.shape))
        moved_RC.add_(orthogonal(first_RC), alpha=-size)


UPDATE_RMS = 0.2
"""About the RMS of an AdamW step with learning rate 1."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Steepest at 0 among the quintic odd polynomials that keep singular values around 1."""
_NEWTON_SCHULZ_STEPS = 5
_SMALLEST_NORM = 1e-30


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values between 0.6 and 1.3.

    Singular values below about a hundredth of the largest are raised less; zero stays zero.
    """
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x: Tensor = matrix_RC.T if is_tall else matrix_RC
    # By the largest number first, so that squares of small numbers do not underflow.
    x = x / x.abs().max().clamp(min=_SMALLEST_NORM)
    x = x / torch.linalg.vector_norm(x).clamp(min=1.0)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.T if is_tall else x
