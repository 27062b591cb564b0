"""Factors of several adapters in one product: each comes out as it does alone, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinsmith.engine.embedded.model_loading import choose_dtypes
from tinsmith.engine.model.kernels import library
from tinsmith.engine.model.layers import FactorGroup, can_group
from tinsmith.engine.model.lora import FactorLayout, LoraFactors

pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(
        choose_dtypes("bfloat16", "cpu").computed != torch.bfloat16,
        reason="without hardware for bfloat16 nothing is computed in it",
    ),
]
INPUTS, OUTPUTS, MEMBERS = 96, (160, 64), 3


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those compute with each by itself."""
    monkeypatch.setattr(library, "kernels", lambda: None)


def _factors(rank: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> LoraFactors:
    chance = torch.Generator().manual_seed(seed)
    place = FactorLayout(0, INPUTS, OUTPUTS, rank, 32 / rank)
    flat_N = torch.randn(place.end, generator=chance)
    return LoraFactors(place, flat_N, dtype, gradients_N=torch.full_like(flat_N, torch.nan))


def _run(
    factors: LoraFactors | FactorGroup, x_TI: Tensor, y_TO: Tensor, dy_TO: Tensor
) -> list[Tensor]:
    """Forward and back, twice: the first gradients are written, others added."""
    y_TO, dx_TI = y_TO.clone(), torch.ones_like(x_TI)
    for _ in range(2):
        t_TR = factors.add_to(y_TO, x_TI)
        factors.backward(dx_TI, dy_TO, x_TI, t_TR)
    return [y_TO, dx_TI]


@pytest.mark.parametrize(
    ("rank", "rows"), [(2, 33), (2, 130), (3, 33), (8, 16), (24, 7), (32, 16), (32, 130), (128, 1)]
)
def test_each_member_gets_the_same_results_as_alone(rank: int, rows: int) -> None:
    """Outputs, the inputs' gradient and those of the factors."""
    chance = torch.Generator().manual_seed(rows)
    together, alone = ([_factors(rank, seed) for seed in range(MEMBERS)] for _ in range(2))
    x_TI, y_TO, dy_TO = (
        torch.randn(MEMBERS * rows, size, generator=chance).bfloat16()
        for size in (INPUTS, sum(OUTPUTS), sum(OUTPUTS))
    )

    found = _run(FactorGroup(together), x_TI, y_TO, dy_TO)

    parts = zip(*(one.split(rows) for one in (x_TI, y_TO, dy_TO)), strict=True)
    lone = [_run(one, *some) for one, some in zip(alone, parts, strict=True)]
    assert can_group(together[0], together[1], rows)
    for ours, theirs in zip(found, zip(*lone, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    for one, other in zip(together, alone, strict=True):
        assert all(map(torch.equal, one.gradients, other.gradients))


def test_a_member_may_have_gradients_already() -> None:
    """They are added to, where those of the others are written over."""
    chance = torch.Generator().manual_seed(0)
    x_TI, y_TO = (torch.randn(32, size, generator=chance).bfloat16() for size in (INPUTS, 224))
    first, second = _factors(8, 1), _factors(8, 2)
    _run(first, x_TI[:16], y_TO[:16], y_TO[:16])
    before = [one.clone() for one in first.gradients]

    group = FactorGroup([first, second])
    group.backward(torch.zeros_like(x_TI), y_TO, x_TI, group.inner(x_TI))

    # Twice it was gathered before, and once now.
    for had, has in zip(before, first.gradients, strict=True):
        torch.testing.assert_close(has, had * 1.5)
    assert all(bool(one.isfinite().all()) for one in second.gradients)


def test_only_factors_of_one_rank_shape_and_dtype_are_grouped() -> None:
    """Of one rank and one shape, in bfloat16, and large enough."""
    one = _factors(8, 1)
    wide, other_wide = (_factors(8, seed, torch.float32) for seed in (1, 2))

    assert can_group(one, _factors(8, 2), 16)
    assert not can_group(one, _factors(16, 2), 16)
    assert not can_group(one, _factors(8, 2), 8)
    assert not can_group(_factors(1, 1), _factors(1, 2), 1000)
    assert not can_group(wide, other_wide, 16)


def test_factors_that_kernels_handle_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    one, other = _factors(8, 1), _factors(8, 2)

    assert can_group(one, other, 16) == (one.kernel_lora is None)
