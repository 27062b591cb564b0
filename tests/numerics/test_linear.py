"""Frozen linear layers give each row the same numbers whatever rows are beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tinsmith.engine.model.linear import Linear, can_prepack


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        *((kind, outputs, 576) for kind in ("packed", "widened") for outputs in (1, 960, 4001)),
        ("plain", 960, 576),
        ("packed", 576, 1536),
        ("widened", 576, 1536),
        *(("bfloat16", 576, inputs) for inputs in (576, 1536, 8192)),
    ],
)
def test_a_row_does_not_depend_on_the_number_of_rows(kind: str, outputs: int, inputs: int) -> None:
    """Bit for bit, forth and back, with one thread and with two that share the rows."""
    chance = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(outputs, inputs, generator=chance)
    computed = torch.bfloat16 if kind == "bfloat16" else torch.float32
    if kind == "bfloat16" and not can_prepack(weight_OI.to(computed)):
        pytest.skip("without hardware for bfloat16 nothing is computed in it")
    if kind == "widened":
        linear = Linear(weight_OI.to(torch.bfloat16), dtype=computed)
    else:
        linear = Linear(weight_OI.to(computed), is_prepacked=kind != "plain")
    x_TI, dy_TO = (
        torch.randn(300, size, generator=chance).to(computed) for size in (inputs, outputs)
    )
    y_TO, many_TO, dx_TI = linear(x_TI), linear.for_many_rows(x_TI), linear.input_gradient(dy_TO)

    for rows in (*range(1, 40), 63, 127, 200):
        assert torch.equal(linear(x_TI[:rows]), y_TO[:rows]), rows
        assert torch.equal(linear.for_many_rows(x_TI[:rows]), many_TO[:rows]), rows
        assert torch.equal(linear.input_gradient(dy_TO[:rows]), dx_TI[:rows]), rows
    for row in range(100):
        assert torch.equal(linear(x_TI[row : row + 1]), y_TO[row : row + 1]), row


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [3, 64, 130, 1000, 4001])
def test_widened_weights_give_the_same_results_as_plain_ones(outputs: int, bias: bool) -> None:
    """One block or several, of equal outputs or not; forth and back."""
    chance = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(outputs, 576, generator=chance).to(torch.bfloat16)
    bias_O = torch.randn(outputs, generator=chance) if bias else None
    x_TI, dy_TO = (torch.randn(9, size, generator=chance) for size in (576, outputs))
    plain = Linear(weight_OI.float(), bias_O, is_prepacked=False)

    linear = Linear(weight_OI, bias_O, dtype=torch.float32)

    torch.testing.assert_close(linear(x_TI), plain(x_TI), rtol=1e-5, atol=1e-4)
    found, wanted = (one.input_gradient(dy_TO) for one in (linear, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sides", [(128, 128), (96, 576), (576, 16), (16, 576), (1, 576), (576, 1)])
def test_a_row_is_the_same_with_small_or_narrow_weights(
    sides: tuple[int, int],
) -> None:
    """Bit for bit, wherever it lies, whether or not such weights are packed."""
    chance = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(sides, generator=chance))
    x_TI = torch.randn(300, sides[1], generator=chance)
    y_TO = linear(x_TI)

    for rows in (*range(1, 40), 127, 128, 200):
        assert torch.equal(linear(x_TI[:rows]), y_TO[:rows]), rows
        assert torch.equal(linear(x_TI[7 : 7 + rows]), y_TO[7 : 7 + rows]), rows


@pytest.mark.parametrize("held_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sides", [(21, 18), (65, 33), (577, 51)])
def test_a_row_is_the_same_with_many_threads_and_uneven_sizes(
    sides: tuple[int, int], held_in: torch.dtype
) -> None:
    """As the factors of an adapter have whose rank is uneven, for samples and for passes."""
    chance = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(sides, generator=chance).to(held_in)
    linear = Linear(weight_OI, dtype=torch.float32)
    x_TI = torch.randn(140, sides[1], generator=chance)
    before = torch.get_num_threads()

    try:
        torch.set_num_threads(4)
        for product in (linear, linear.for_many_rows):
            y_TO = product(x_TI)
            for rows in (1, 2, 3, 5, 8, 17, 33, 65, 97):
                assert torch.equal(product(x_TI[7 : 7 + rows]), y_TO[7 : 7 + rows]), rows
    finally:
        torch.set_num_threads(before)


def test_widened_weights_serve_inference_mode_and_autograd_on_one_thread() -> None:
    """The buffer may be written in either mode, whichever came first on a thread."""
    linear = Linear(torch.ones(130, 576, dtype=torch.bfloat16), dtype=torch.float32)
    x_TI = torch.ones(4, 576)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            sampled_TO = linear(x_TI)
        return sampled_TO, linear(x_TI)

    with ThreadPoolExecutor(1) as fresh_thread:
        sampled_TO, passed_TO = fresh_thread.submit(both).result()

    assert torch.equal(sampled_TO, passed_TO)
