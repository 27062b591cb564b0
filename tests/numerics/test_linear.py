"""Frozen linear layers give each row the same numbers whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.model.linear import Linear


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_row_is_the_same_among_few_and_many(is_packed: bool) -> None:
    """Bit for bit, forth and back, with one thread and with two that share the rows."""
    chance = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(960, 576, generator=chance), is_packed=is_packed)
    x_TI, dy_TO = (torch.randn(100, size, generator=chance) for size in (576, 960))
    y_TO, dx_TI = linear(x_TI), linear.input_gradient(dy_TO)

    for rows in range(1, 40):
        assert torch.equal(linear(x_TI[:rows]), y_TO[:rows]), rows
        assert torch.equal(linear.input_gradient(dy_TO[:rows]), dx_TI[:rows]), rows
