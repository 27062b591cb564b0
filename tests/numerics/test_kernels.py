"""The compiled kernels beside the plain formulas, in every library that this machine can run."""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.model import layers
from tinsmith.model.architecture import Architecture, LayerShape
from tinsmith.model.attention import AttentionRule
from tinsmith.model.cached_attention import CachedAttention
from tinsmith.model.factor_place import FactorPlace
from tinsmith.model.kernels import library
from tinsmith.model.kernels.library import Kernels
from tinsmith.model.kernels.names import library_path
from tinsmith.model.kv_cache import CachedStretch, Run, SequenceKeys
from tinsmith.model.linear import Linear
from tinsmith.model.lora import Factors
from tinsmith.model.pack_attention import PackAttention, Stretch
from tinsmith.model.sample_tokens import DrawSettings, chances, draw

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the largest number: one rounding, at the end."""


def _usable() -> list[str]:
    """The libraries whose instructions this machine has."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = {"AVX512": ["x86-64-v3", "x86-64-v4"], "AVX2": ["x86-64-v3"]}.get(capability, [])
    return sorted({*names, library._kind_of_machine()})


@pytest.fixture(scope="module", params=_usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    path = library_path(request.param)
    if not path.exists():
        pytest.skip("there was no C compiler when tinsmith was installed")
    return Kernels(path)


@pytest.fixture
def by_kernels(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels", lambda: kernels)


@pytest.fixture
def products() -> Kernels:
    """Kernels that multiply, which only one of the libraries has."""
    found = library.kernels()
    if found is None or not found.multiplies:
        pytest.skip("products are for machines that multiply bfloat16")
    return found


def _close(found: Tensor, wanted: Tensor) -> None:
    largest = float(wanted.abs().max())
    error = float((found.double() - wanted.double()).abs().max())
    assert error <= NEAR[found.dtype] * max(largest, 1.0), error


def _rows(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, generator=chance)).to(dtype)


def test_a_machine_with_a_compiler_has_kernels() -> None:
    """Otherwise everything below would be skipped, and nobody would see it."""
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("this machine has no C compiler, or one without OpenMP")

    assert library.kernels() is not None


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TINSMITH_KERNELS=off` has PyTorch compute everything."""
    monkeypatch.setenv(library.SWITCH, "off")

    assert library.kernels.__wrapped__() is None


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 65), torch.zeros(64, 4).T, torch.zeros(2, 64).double()]
)
def test_what_kernels_do_not_fit_is_left_to_pytorch(tensor: Tensor) -> None:
    """Rows that are no whole vectors, that do not lie one behind the other, or of other types."""
    assert library.kernels_for(tensor) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_norms_are_the_formula(kernels: Kernels, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    x_TD, weight_D = _rows(7, 96, dtype=x_dtype), _rows(96, dtype=dtype, seed=1)

    found_TD = kernels.norm(x_TD, weight_D, 1e-5)

    assert found_TD.dtype == dtype
    _close(found_TD, F.rms_norm(x_TD.double(), (96,), weight_D.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_norm_of_its_own(kernels: Kernels, dtype: torch.dtype) -> None:
    qkv_THD, weight_D = _rows(5, 6, 64, dtype=dtype), _rows(64, dtype=dtype, seed=1)

    found_THD = kernels.norm(qkv_THD[:, 1:4], weight_D, 1e-6)

    _close(found_THD, F.rms_norm(qkv_THD[:, 1:4].double(), (64,), weight_D.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_stays_in_the_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    x_TD, added_TD = _rows(7, 96, dtype=torch.float32), _rows(7, 96, dtype=dtype, seed=2)
    weight_D = _rows(96, dtype=dtype, seed=1)
    sum_TD = x_TD + added_TD

    found_TD = kernels.norm(x_TD, weight_D, 1e-5, added_TD=added_TD)

    assert torch.equal(x_TD, sum_TD)
    assert torch.equal(found_TD, kernels.norm(sum_TD, weight_D, 1e-5))


@pytest.mark.usefixtures("by_kernels")
def test_a_lone_row_without_a_dimension_for_rows_is_normed() -> None:
    x_TD, weight_D = _rows(1, 96, dtype=torch.float32), _rows(96, dtype=torch.float32, seed=1)

    found_D = layers.rms_norm(x_TD[0], weight_D, 1e-5, torch.float32)

    _close(found_D, F.rms_norm(x_TD[0].double(), (96,), weight_D.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_go_back_as_autograd_does(kernels: Kernels, dtype: torch.dtype) -> None:
    x_TD, weight_D = _rows(7, 96, dtype=torch.float32), _rows(96, dtype=dtype, seed=1)
    dy_TD = _rows(7, 96, dtype=dtype, seed=3)
    wanted_TD = x_TD.double().requires_grad_()
    F.rms_norm(wanted_TD, (96,), weight_D.double(), 1e-5).backward(dy_TD.double())

    found_TD = kernels.norm_back(x_TD, weight_D, 1e-5, dy_TD)

    assert wanted_TD.grad is not None
    _close(found_TD, wanted_TD.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_turned_by_the_formula(kernels: Kernels, dtype: torch.dtype) -> None:
    x_THD = _rows(6, 5, 64, dtype=dtype)[:, 1:4]
    cos_T1D, sin_T1D = (_rows(6, 1, 64, dtype=torch.float32, seed=seed) for seed in (1, 2))
    swapped_THD = x_THD.double().roll(32, -1)

    found_THD = kernels.turn(x_THD, cos_T1D, sin_T1D)

    _close(found_THD, x_THD.double() * cos_T1D.double() + swapped_THD * sin_T1D.double())


def _gated(x_TF: Tensor, *, is_gelu: bool) -> Tensor:
    gate_TF, up_TF = x_TF.chunk(2, -1)
    return (F.gelu(gate_TF, approximate="tanh") if is_gelu else F.silu(gate_TF)) * up_TF


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_are_the_formula_and_go_back(
    kernels: Kernels, dtype: torch.dtype, is_gelu: bool
) -> None:
    x_TF, dy_TF = _rows(9, 192, dtype=dtype, size=3.0), _rows(9, 96, dtype=dtype, seed=1)
    wanted_TF = x_TF.double().requires_grad_()
    made_TF = _gated(wanted_TF, is_gelu=is_gelu)
    made_TF.backward(dy_TF.double())

    assert wanted_TF.grad is not None
    _close(kernels.gate(x_TF, is_gelu=is_gelu), made_TF.detach())
    _close(kernels.gate_back(x_TF, dy_TF, is_gelu=is_gelu), wanted_TF.grad)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_of_large_numbers_stay_numbers(kernels: Kernels, is_gelu: bool) -> None:
    gate_TF = torch.tensor([[-3e4, -200.0, -89.0, 89.0, 200.0, 3e4] * 16])
    x_TF = torch.cat((gate_TF, torch.ones_like(gate_TF)), -1)

    _close(kernels.gate(x_TF, is_gelu=is_gelu), _gated(x_TF.double(), is_gelu=is_gelu))
    assert kernels.gate_back(x_TF, gate_TF, is_gelu=is_gelu).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [256, 257, 1000])
def test_shares_are_those_of_a_softmax(
    kernels: Kernels, dtype: torch.dtype, vocabulary: int
) -> None:
    logits_RV = _rows(5, vocabulary, dtype=dtype, size=5.0)
    colder_R = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0])
    shares_RW = torch.full((5, -(-vocabulary // 256) * 256), math.nan)
    wanted_RV = (logits_RV.double() * colder_R.double()[:, None]).softmax(-1)

    sums_RB, most_R = kernels.shares(logits_RV, colder_R, 256, shares_RW)

    totals_R1 = sums_RB[:, -1:]
    _close((shares_RW[:, :vocabulary] / totals_R1).float(), wanted_RV)
    assert not shares_RW[:, vocabulary:].any()
    assert torch.equal(most_R, logits_RV.float().amax(-1))
    blocks_RB = shares_RW.view(5, -1, 256).double().sum(-1).cumsum(-1)
    assert torch.allclose(sums_RB, blocks_RB, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_totals_are_the_last_sums_of_shares(
    kernels: Kernels, dtype: torch.dtype, vocabulary: int
) -> None:
    """Bit for bit: passes and samples divide by the same."""
    logits_RV = _rows(5, vocabulary, dtype=dtype, size=5.0)
    shares_RW = torch.empty(5, -(-vocabulary // 256) * 256)
    sums_RB, wanted_R = kernels.shares(logits_RV, torch.ones(5), 256, shares_RW)

    totals_R, most_R = kernels.totals(logits_RV, 256)

    assert torch.equal(totals_R, sums_RB[:, -1])
    assert torch.equal(most_R, wanted_R)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 256, 1003])
@pytest.mark.parametrize("targets", [1, 7])
def test_slopes_of_logits_are_those_of_autograd(
    kernels: Kernels, dtype: torch.dtype, vocabulary: int, targets: int
) -> None:
    """Also where a token is a target several times, and where it has nearly all of the shares."""
    logits_RV = _rows(9, vocabulary, dtype=dtype, size=2.0)
    logits_RV[3, 2] = 15.0
    tokens_RK = torch.randint(5, (9, targets), generator=torch.Generator().manual_seed(1))
    tokens_RK[3] = 2
    slopes_RK = _rows(9, targets, dtype=torch.float32, seed=3)
    wanted_RV = logits_RV.double().requires_grad_()
    logprobs_RK = wanted_RV.log_softmax(-1).gather(1, tokens_RK)
    logprobs_RK.backward(slopes_RK.double())

    totals_R, most_R = kernels.totals(logits_RV, 256)
    factors_R = (-slopes_RK.sum(-1) / totals_R).float()
    found_RV = kernels.logit_slopes(logits_RV, most_R, factors_R, tokens_RK, slopes_RK)

    assert wanted_RV.grad is not None
    _close(found_RV, wanted_RV.grad)
    sure_R = found_RV[3].double() / wanted_RV.grad[3] - 1.0
    assert float(sure_R[2].abs()) <= max(0.05, NEAR[dtype]), "what is left of 1 was rounded away"


def test_shares_of_what_is_no_number_are_none(kernels: Kernels) -> None:
    """A NaN anywhere, and nothing finite; tokens that cannot be drawn have a share of 0."""
    logits_RV = _rows(4, 100, dtype=torch.float32)
    logits_RV[0, 99] = math.nan
    logits_RV[1, 3] = math.nan
    logits_RV[2] = -math.inf
    logits_RV[3, 5] = -math.inf
    shares_RW = torch.empty(4, 256)

    sums_RB, _ = kernels.shares(logits_RV, torch.ones(4), 256, shares_RW)

    assert sums_RB[:, -1].isfinite().tolist() == [False, False, False, True]
    assert shares_RW[3, 5] == 0


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("by_kernels", "default_type")
def test_draws_do_not_follow_what_type_tensors_have_by_default() -> None:
    """`transformers` changes that while it loads a model, for all threads."""
    logits_RV = _rows(3, 1000, dtype=torch.float32, size=5.0)
    settings = [DrawSettings(temperature=temperature) for temperature in (1.0, 0.7, 1.3)]
    wanted_RV = logits_RV.double().log_softmax(-1)

    # In a thread of its own, which has no room from before.
    with ThreadPoolExecutor() as thread:
        drawn = thread.submit(draw, logits_RV, settings, chances([1, 2, 3], [0, 0, 0])).result()

    found_R1 = wanted_RV.gather(1, drawn.tokens.unsqueeze(1))
    assert torch.allclose(drawn.logprobs.double(), found_R1.squeeze(1), atol=1e-5)


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
def test_products_are_those_of_the_weights(
    products: Kernels, rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    """One row and more than a block, panels of one to three vectors, inputs of several strips."""
    weight_OI = _rows(outputs, inputs, dtype=torch.bfloat16, size=inputs**-0.5)
    x_TI, bias_O = (
        _rows(*shape, dtype=torch.bfloat16, seed=2) for shape in ((rows, inputs), (outputs,))
    )
    wanted_TO = x_TI.double() @ weight_OI.double().T + (bias_O.double() if has_bias else 0.0)

    packed = products.pack(weight_OI)
    found_TO = products.product(x_TI, packed, outputs, bias_O if has_bias else None)

    _close(found_TO, wanted_TO)
    for row in range(rows):
        alone_TO = products.product(
            x_TI[row : row + 1], packed, outputs, bias_O if has_bias else None
        )
        assert torch.equal(alone_TO[0], found_TO[row])


def _factors(inputs: int, outputs: tuple[int, ...], rank: int, scale: float) -> Factors:
    """With gradients that mean nothing yet."""
    place = FactorPlace(3, inputs, outputs, rank, scale)
    flat_N = _rows(place.end, dtype=torch.float32, seed=5)
    gradients_N = torch.full_like(flat_N, math.nan)
    return Factors(place, flat_N, torch.bfloat16, gradients_N=gradients_N)


_FACTOR_SHAPES = [
    *((576, (576, 192, 192), 32), (64, (300, 20), 8), (6, (50,), 2), (2, (2,), 2)),
    *((96, (4096,), 12), (4096, (64,), 64), (1536, (576,), 130)),
]
"""Panels of one to three vectors, outputs of several blocks, inputs of several strips."""


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("inputs", "outputs", "rank"), _FACTOR_SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 131])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_factors_add_what_frozen_ones_do(
    inputs: int, outputs: tuple[int, ...], rank: int, rows: int, scale: float
) -> None:
    """To the last bit, and in a part of the rows' columns alone."""
    factors, frozen = (_factors(inputs, outputs, rank, scale) for _ in range(2))
    frozen.freeze()
    x_TI = _rows(rows, inputs, dtype=torch.bfloat16)
    y_TO = _rows(rows, sum(outputs) + 5, dtype=torch.bfloat16, seed=3)
    wanted_TO = y_TO.clone()

    t_TR = factors.add_to(y_TO[:, 2:-3], x_TI)
    wanted_TR = frozen.add_to(wanted_TO[:, 2:-3], x_TI)

    assert factors.by_kernels is not None
    assert torch.equal(y_TO, wanted_TO)
    assert torch.equal(t_TR, wanted_TR * scale)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("inputs", "outputs", "rank"), _FACTOR_SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 131, 3000])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_factors_go_back_by_the_formula(
    inputs: int, outputs: tuple[int, ...], rank: int, rows: int, scale: float
) -> None:
    """The inputs' gradient is added to; the factors' are written first, and then added to."""
    factors = _factors(inputs, outputs, rank, scale)
    a_RI, *bs_OR = (one.bfloat16().double() for one in factors.held)
    given_TO = _rows(rows, sum(outputs) + 5, dtype=torch.bfloat16, seed=3)
    x_TI, dx_TI = (_rows(rows, inputs, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
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
        _near(found, formula)
    for one, two in zip(once, factors.gradients, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-6 * float(two.abs().max()))


def _near(found: Tensor, wanted: Tensor) -> None:
    """Up to two roundings, of what is added and of the sum, on average."""
    error = (found.double() - wanted).square().mean().sqrt()
    bound = 1e-6 + 2 * NEAR[torch.bfloat16] * wanted.square().mean().sqrt()
    assert error <= bound, float(error)


@pytest.mark.usefixtures("products", "threads")
def test_factors_do_not_follow_the_number_of_threads() -> None:
    x_TI, dy_TO = (_rows(131, n, dtype=torch.bfloat16, seed=n) for n in (96, 700))

    def run() -> list[Tensor]:
        factors = _factors(96, (600, 100), 8, 1.0)
        y_TO, dx_TI = torch.zeros_like(dy_TO), torch.zeros_like(x_TI)
        t_TR = factors.add_to(y_TO, x_TI)
        factors.backward(dx_TI, dy_TO, x_TI, t_TR)
        return [y_TO, dx_TI, *factors.gradients]

    found = run()
    torch.set_num_threads(1)

    assert all(map(torch.equal, found, run()))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("outputs", [(7,), (64, 33)])
def test_an_odd_number_of_outputs_goes_back_by_pytorch(outputs: tuple[int, ...]) -> None:
    """As a vocabulary may have."""
    factors = _factors(64, outputs, 8, 1.0)
    x_TI, dx_TI = (_rows(9, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    y_TO = _rows(9, sum(outputs), dtype=torch.bfloat16)

    t_TR = factors.add_to(y_TO.clone(), x_TI)
    factors.backward(dx_TI, y_TO, x_TI, t_TR)

    rights = [x_TI, *t_TR.split(8, -1)]
    b_slopes = [y.T @ t for y, t in zip(y_TO.split(outputs, -1), rights[1:], strict=True)]
    for found, wanted in zip(factors.gradients[1:], b_slopes, strict=True):
        _near(found, wanted.double())


@pytest.mark.usefixtures("products")
def test_factors_take_rows_that_lie_across() -> None:
    """Code of `transformers` may hand on a view in which inputs do not lie beside each other."""
    factors = _factors(64, (48,), 8, 1.0)
    x_TI, dy_TO = (_rows(5, n, dtype=torch.bfloat16, seed=n) for n in (64, 48))

    def run(x_TI: Tensor, dy_TO: Tensor) -> list[Tensor]:
        y_TO, dx_TI = torch.zeros(5, 48).bfloat16(), torch.zeros(5, 64).bfloat16()
        factors.has_gradients = False
        t_TR = factors.add_to(y_TO, x_TI)
        factors.backward(dx_TI, dy_TO, x_TI, t_TR)
        return [y_TO, dx_TI, *(one.clone() for one in factors.gradients)]

    across = run(x_TI.T.contiguous().T, dy_TO.T.contiguous().T)

    assert all(map(torch.equal, across, run(x_TI, dy_TO)))


def test_room_for_factors_does_not_follow_how_wide_many_rows_are(products: Kernels) -> None:
    """A thread keeps it, and the rows of one long text may be many."""
    place = FactorPlace(0, 4096, (64,), 8, 1.0)

    rooms = [products._factors_room(place.for_kernels, rows) for rows in (10_000, 20_000)]

    assert rooms[1] - rooms[0] <= 10_000 * 16, "more than the inner numbers of each row"


@pytest.mark.usefixtures("products")
def test_no_rows_have_gradients_of_zero() -> None:
    """And not what was left in memory, even if nothing else is gathered."""
    factors = _factors(96, (64, 32), 8, 1.0)
    x_TI, y_TO = (torch.empty(0, n, dtype=torch.bfloat16) for n in (96, 96))

    t_TR = factors.add_to(y_TO, x_TI)
    factors.backward(torch.empty_like(x_TI), y_TO, x_TI, t_TR)

    factors.clear_unwritten()
    assert all(not one.any() for one in factors.gradients)


@pytest.mark.usefixtures("products")
def test_rows_of_another_type_than_the_weights_are_refused() -> None:
    linear = Linear(_rows(64, 64, dtype=torch.bfloat16))

    with pytest.raises(RuntimeError, match="dtype"):
        linear(torch.ones(2, 64))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("inputs", [62, 128])
def test_rows_of_another_length_than_the_weights_are_refused(inputs: int) -> None:
    """Kernels would read beyond one of them."""
    linear = Linear(_rows(64, 64, dtype=torch.bfloat16))

    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.ones(2, inputs).bfloat16())


# Attention


def _run(
    dtype: torch.dtype, length: int, *, heads: int, key_heads: int, size: int, seed: int
) -> Run:
    """One of a single layer that holds so many tokens."""
    shape = Architecture(
        name="test",
        vocabulary=8,
        hidden=heads * size,
        inner=32,
        heads=heads,
        kv_heads=key_heads,
        head_size=size,
        max_context=4096,
        layers=(LayerShape(),),
        ropes=(),
        norm_epsilon=1e-5,
    )
    run = Run(shape, dtype, torch.device("cpu"))
    run.reserve(length)
    if length:
        (place_PGD,) = run.places(0, length)
        place_PGD.copy_(_rows(*place_PGD.shape, dtype=dtype, seed=100 + seed))
    run.length = length
    return run


def _wanted(stretch: CachedStretch, q_LHD: Tensor, window: int | None) -> Tensor:
    """By the formula, for each query by itself, in float64."""
    own, shared = stretch.keys.own, stretch.keys.shared
    runs = [
        *([] if shared is None else [shared.read(0, shared.length)]),
        own.read(0, stretch.own_end),
    ]
    keys, values = (torch.cat([one[which][0][0] for one in runs], 1).double() for which in (0, 1))
    group = q_LHD.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    found = []
    for row, q_HD in enumerate(q_LHD.double()):
        seen = stretch.sequence_length - len(q_LHD) + row + 1
        first = 0 if window is None else max(0, seen - window)
        scores_HS = (keys[:, first:seen] @ q_HD.unsqueeze(-1)).squeeze(-1) * q_HD.shape[-1] ** -0.5
        found.append((scores_HS.softmax(-1).unsqueeze(1) @ values[:, first:seen]).squeeze(1))
    return torch.stack(found)


@pytest.mark.usefixtures("by_kernels", "threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 5, 100])
def test_attention_is_the_formula_and_each_row_its_own(
    dtype: torch.dtype, heads: int, key_heads: int, size: int, window: int | None
) -> None:
    """Single rows and several, at the start and later, beside a run that they share and without."""
    a_run = functools.partial(_run, dtype, heads=heads, key_heads=key_heads, size=size)
    shared = a_run(70, seed=9)
    parts: list[tuple[Run | None, int, int]] = [
        *((None, 0, 40), (None, 63, 1), (None, 64, 1), (None, 130, 70), (shared, 0, 1)),
        *((shared, 0, 33), (shared, 20, 1), (None, 0, 1), (shared, 100, 3)),
    ]
    rows = sum(count for _, _, count in parts)
    q_THD, k_TGD, v_TGD = (
        _rows(rows, some, size, dtype=dtype, seed=seed)
        for seed, some in enumerate((heads, key_heads, key_heads))
    )
    rule = AttentionRule(size**-0.5, window)

    def attend(which: list[int]) -> list[tuple[CachedStretch, Tensor, Tensor]]:
        stretches: list[CachedStretch] = []
        taken: list[Tensor] = []
        row = 0
        for index in which:
            run, place, count = parts[index]
            keys = SequenceKeys(run, a_run(place, seed=index))
            stretches.append(CachedStretch(row, row + count, keys, place))
            start = sum(more for _, _, more in parts[:index])
            taken.append(torch.arange(start, start + count))
            row += count
        place_T = torch.cat(taken)
        attention = CachedAttention(stretches)
        q, k, v = q_THD[place_T], k_TGD[place_T], v_TGD[place_T]
        out_THD = attention.attend(0, rule, q, k, v)
        attention.done()
        return [(one, q[one.start : one.end], out_THD[one.start : one.end]) for one in stretches]

    together = attend(list(range(len(parts))))

    for index, (stretch, q_LHD, out_LHD) in enumerate(together):
        _close(out_LHD, _wanted(stretch, q_LHD, window))
        ((_, _, alone_LHD),) = attend([index])
        assert torch.equal(alone_LHD, out_LHD), index


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_however_it_is_read(dtype: torch.dtype) -> None:
    """All at once, token by token, and in two parts at an odd place."""
    q_THD, k_TGD, v_TGD = (
        _rows(150, some, 64, dtype=dtype, seed=seed) for seed, some in enumerate((6, 2, 2))
    )

    def read(*cuts: int) -> Tensor:
        keys = SequenceKeys(None, _run(dtype, 0, heads=6, key_heads=2, size=64, seed=0))
        found = []
        for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
            attention = CachedAttention([CachedStretch(0, end - start, keys, start)])
            given = (rows[start:end] for rows in (q_THD, k_TGD, v_TGD))
            found.append(attention.attend(0, AttentionRule(0.125), *given))
            attention.done()
        return torch.cat(found)

    whole = read()

    assert torch.equal(read(*range(1, 150)), whole)
    assert torch.equal(read(37), whole)


@pytest.mark.usefixtures("by_kernels")
def test_how_heads_lie_in_memory_changes_nothing() -> None:
    """Of a lone row they lie alike either way, so its bits would follow from rows beside it."""
    q_THD, k_TGD, v_TGD = (
        _rows(9, some, 64, dtype=torch.float32, seed=seed) for seed, some in enumerate((6, 2, 2))
    )

    def attend(*given: Tensor) -> Tensor:
        keys = SequenceKeys(None, _run(torch.float32, 0, heads=6, key_heads=2, size=64, seed=0))
        attention = CachedAttention([CachedStretch(0, 9, keys, 0)])
        return attention.attend(0, AttentionRule(0.125), *given)

    rows_first = q_THD, k_TGD, v_TGD
    heads_first = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in rows_first]

    assert torch.equal(attend(*heads_first), attend(*rows_first))


@pytest.mark.usefixtures("by_kernels")
def test_rows_of_another_type_than_what_is_kept_are_refused() -> None:
    """Kernels would write beyond the run: float32 takes twice the room of bfloat16."""
    run = _run(torch.bfloat16, 0, heads=2, key_heads=2, size=32, seed=0)
    attention = CachedAttention([CachedStretch(0, 64, SequenceKeys(None, run), 0)])

    with pytest.raises(RuntimeError, match="BFloat16"):
        attention.attend(0, AttentionRule(1.0), *torch.ones(3, 64, 2, 32))


@pytest.mark.usefixtures("by_kernels")
def test_layers_of_several_sizes_go_through_one_pack() -> None:
    """Models of which nobody knows more yet: `load_by_transformers.py` finds out by a pass."""
    attention = PackAttention([Stretch(0, 40)])

    for size in (32, 64, 128):
        given = [_rows(40, 2, size, dtype=torch.float32, seed=seed) for seed in range(3)]
        q, k, v = (one.transpose(0, 1) for one in given)
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found_THD = attention.attend(0, AttentionRule(size**-0.5), *given)
        _close(found_THD, wanted.transpose(0, 1).double())


@pytest.mark.usefixtures("by_kernels")
def test_values_of_another_size_than_keys_are_refused() -> None:
    attention = PackAttention([Stretch(0, 40)])
    q_THD, v_THD = torch.ones(40, 2, 64), torch.ones(40, 2, 32)

    with pytest.raises(RuntimeError, match="size"):
        attention.attend(0, AttentionRule(1.0), q_THD, q_THD, v_THD)


_ON_SMALL_STACKS = """
import threading, torch
from tests.numerics.test_kernels import _run
from tinsmith.model.attention import AttentionRule
from tinsmith.model.cached_attention import CachedAttention
from tinsmith.model.kv_cache import CachedStretch, SequenceKeys

def attend():
    torch.set_num_threads(2)
    run = _run(torch.float32, 0, heads=2, key_heads=2, size=256, seed=0)
    attention = CachedAttention([CachedStretch(0, 96, SequenceKeys(None, run), 0)])
    print(attention.attend(0, AttentionRule(0.1), *torch.ones(3, 96, 2, 256)).sum())

threading.stack_size(256 * 1024)
thread = threading.Thread(target=attend)
thread.start()
thread.join()
"""


def test_attention_asks_for_no_large_stack() -> None:
    """Neither of whoever calls it nor of the threads that help."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_SMALL_STACKS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_STACKSIZE": "256k"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "tensor(49152.)\n"), done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_without_kernels_are_those_with_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what rounding in between makes of it."""
    if library.kernels() is None:
        pytest.skip("there are no kernels to compare with")
    x_TD, weight_D = _rows(6, 64, dtype=torch.float32), _rows(64, dtype=dtype, seed=1)
    x_THD, gate_up_TF = _rows(6, 4, 64, dtype=dtype, seed=2), _rows(6, 128, dtype=dtype, seed=3)
    cos_T1D, sin_T1D = (_rows(6, 1, 64, dtype=torch.float32, seed=seed) for seed in (4, 5))

    def run() -> list[Tensor]:
        return [
            layers.rms_norm(x_TD, weight_D, 1e-5, dtype),
            layers.turned(x_THD, cos_T1D, sin_T1D),
            layers.gated(gate_up_TF, "silu"),
            layers.gated(gate_up_TF, "gelu_tanh"),
        ]

    with torch.no_grad():
        with_them = run()
        monkeypatch.setattr(library, "kernels", lambda: None)
        without = run()

    for found, wanted in zip(with_them, without, strict=True):
        assert found.dtype == wanted.dtype
        bound = 4 * NEAR[dtype] * max(1.0, float(wanted.abs().max()))
        assert float((found.double() - wanted.double()).abs().max()) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_within_a_window_are_the_same_beside_longer_ones(dtype: torch.dtype) -> None:
    """Whatever is computed with masks on the way back."""
    q_THD, k_TGD, v_TGD = (
        _rows(60, heads, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2))
    )
    rule = AttentionRule(0.125, 10)
    given = q_THD, k_TGD, v_TGD

    alone = PackAttention([Stretch(0, 8)]).attend(0, rule, *(rows[:8] for rows in given))
    beside = PackAttention([Stretch(0, 8), Stretch(8, 60)]).attend(0, rule, *given)

    assert torch.equal(beside[:8], alone)


_PACKS: list[list[Stretch]] = [
    [Stretch(0, 1)],
    [Stretch(0, 16), Stretch(16, 33), Stretch(33, 34)],
    [Stretch(0, 130), Stretch(130, 330)],
    [Stretch(0, 70), Stretch(70, 75, (0, 70)), Stretch(75, 205, (0, 70)), Stretch(205, 260)],
    [Stretch(0, 9, (20, 84)), Stretch(9, 20), Stretch(20, 84), Stretch(84, 85, (20, 84))],
]
"""Less than a block of keys and more, and prefixes of several, before and behind what follows."""


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("stretches", _PACKS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_attention_goes_back_by_the_formula(
    stretches: list[Stretch], heads: int, key_heads: int, size: int, window: int | None
) -> None:
    rows = stretches[-1].end
    given = [
        _rows(rows, some, size, dtype=torch.bfloat16, seed=seed)
        for seed, some in enumerate((heads, key_heads, key_heads))
    ]
    dout_THD = _rows(rows, heads, size, dtype=torch.bfloat16, seed=9)

    found = _slopes_of_attention(stretches, given, dout_THD, window)

    wanted = _wanted_slopes(stretches, given, dout_THD, window)
    for one, formula in zip(found, wanted, strict=True):
        _near(one, formula)


def _slopes_of_attention(
    stretches: list[Stretch], given: list[Tensor], dout_THD: Tensor, window: int | None = None
) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    rule = AttentionRule(given[0].shape[2] ** -0.5, window)
    PackAttention(stretches).attend(0, rule, *leaves).backward(dout_THD)
    return [one.grad for one in leaves if one.grad is not None]


def _wanted_slopes(
    stretches: list[Stretch], given: list[Tensor], dout_THD: Tensor, window: int | None
) -> list[Tensor]:
    """By autograd of the formula, in float64."""
    leaves = [one.double().requires_grad_() for one in given]
    q_THD, k_THD, v_THD = (
        one.repeat_interleave(given[0].shape[1] // one.shape[1], 1) for one in leaves
    )
    for start, end, prefix in stretches:
        before = range(0) if prefix is None else range(*prefix)
        place = torch.tensor([*before, *range(start, end)])
        q, k, v = (one.transpose(0, 1) for one in (q_THD[start:end], k_THD[place], v_THD[place]))
        seen = torch.ones(end - start, len(place), dtype=torch.bool).tril(len(before))
        if window is not None:
            seen = seen.triu(len(before) - window + 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        out.transpose(0, 1).backward(dout_THD[start:end].double(), retain_graph=True)
    return [one.grad for one in leaves if one.grad is not None]


@pytest.mark.usefixtures("products", "threads")
def test_slopes_of_attention_are_the_same_whoever_is_beside() -> None:
    """Bit for bit: alone with one thread, and in a pack with others before and behind."""
    mine = [Stretch(0, 70), Stretch(70, 105, (0, 70)), Stretch(105, 240)]
    others = [Stretch(0, 33), *(_moved(one, 33) for one in mine), Stretch(273, 400)]
    given = [_rows(400, n, 64, dtype=torch.bfloat16, seed=n) for n in (6, 2, 2)]
    dout_THD = _rows(400, 6, 64, dtype=torch.bfloat16, seed=9)

    beside = _slopes_of_attention(others, given, dout_THD)

    torch.set_num_threads(1)
    alone = _slopes_of_attention(mine, [one[33:273] for one in given], dout_THD[33:273])
    assert all(torch.equal(one, two[33:273]) for one, two in zip(alone, beside, strict=True))


def _moved(stretch: Stretch, by: int) -> Stretch:
    prefix = stretch.prefix and (stretch.prefix[0] + by, stretch.prefix[1] + by)
    return Stretch(stretch.start + by, stretch.end + by, prefix)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("window", [3, 10, 13, 30])
def test_passes_go_back_through_windows_as_autograd_does(window: int) -> None:
    """Of sequences within them and of longer ones, behind a prefix and without."""
    prefix, lone = (0, 11), Stretch(27, 60)
    tails = [Stretch(11, 15, prefix), Stretch(15, 16, prefix), Stretch(16, 27, prefix)]
    stretches = [Stretch(*prefix), *tails, lone]
    q, k, v = (
        _rows(60, heads, 64, dtype=torch.float32, seed=seed).requires_grad_()
        for seed, heads in enumerate((4, 2, 2))
    )
    rule, slopes_THD = AttentionRule(0.3, window), _rows(60, 4, 64, dtype=torch.float32, seed=7)

    def gradients(out_THD: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out_THD, (q, k, v), slopes_THD)

    found_THD = PackAttention(stretches).attend(0, rule, q, k, v)

    wanted_THD = torch.cat([_in_window(one, q, k, v, rule) for one in stretches])
    _close(found_THD.detach(), wanted_THD.detach().double())
    for found, wanted in zip(gradients(found_THD), gradients(wanted_THD), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _in_window(stretch: Stretch, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """By the formula, of each head by itself."""
    rows = list(range(stretch.start, stretch.end))
    seen = [*range(*(stretch.prefix or (0, 0))), *rows]
    apart_LS = torch.arange(len(seen))[-len(rows) :, None] - torch.arange(len(seen))
    is_hidden_LS = (apart_LS < 0) | (apart_LS >= (rule.window or len(seen)))
    outs = []
    for head in range(q.shape[1]):
        key_head = head * k.shape[1] // q.shape[1]
        scores_LS = rule.scale * q[rows, head] @ k[seen, key_head].T
        weights_LS = scores_LS.masked_fill(is_hidden_LS, -math.inf).softmax(-1)
        outs.append(weights_LS @ v[seen, key_head])
    return torch.stack(outs, 1)
