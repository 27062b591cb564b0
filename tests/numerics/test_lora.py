"""The factors of a linear layer: what they gather, and in which memory."""

from __future__ import annotations

import math

import pytest
import torch

from tinsmith.engine.model.architecture import Architecture, LayerShape
from tinsmith.engine.model.lora import FactorLayout, FusedLora, LoraFactors, LoraLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_uninitialized_memory(dtype: torch.dtype) -> None:
    """The first rows write over it, later ones add, and where no row came there are zeros."""
    chance = torch.Generator().manual_seed(0)
    place = FactorLayout(0, 12, [20, 6], 4, 0.5)
    idle_place = FactorLayout(place.end, 4, [6], 4, 0.5)
    flat_N = torch.randn(idle_place.end, generator=chance)
    x_TI, dy_TO = (torch.randn(9, size, generator=chance).to(dtype) for size in (12, 26))
    found = []

    for before in (0.0, math.nan):
        gradients_N = torch.full_like(flat_N, before)
        trained, idle = (
            LoraFactors(one, flat_N, dtype, gradients_N=gradients_N) for one in (place, idle_place)
        )
        lora = FusedLora({(0, "qkv"): trained, (1, "o"): idle}, gradients_N)
        for rows in (slice(0, 5), slice(5, 9)):
            t_TR = trained.add_to(torch.zeros(9, 26, dtype=dtype)[rows], x_TI[rows])
            dx_TI = torch.zeros_like(x_TI[rows])
            trained.backward(dx_TI, dy_TO[rows], x_TI[rows], t_TR)
        found.append(lora.gradients().clone())

    a_RI, *_ = place.views(flat_N)
    wanted_b = dy_TO[:, 20:].float().T @ (x_TI.float() @ a_RI[4:].T) * 0.5
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(place.views(found[1])[2], wanted_b, rtol=0, atol=tolerance)
    assert not found[1][place.end :].any()


def test_vectors_of_another_layout_are_rejected() -> None:
    """Kernels would write behind the shorter, and take halves for numbers."""
    shape = Architecture(
        name="test",
        vocabulary=8,
        hidden=64,
        inner=32,
        heads=2,
        kv_heads=2,
        head_size=32,
        max_context=64,
        layers=(LayerShape(),),
        ropes=(),
        norm_epsilon=1e-5,
    )
    layout = LoraLayout(shape, 4, attention=True, mlp=True, unembed=True)
    flat_N = torch.zeros(layout.size)

    layout.fused(flat_N, torch.bfloat16, gradients=flat_N.clone())
    for flat, gradients in (
        (flat_N[1:], None),
        (flat_N, flat_N[1:]),
        (flat_N, flat_N.bfloat16()),
        (flat_N, torch.zeros(2 * layout.size)[::2]),
    ):
        with pytest.raises(AssertionError):
            layout.fused(flat, torch.bfloat16, gradients=gradients)
