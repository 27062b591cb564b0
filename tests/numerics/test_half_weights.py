"""Weights that were published in sixteen bits: float32 is what is computed, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.sample_works import logprobs_of, prompt_of, run, work
from tests.numerics.small_models import make_model
from tinsmith.engine.embedded.batched_sampler import BatchedSampler
from tinsmith.engine.model import linear
from tinsmith.engine.model.linear import BLOCK_OUTPUTS, Linear, try_halve
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer

pytestmark = pytest.mark.skipif(
    try_halve(torch.ones(1, 1)) is None, reason="this machine has no kernel for them"
)


def _published(outputs: int, inputs: int, size: float = 1.0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(outputs)
    return (torch.randn(outputs, inputs, generator=chance) * size).bfloat16().float()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("sides", [(960, 576), (17, 33), (1, 600), (BLOCK_OUTPUTS + 4, 96)])
def test_a_row_does_not_depend_on_the_number_of_rows(sides: tuple[int, int], threads: int) -> None:
    """Bit for bit, wherever it lies, with any number of rows that the kernel parts in its way."""
    half = try_halve(_published(*sides))
    assert half is not None
    x_TI = torch.randn(300, sides[1], generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()

    try:
        torch.set_num_threads(threads)
        y_TO = half(x_TI)
        for rows in (0, *range(1, 60), 61, 62, 110, 119, 120, 121, 122, 127, 134, 241, 272):
            assert torch.equal(half(x_TI[:rows]), y_TO[:rows]), rows
            assert torch.equal(half(x_TI[7 : 7 + rows]), y_TO[7 : 7 + rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-3, 1e5])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_as_accurate_as_float32_sums(size: float, bias: bool) -> None:
    """Of weights of any size: those that are small or large are scaled by a power of two."""
    weight_OI = _published(700, 576, size)
    weight_OI[3, 5] = size * 2.0**-60
    bias_O = torch.randn(700) * size if bias else None
    x_TI = torch.randn(9, 576)
    wanted_TO = x_TI.double() @ weight_OI.double().T
    wanted_TO = wanted_TO if bias_O is None else wanted_TO + bias_O.double()

    frozen = Linear(weight_OI, bias_O)

    assert frozen._half is not None
    for found_TO in (frozen(x_TI), frozen.for_many_rows(x_TI)):
        torch.testing.assert_close(found_TO.double() / size, wanted_TO / size, rtol=0, atol=2e-4)


def test_a_single_weight_is_reproduced_exactly() -> None:
    """Nothing is rounded down to a thirty-thousandth of a millionth of the largest."""
    weight_OI = torch.tensor([2.0**-power for power in range(29)]).repeat(64, 1) * 1.9921875
    half = try_halve(weight_OI)
    assert half is not None

    found_OI = half(torch.eye(29)).T

    assert torch.equal(found_OI, weight_OI)


@pytest.mark.parametrize("odd", [1.0 + 2.0**-20, float("nan"), float("inf")])
def test_weights_that_would_lose_precision_are_not_halved(odd: float) -> None:
    """One of them is enough."""
    weight_OI = _published(700, 576)
    weight_OI[3, 5] = odd

    assert try_halve(weight_OI) is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [3, BLOCK_OUTPUTS])
def test_weights_that_are_not_finite_are_not_halved(odd: float, row: int) -> None:
    """Wherever they are, and though float16 has them too: what is infinite would come out 65504."""
    weight_OI = _published(BLOCK_OUTPUTS + 1, 16).half().float()
    weight_OI[row, 5] = odd

    assert try_halve(weight_OI) is None


def test_another_quantized_engine_of_torch_is_tolerated() -> None:
    """One that packs nothing: what is loaded then does without, and what is there goes on."""
    weight_OI, x_TI = _published(700, 576), torch.randn(9, 576)
    half, before = try_halve(weight_OI), torch.backends.quantized.engine
    assert half is not None
    wanted_TO = half(x_TI)

    try:
        torch.backends.quantized.engine = "onednn"
        frozen = Linear(weight_OI)
        found_TO = half(x_TI)
    finally:
        torch.backends.quantized.engine = before

    assert frozen._half is None
    assert torch.equal(found_TO, wanted_TO)
    torch.testing.assert_close(frozen(x_TI), wanted_TO, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("inputs", "is_half"), [(32, False), (255, False), (256, True)])
def test_narrow_weights_are_not_halved(inputs: int, is_half: bool) -> None:
    """They would take more memory than they do in float32."""
    assert (Linear(_published(5000, inputs))._half is not None) == is_half


def test_a_row_that_is_not_finite_affects_no_other() -> None:
    """Neither as the first, which fills up others, nor as the last."""
    half = try_halve(_published(700, 576))
    assert half is not None
    x_TI = torch.randn(7, 576)
    y_TO = half(x_TI)

    for row in range(7):
        for odd in (float("nan"), float("inf"), 1e38):
            broken_TI = x_TI.clone()
            broken_TI[row] = odd
            same_TO = half(broken_TI)
            assert torch.equal(same_TO[:row], y_TO[:row])
            assert torch.equal(same_TO[row + 1 :], y_TO[row + 1 :])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """One that was published in bfloat16, with weights as small as tests need them."""
    monkeypatch.setattr(linear, "SMALL_NUMBERS", 0)
    monkeypatch.setattr(linear, "HALF_INPUTS", 0)
    theirs: Any = make_model(tmp_path, "Llama")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    made = load_base_model(tmp_path, dtype=torch.float32)
    assert made._layers[0].gate_up is not None and made._layers[0].gate_up._half is not None
    assert made.head._linear._half is not None
    return made


def test_a_sample_does_not_depend_on_what_else_is_in_the_batch(model: Transformer) -> None:
    """Bit for bit, while the number of those that run goes up and down through all numbers."""
    works = [
        work(f"it-{number}", prompt_of(2 + 5 * number, number), max_tokens=3 + number)
        for number in range(36)
    ]

    found = run(BatchedSampler(model), *works)

    for one in works[::5]:
        (alone,) = run(BatchedSampler(model), one)[one.work_id].sequences
        (among,) = found[one.work_id].sequences
        assert (among.tokens, among.logprobs) == (alone.tokens, alone.logprobs)


def test_sampled_logprobs_match_a_forward_pass(model: Transformer) -> None:
    """As those of weights in float32 are."""
    prompt = prompt_of(40)

    (found,) = run(BatchedSampler(model), work("it", prompt, max_tokens=30))["it"].sequences

    expected = logprobs_of(model, prompt + found.tokens, None)
    assert found.logprobs_np is not None
    np.testing.assert_allclose(found.logprobs_np, expected[len(prompt) - 1 :], atol=1e-5)
