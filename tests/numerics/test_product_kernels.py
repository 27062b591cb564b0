"""Kernels that multiply: with frozen weights, and with adapters in both directions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.numerics.kernel_cases import close, near, noise
from tinsmith.engine.model.kernels.library import Kernels
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.lora import FactorLayout, LoraFactors


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 16, 32),
        (3, 112, 64),
        (5, 1, 8),
        (9, 24, 34),
        (20, 50, 96),
        (8, 48, 96),
        (33, 80, 2080),
        (130, 64, 4128),
        (261, 192, 64),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_match_the_weights(
    products: Kernels, rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    """One row and more than a block, panels of one to three vectors, inputs of several strips."""
    weight_OI = noise(outputs, inputs, dtype=torch.bfloat16, size=inputs**-0.5)
    x_TI, bias_O = (
        noise(*shape, dtype=torch.bfloat16, seed=2) for shape in ((rows, inputs), (outputs,))
    )
    wanted_TO = x_TI.double() @ weight_OI.double().T + (bias_O.double() if has_bias else 0.0)

    prepacked = products.prepack(weight_OI)
    found_TO = products.matmul(x_TI, prepacked, outputs, bias_O if has_bias else None)

    close(found_TO, wanted_TO)
    for row in range(rows):
        alone_TO = products.matmul(
            x_TI[row : row + 1], prepacked, outputs, bias_O if has_bias else None
        )
        assert torch.equal(alone_TO[0], found_TO[row])


def _factors(inputs: int, outputs: tuple[int, ...], rank: int, scale: float) -> LoraFactors:
    """With gradients that mean nothing yet."""
    place = FactorLayout(3, inputs, outputs, rank, scale)
    flat_N = noise(place.end, dtype=torch.float32, seed=5)
    gradients_N = torch.full_like(flat_N, math.nan)
    return LoraFactors(place, flat_N, torch.bfloat16, gradients_N=gradients_N)


_FACTOR_SHAPES = [
    *((576, (576, 192, 192), 32), (64, (300, 20), 8), (6, (50,), 2), (2, (2,), 2)),
    *((96, (4096,), 12), (4096, (64,), 64), (1536, (576,), 130)),
]
"""Panels of one to three vectors, outputs of several blocks, inputs of several strips."""


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("inputs", "outputs", "rank"), _FACTOR_SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 131])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_trainable_factors_give_the_same_output_as_frozen_ones(
    inputs: int, outputs: tuple[int, ...], rank: int, rows: int, scale: float
) -> None:
    """To the last bit, and in a part of the rows' columns alone."""
    factors, frozen = (_factors(inputs, outputs, rank, scale) for _ in range(2))
    frozen.freeze()
    x_TI = noise(rows, inputs, dtype=torch.bfloat16)
    y_TO = noise(rows, sum(outputs) + 5, dtype=torch.bfloat16, seed=3)
    wanted_TO = y_TO.clone()

    t_TR = factors.add_to(y_TO[:, 2:-3], x_TI)
    wanted_TR = frozen.add_to(wanted_TO[:, 2:-3], x_TI)

    assert factors.kernel_lora is not None
    assert torch.equal(y_TO, wanted_TO)
    assert torch.equal(t_TR, wanted_TR * scale)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("inputs", "outputs", "rank"), _FACTOR_SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 131, 3000])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_the_backward_of_factors_matches_the_formula(
    inputs: int, outputs: tuple[int, ...], rank: int, rows: int, scale: float
) -> None:
    """The inputs' gradient is added to; the factors' are written first, and then added to."""
    factors = _factors(inputs, outputs, rank, scale)
    a_RI, *bs_OR = (one.bfloat16().double() for one in factors.held)
    given_TO = noise(rows, sum(outputs) + 5, dtype=torch.bfloat16, seed=3)
    x_TI, dx_TI = (noise(rows, inputs, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    dy_TO, t_TR = given_TO[:, 2:-3], (scale * (x_TI.double() @ a_RI.T)).bfloat16()
    dys, ts = dy_TO.double().split(outputs, -1), t_TR.double().split(rank, -1)
    dt_TR = scale * torch.cat([dy @ b_OR for dy, b_OR in zip(dys, bs_OR, strict=True)], -1)
    dt_TR = dt_TR.bfloat16().double()
    wanted = [dt_TR.T @ x_TI.double(), *(dy.T @ t for dy, t in zip(dys, ts, strict=True))]
    wanted_TI = dx_TI.double() + dt_TR @ a_RI

    factors.backward(dx_TI, dy_TO, x_TI, t_TR)
    once = [one.clone() for one in factors.gradients]
    factors.backward(torch.zeros_like(dx_TI), dy_TO, x_TI, t_TR)

    for found, formula in zip([dx_TI, *once], [wanted_TI, *wanted], strict=True):
        near(found, formula)
    for one, two in zip(once, factors.gradients, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-6 * float(two.abs().max()))


@pytest.mark.usefixtures("products", "threads")
def test_factors_do_not_depend_on_the_number_of_threads() -> None:
    """In products so large that threads share them."""
    x_TI, dy_TO = (noise(1031, n, dtype=torch.bfloat16, seed=n) for n in (512, 1040))

    def run() -> list[Tensor]:
        factors = _factors(512, (600, 440), 32, 1.0)
        y_TO, dx_TI = torch.zeros_like(dy_TO), torch.zeros_like(x_TI)
        t_TR = factors.add_to(y_TO, x_TI)
        factors.backward(dx_TI, dy_TO, x_TI, t_TR)
        return [y_TO, dx_TI, *factors.gradients]

    found = run()
    torch.set_num_threads(1)

    assert all(map(torch.equal, found, run()))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("outputs", [(7,), (64, 33)])
def test_the_backward_of_an_odd_number_of_outputs_falls_back_to_pytorch(
    outputs: tuple[int, ...],
) -> None:
    """As a vocabulary may have."""
    factors = _factors(64, outputs, 8, 1.0)
    x_TI, dx_TI = (noise(9, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    y_TO = noise(9, sum(outputs), dtype=torch.bfloat16)

    t_TR = factors.add_to(y_TO.clone(), x_TI)
    factors.backward(dx_TI, y_TO, x_TI, t_TR)

    rights = [x_TI, *t_TR.split(8, -1)]
    b_slopes = [y.T @ t for y, t in zip(y_TO.split(outputs, -1), rights[1:], strict=True)]
    for found, wanted in zip(factors.gradients[1:], b_slopes, strict=True):
        near(found, wanted.double())


@pytest.mark.usefixtures("products")
def test_factors_accept_non_contiguous_rows() -> None:
    """Code of `transformers` may hand on a view in which inputs do not lie beside each other."""
    factors = _factors(64, (48,), 8, 1.0)
    x_TI, dy_TO = (noise(5, n, dtype=torch.bfloat16, seed=n) for n in (64, 48))

    def run(x_TI: Tensor, dy_TO: Tensor) -> list[Tensor]:
        y_TO, dx_TI = torch.zeros(5, 48).bfloat16(), torch.zeros(5, 64).bfloat16()
        factors.has_gradients = False
        t_TR = factors.add_to(y_TO, x_TI)
        factors.backward(dx_TI, dy_TO, x_TI, t_TR)
        return [y_TO, dx_TI, *(one.clone() for one in factors.gradients)]

    across = run(x_TI.T.contiguous().T, dy_TO.T.contiguous().T)

    assert all(map(torch.equal, across, run(x_TI, dy_TO)))


def test_scratch_memory_of_factors_does_not_grow_with_the_row_width(products: Kernels) -> None:
    """A thread keeps it, and the rows of one long text may be many."""
    place = FactorLayout(0, 4096, (64,), 8, 1.0)

    rooms = [products._library.lora_scratch(place.for_kernels, rows) for rows in (10_000, 20_000)]

    assert rooms[1] - rooms[0] <= 10_000 * 16, "more than the inner numbers of each row"


@pytest.mark.usefixtures("products")
def test_empty_input_has_zero_gradients() -> None:
    """And not what was left in memory, even if nothing else is gathered."""
    factors = _factors(96, (64, 32), 8, 1.0)
    x_TI, y_TO = (torch.empty(0, n, dtype=torch.bfloat16) for n in (96, 96))

    t_TR = factors.add_to(y_TO, x_TI)
    factors.backward(torch.empty_like(x_TI), y_TO, x_TI, t_TR)

    factors.clear_unwritten()
    assert all(not one.any() for one in factors.gradients)


@pytest.mark.usefixtures("products")
def test_rows_of_another_dtype_than_the_weights_are_rejected() -> None:
    linear = Linear(noise(64, 64, dtype=torch.bfloat16))

    with pytest.raises(RuntimeError, match="dtype"):
        linear(torch.ones(2, 64))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("inputs", [62, 128])
def test_rows_of_another_length_than_the_weights_are_rejected(inputs: int) -> None:
    """Kernels would read beyond one of them."""
    linear = Linear(noise(64, 64, dtype=torch.bfloat16))

    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.ones(2, inputs).bfloat16())
