"""Steps of the optimizers: AdamW against torch's, Dimuon against singular values, both exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinsmith.engine.model.optimizer import Step, orthogonal, take_step
from tinsmith.errors import ValidationError
from tinsmith.types.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    OptimizerConfig,
    OptimizerConfigBase,
    OptimParams,
    OptimParamsBase,
)

ADAM, DIMUON = AdamOptimizerConfig(), DimuonOptimizerConfig()
SHAPES = [(4, 40), (24, 4), (4, 4)]
SIZE = sum(rows * columns for rows, columns in SHAPES)


def matrices(flat: Tensor) -> Iterable[Tensor]:
    start = 0
    for rows, columns in SHAPES:
        yield flat[start : start + rows * columns].view(rows, columns)
        start += rows * columns


def some(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def run(optimizer: OptimizerConfig, params: OptimParams, steps: int = 3) -> Step:
    """Some steps from the same start along the same gradients."""
    found = Step(some(0), {}, {}, math.inf)
    for number in range(steps):
        gradients = some(number + 1)
        found = take_step(
            optimizer, params, found.weights, gradients, found.moments, number, matrices
        )
    return found


def state(step: Step) -> list[Tensor]:
    return [step.weights, *step.moments.values()]


# AdamW


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=1e-2),
        AdamParams(learning_rate=3e-3, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-8),
        AdamParams(learning_rate=1e-1, beta1=0.0, beta2=0.999, grad_clip_norm=1e6),
        AdamParams(learning_rate=0.0, weight_decay=0.5),
    ],
)
def test_adamw_matches_torch(params: AdamParams) -> None:
    """Over 20 steps, with clipping as `clip_grad_norm_` does it."""
    theirs = torch.nn.Parameter(some(0))
    optimizer = torch.optim.AdamW(
        [theirs],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    ours = Step(some(0), {}, {}, math.inf)

    for number in range(20):
        gradients = some(number + 1) * 10 ** (number % 4 - 2)
        theirs.grad = gradients.clone()
        if params.grad_clip_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_([theirs], params.grad_clip_norm)
        else:
            norm = gradients.norm()
        optimizer.step()
        ours = take_step(ADAM, params, ours.weights, gradients, ours.moments, number, matrices)
        assert ours.metrics["tinsmith/grad_norm"] == pytest.approx(float(norm), rel=1e-5)

    kept = optimizer.state[theirs]
    # Torch divides by the norm and a millionth more, so that clipped gradients differ by that.
    torch.testing.assert_close(ours.weights, theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.moments["first"], kept["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.moments["second"], kept["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_a_step_without_gradients_follows_the_moments() -> None:
    params = AdamParams(learning_rate=0.1)
    before = run(ADAM, params, steps=1)
    moments = {name: one.clone() for name, one in before.moments.items()}

    nothing = take_step(ADAM, params, before.weights, None, before.moments, 1, matrices)
    zeros = take_step(ADAM, params, before.weights, torch.zeros(SIZE), moments, 1, matrices)

    assert not torch.equal(nothing.weights, before.weights)
    assert all(map(torch.equal, state(nothing), state(zeros)))


def test_metrics_report_the_gradient_norm_and_the_update_norm() -> None:
    params = AdamParams(learning_rate=0.25, grad_clip_norm=0.1)

    step = run(ADAM, params, steps=1)

    assert step.metrics == {
        "tinsmith/grad_norm": pytest.approx(float(some(1).norm()), rel=1e-6),
        "tinsmith/update_norm": pytest.approx(float((step.weights - some(0)).norm()), rel=1e-6),
        "tinsmith/learning_rate": 0.25,
        "tinsmith/step": 1.0,
    }


# Dimuon


@pytest.mark.parametrize("shape", [(4, 300), (300, 4), (16, 16), (1, 7), (7, 1)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_orthogonalization_keeps_singular_vectors_and_equalizes_singular_values(
    shape: tuple[int, int], size: float
) -> None:
    matrix = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    u, vt = u[:, s > 0.05 * s[0]], vt[s > 0.05 * s[0]]

    found = orthogonal(matrix).double()

    inner = u.T @ found @ vt.T
    off = inner - torch.diag(inner.diagonal())
    assert found.shape == shape
    assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3
    assert off.abs().max() < 1e-3


def test_orthogonalizing_zero_gives_zero() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_dimuon_steps_each_matrix_along_its_momentum() -> None:
    params = DimuonParams(learning_rate=0.1, beta1=0.8)
    momentum = 0.0 * some(0)
    for number in range(3):
        momentum = 0.8 * momentum + 0.2 * some(number + 1)
    before, after = run(DIMUON, params, steps=2), run(DIMUON, params, steps=3)

    torch.testing.assert_close(after.moments["first"], momentum)
    moved = (after.weights - before.weights).clone()
    for matrix, along in zip(matrices(moved), matrices(momentum), strict=True):
        expected = -0.1 * 0.2 * math.sqrt(max(matrix.shape)) * orthogonal(along)
        torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-5)


def test_a_matrix_without_gradient_is_unchanged_by_dimuon() -> None:
    """As A, as long as B is zero."""
    gradients = some(1)
    next(iter(matrices(gradients))).zero_()

    step = take_step(DIMUON, DimuonParams(learning_rate=1.0), some(0), gradients, {}, 0, matrices)

    first, *others = matrices(step.weights - some(0))
    assert not first.any() and all(bool(one.any()) for one in others)


def test_an_update_of_dimuon_is_about_as_large_as_one_of_adamw() -> None:
    adam = run(ADAM, AdamParams(learning_rate=0.01), steps=5).metrics["tinsmith/update_norm"]
    dimuon = run(DIMUON, DimuonParams(learning_rate=0.01), steps=5).metrics["tinsmith/update_norm"]

    assert 0.1 < dimuon / adam < 2


# Both

CASES: list[tuple[OptimizerConfig, OptimParams]] = [
    (ADAM, AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=1.0)),
    (DIMUON, DimuonParams(learning_rate=0.1, grad_clip_norm=1.0)),
]


@pytest.mark.parametrize(("optimizer", "params"), CASES)
def test_a_gradient_above_the_clip_norm_is_scaled_down_to_it(
    optimizer: OptimizerConfig, params: OptimParams
) -> None:
    long = 1e3 * some(1)
    short = long / long.double().norm().float()

    one, other = (
        take_step(optimizer, params, some(0), gradients, {}, 0, matrices)
        for gradients in (long, short)
    )

    torch.testing.assert_close(state(one), state(other), rtol=1e-4, atol=1e-6)
    assert one.moments["first"].norm() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(("optimizer", "params"), CASES)
def test_a_step_does_not_modify_its_inputs(optimizer: OptimizerConfig, params: OptimParams) -> None:
    before, same, gradients = run(optimizer, params), run(optimizer, params), some(5)

    step = take_step(optimizer, params, before.weights, gradients, before.moments, 3, matrices)

    assert not any(map(torch.equal, state(step), state(before)))
    assert all(map(torch.equal, state(before), state(same)))
    assert torch.equal(gradients, some(5))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_in_place_steps_equal_out_of_place_steps(clip: float) -> None:
    """Bit for bit, from the first on."""
    size = 300_007
    params = AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=clip)
    own, other = (Step(some(0, size), {}, {}, math.inf) for _ in range(2))

    for number in range(4):
        gradients, before = some(number + 1, size), own.weights
        other = take_step(ADAM, params, other.weights, gradients, other.moments, number, matrices)
        own = take_step(
            *(ADAM, params, own.weights, gradients, own.moments, number, matrices),
            largest=own.largest,
            is_own=True,
        )

        assert own.weights is before
        assert all(map(torch.equal, state(own), state(other)))
        assert own.metrics == other.metrics
        assert own.largest >= float(own.weights.abs().max())
        assert own.largest >= float(own.moments["second"].max().sqrt())


@pytest.mark.parametrize("largest", [4.0, math.inf])
@pytest.mark.parametrize(
    ("params", "size"),
    [
        (AdamParams(eps=0.0), 1.0),  # weights that had no gradient yet are 0 / 0
        (AdamParams(learning_rate=1e30), 1.0),
        (AdamParams(), 1e10),  # over eps, which is 1e-12
        # Before it is divided by eps, the rate times the moment is 1e29.
        (AdamParams(learning_rate=1e13, beta1=0.9999999999999999, eps=1e32), 1.0),
    ],
)
def test_a_step_that_might_overflow_is_not_done_in_place(
    params: AdamParams, size: float, largest: float
) -> None:
    weights, moments = some(0), {"first": some(3) * size, "second": some(4).abs()}

    step = take_step(
        *(ADAM, params, weights, some(1), moments, 1, matrices), largest=largest * size, is_own=True
    )

    assert torch.equal(weights, some(0)) and torch.equal(moments["first"], some(3) * size)
    assert not torch.equal(step.weights, weights)
    assert step.largest == math.inf


@pytest.mark.parametrize(
    ("name", "odd"),
    [("weights", math.nan), ("first", math.nan), ("second", math.nan), ("second", -1.0)],
)
def test_a_step_that_must_fail_is_not_done_in_place(name: str, odd: float) -> None:
    """However such numbers came there: it fails, and nothing is as it was not before."""
    before = {"weights": some(0), "first": some(3), "second": some(4).abs()}
    before[name][5] = odd
    given = {key: one.clone() for key, one in before.items()}
    moments = {key: given[key] for key in ("first", "second")}

    with pytest.raises(ValidationError, match="not finite"):
        take_step(
            *(ADAM, AdamParams(), given["weights"], some(1), moments, 1, matrices), is_own=True
        )

    for key, one in before.items():
        torch.testing.assert_close(given[key], one, rtol=0, atol=0, equal_nan=True)


def test_the_error_of_a_step_that_fails_without_eps_says_so() -> None:
    zeros = torch.zeros_like(some(0))
    moments = {"first": zeros, "second": zeros.clone()}

    with pytest.raises(ValidationError, match="set eps above 0"):
        take_step(ADAM, AdamParams(eps=0.0), some(0), zeros.clone(), moments, 0, matrices)


def test_a_weight_bound_that_has_grown_too_large_is_recomputed() -> None:
    """It grows with every step, by more than the numbers may: else long runs would end slower."""
    weights, moments = some(0), {"first": some(3), "second": some(4).abs()}

    step = take_step(
        *(ADAM, AdamParams(), weights, some(1), moments, 1, matrices), largest=1e9, is_own=True
    )

    assert step.weights is weights
    assert float(weights.abs().max()) <= step.largest < 100


class _NoMemory(TorchDispatchMode):
    """Nothing more is to be had from the first part of a step on."""

    has_begun = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = {
            one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if _is(one)
        }
        taken = {one.untyped_storage().data_ptr() for one in tree_leaves(made) if _is(one)}
        if self.has_begun and not taken <= given:
            raise MemoryError(f"{func} takes some")
        self.has_begun = self.has_begun or "_fused_adamw_" in str(func)
        return made


def _is(one: object) -> bool:
    return isinstance(one, Tensor)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_an_in_place_step_allocates_all_memory_before_it_changes_anything(clip: float) -> None:
    """One that ran out of it half-way could not be taken back."""
    size = 300_007
    weights, moments = some(0, size), {"first": some(3, size), "second": some(4, size).abs()}
    params = AdamParams(learning_rate=0.1, grad_clip_norm=clip)
    given = (ADAM, params, weights, some(1, size), moments, 1, matrices)

    with _NoMemory() as no_memory:  # type: ignore[no-untyped-call]
        step = take_step(*given, largest=8.0, is_own=True)

    assert no_memory.has_begun and step.weights is weights


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1.0, 1e15])
def test_norms_of_tiny_and_huge_gradients_are_exact(size: float) -> None:
    gradients = some(1, 5000) * size
    params = AdamParams(learning_rate=0.1)

    step = take_step(ADAM, params, some(0, 5000), gradients.clone(), {}, 0, matrices)

    assert step.metrics["tinsmith/grad_norm"] == pytest.approx(
        float(gradients.double().norm()), rel=1e-6
    )


def test_the_number_of_threads_changes_no_bit() -> None:
    size = 300_007
    params = AdamParams(learning_rate=0.1, grad_clip_norm=1.0)
    threads = torch.get_num_threads()
    found = []

    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(take_step(ADAM, params, some(0, size), some(1, size), {}, 0, matrices))
    finally:
        torch.set_num_threads(threads)

    for other in found[1:]:
        assert all(map(torch.equal, state(found[0]), state(other)))
        assert other.metrics == found[0].metrics


@pytest.mark.parametrize(("optimizer", "params"), CASES)
def test_training_continues_identically_from_saved_moments(
    optimizer: OptimizerConfig, params: OptimParams
) -> None:
    half = run(optimizer, params, steps=2)
    loaded = {name: torch.tensor(one.tolist()) for name, one in half.moments.items()}

    went_on = take_step(optimizer, params, half.weights.clone(), some(3), loaded, 2, matrices)

    assert all(map(torch.equal, state(went_on), state(run(optimizer, params, steps=3))))


def spoilt(value: float) -> Tensor:
    gradients = some(5)
    gradients[17] = value
    return gradients


@pytest.mark.parametrize(("optimizer", "params"), CASES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_fail_the_step_and_change_nothing(
    optimizer: OptimizerConfig, params: OptimParams, value: float
) -> None:
    before, same = run(optimizer, params), run(optimizer, params)

    with pytest.raises(ValidationError, match="not finite"):
        take_step(optimizer, params, before.weights, spoilt(value), before.moments, 3, matrices)

    assert all(map(torch.equal, state(before), state(same)))


@pytest.mark.parametrize(
    ("optimizer", "params", "gradients", "match"),
    [
        (ADAM, AdamParams(), spoilt(1e20), "too large"),
        (ADAM, AdamParams(learning_rate=1e36, beta1=0.9999999), None, "lower the learning rate"),
        (ADAM, AdamParams(learning_rate=1e300), None, "learning_rate"),
        (ADAM, AdamParams(eps=1e300), None, "eps"),
        (ADAM, AdamParams(weight_decay=1e37, learning_rate=1e37), None, "lower the learning rate"),
        (ADAM, AdamParams(beta1=1.0), None, "beta1"),
        (DIMUON, DimuonParams(learning_rate=1e300), None, "learning_rate"),
        (ADAM, DimuonParams(learning_rate=1.0), None, "'adamw'"),
        (DIMUON, AdamParams(), None, "'dimuon'"),
        (
            OptimizerConfigBase(type="mine"),
            OptimParamsBase(type="mine", learning_rate=1.0),
            None,
            "unknown optimizer 'mine'",
        ),
    ],
)
def test_a_step_that_cannot_be_taken_changes_nothing(
    optimizer: OptimizerConfig, params: OptimParams, gradients: Tensor | None, match: str
) -> None:
    moments = {"first": some(3), "second": some(4).abs()}
    kept: dict[str, Any] = {name: one.clone() for name, one in moments.items()}
    weights = some(0)
    given = some(1) if gradients is None else gradients

    with pytest.raises(ValidationError, match=match):
        take_step(
            *(optimizer, params, weights, given, moments, 1, matrices), largest=4.0, is_own=True
        )

    assert torch.equal(weights, some(0))
    assert all(torch.equal(moments[name], kept[name]) for name in moments)


@pytest.mark.parametrize(("optimizer", "params"), CASES)
def test_a_step_to_weights_that_are_not_finite_is_rejected(
    optimizer: OptimizerConfig, params: OptimParams
) -> None:
    moments = {"first": some(3), "second": some(4).abs()}
    weights = some(0)
    weights[3] = math.inf

    with pytest.raises(ValidationError, match="weights that are not finite"):
        take_step(optimizer, params, weights, some(1), moments, 1, matrices)

    assert torch.equal(moments["first"], some(3))


def test_moments_of_another_size_are_rejected() -> None:
    with pytest.raises(ValidationError, match="'first'"):
        take_step(ADAM, AdamParams(), some(0), some(1), {"first": some(1, 5)}, 1, matrices)


def test_a_huge_gradient_may_be_clipped() -> None:
    params = AdamParams(learning_rate=0.1, grad_clip_norm=1.0)

    step = take_step(ADAM, params, some(0), spoilt(1e30), {}, 0, matrices)

    assert step.metrics["tinsmith/grad_norm"] == pytest.approx(1e30)
    assert all(bool(one.isfinite().all()) for one in state(step))
