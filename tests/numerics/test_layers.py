"""The steps between the matrices give each row the same numbers whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tinsmith.engine.model.architecture import Activation
from tinsmith.engine.model.layers import gated_activation

pytestmark = pytest.mark.usefixtures("computed_by")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def forth_and_back(
    gate_up_TF: Tensor, dy_TF: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a pass without gradients and of one with them, and the inputs' gradients."""
    with torch.no_grad():
        plain_TF = gated_activation(gate_up_TF, activation)
    given_TF = gate_up_TF.clone().requires_grad_()
    made_TF = gated_activation(given_TF, activation)
    made_TF.backward(dy_TF)
    assert given_TF.grad is not None
    return plain_TF, made_TF.detach(), given_TF.grad


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [144, 1000])
def test_a_gated_row_does_not_depend_on_the_number_of_rows(
    activation: Activation, inner: int
) -> None:
    """Bit for bit, by however many threads the rows are shared out."""
    chance = torch.Generator().manual_seed(0)
    for rows in (57, 229, 513):
        gate_up_TF = torch.randn(rows, 2 * inner, generator=chance)
        dy_TF = torch.randn(rows, inner, generator=chance)
        together = forth_and_back(gate_up_TF, dy_TF, activation)

        alone = [
            forth_and_back(gate_up_TF[row : row + 1], dy_TF[row : row + 1], activation)
            for row in range(rows)
        ]

        for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts))
