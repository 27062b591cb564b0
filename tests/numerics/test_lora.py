"""The factors of a linear layer: what they gather, and in which memory."""

from __future__ import annotations

import math

import pytest
import torch

from tinsmith.model.lora import Factors, FusedLora


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_what_their_memory_held(dtype: torch.dtype) -> None:
    """The first rows write over it, later ones add, and where no row came there are zeros."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(8, 12), (20, 4), (6, 4)]  # A of two parts, and their B
    a_RI, *bs_OR = (torch.randn(shape, generator=chance).to(dtype) for shape in shapes)
    x_TI, dy_TO = (torch.randn(9, size, generator=chance).to(dtype) for size in (12, 26))
    found = []

    for before in (0.0, math.nan):
        flat = torch.full((200 + 40,), before)
        trained, idle = (
            Factors(*some, 0.5, dtype) for some in ((a_RI, bs_OR), (a_RI[:4], bs_OR[1:]))
        )
        parts = flat.split([96, 80, 24, 40])
        trained.gradients = [one.view(shape) for one, shape in zip(parts, shapes, strict=False)]
        idle.gradients = [parts[3][:16].view(4, 4), parts[3][16:].view(6, 4)]
        lora = FusedLora({(0, "qkv"): trained, (1, "o"): idle}, flat)
        for rows in (slice(0, 5), slice(5, 9)):
            t_TR = trained.add_to(torch.zeros(9, 26, dtype=dtype)[rows], x_TI[rows])
            dx_TI = torch.zeros_like(x_TI[rows])
            trained.backward(dx_TI, dy_TO[rows], x_TI[rows], t_TR)
        found.append(lora.gradients().clone())

    wanted_b = dy_TO[:, 20:].float().T @ (x_TI.float() @ a_RI[4:].float().T) * 0.5
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1][176:200].view(6, 4), wanted_b, rtol=0, atol=tolerance)
    assert not found[1][200:].any()
