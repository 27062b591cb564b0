"""The compiled kernels beside the plain formulas, in every library that this machine can run.

Those of products and of attention have files of their own.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.kernel_cases import DTYPES, NEAR, close, noise
from tinsmith.engine.model import layers
from tinsmith.engine.model.kernels import library
from tinsmith.engine.model.kernels.library import Kernels
from tinsmith.engine.model.token_sampling import DrawSettings, draw, uniform_numbers


def test_kernels_are_built_on_a_machine_with_a_compiler() -> None:
    """Otherwise everything below would be skipped, and nobody would see it."""
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("this machine has no C compiler, or one without OpenMP")

    assert library.kernels() is not None


def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TINSMITH_KERNELS=off` has PyTorch compute everything."""
    monkeypatch.setenv(library.SWITCH, "off")

    assert library.kernels.__wrapped__() is None


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 65), torch.zeros(64, 4).T, torch.zeros(2, 64).double()]
)
def test_unsupported_inputs_are_left_to_pytorch(tensor: Tensor) -> None:
    """Rows that are no whole vectors, that do not lie one behind the other, or of other types."""
    assert library.kernels_for(tensor) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_norms_match_the_formula(
    kernels: Kernels, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    x_TD, weight_D = noise(7, 96, dtype=x_dtype), noise(96, dtype=dtype, seed=1)

    found_TD = kernels.rms_norm(x_TD, weight_D, 1e-5)

    assert found_TD.dtype == dtype
    close(found_TD, F.rms_norm(x_TD.double(), (96,), weight_D.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_is_normalized_separately(kernels: Kernels, dtype: torch.dtype) -> None:
    qkv_THD, weight_D = noise(5, 6, 64, dtype=dtype), noise(64, dtype=dtype, seed=1)

    found_THD = kernels.rms_norm(qkv_THD[:, 1:4], weight_D, 1e-6)

    close(found_THD, F.rms_norm(qkv_THD[:, 1:4].double(), (64,), weight_D.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_residual_addition_is_kept_in_the_rows(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    x_TD, added_TD = (
        noise(7, 96, dtype=torch.float32),
        noise(7, 96, dtype=dtype, seed=2),
    )
    weight_D = noise(96, dtype=dtype, seed=1)
    sum_TD = x_TD + added_TD

    found_TD = kernels.rms_norm(x_TD, weight_D, 1e-5, added_TD=added_TD)

    assert torch.equal(x_TD, sum_TD)
    assert torch.equal(found_TD, kernels.rms_norm(sum_TD, weight_D, 1e-5))


@pytest.mark.usefixtures("by_kernels")
def test_a_one_dimensional_row_is_normalized() -> None:
    x_TD, weight_D = (
        noise(1, 96, dtype=torch.float32),
        noise(96, dtype=torch.float32, seed=1),
    )

    found_D = layers.rms_norm(x_TD[0], weight_D, 1e-5, torch.float32)

    close(found_D, F.rms_norm(x_TD[0].double(), (96,), weight_D.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_of_norms_matches_autograd(kernels: Kernels, dtype: torch.dtype) -> None:
    x_TD, weight_D = noise(7, 96, dtype=torch.float32), noise(96, dtype=dtype, seed=1)
    dy_TD = noise(7, 96, dtype=dtype, seed=3)
    wanted_TD = x_TD.double().requires_grad_()
    F.rms_norm(wanted_TD, (96,), weight_D.double(), 1e-5).backward(dy_TD.double())

    found_TD = kernels.rms_norm_backward(x_TD, weight_D, 1e-5, dy_TD)

    assert wanted_TD.grad is not None
    close(found_TD, wanted_TD.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_follows_the_formula(kernels: Kernels, dtype: torch.dtype) -> None:
    x_THD = noise(6, 5, 64, dtype=dtype)[:, 1:4]
    cos_T1D, sin_T1D = (noise(6, 1, 64, dtype=torch.float32, seed=seed) for seed in (1, 2))
    swapped_THD = x_THD.double().roll(32, -1)

    found_THD = kernels.rope(x_THD, cos_T1D, sin_T1D)

    close(found_THD, x_THD.double() * cos_T1D.double() + swapped_THD * sin_T1D.double())


def _gated(x_TF: Tensor, *, is_gelu: bool) -> Tensor:
    gate_TF, up_TF = x_TF.chunk(2, -1)
    return (F.gelu(gate_TF, approximate="tanh") if is_gelu else F.silu(gate_TF)) * up_TF


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_match_the_formula_forward_and_backward(
    kernels: Kernels, dtype: torch.dtype, is_gelu: bool
) -> None:
    x_TF, dy_TF = (
        noise(9, 192, dtype=dtype, size=3.0),
        noise(9, 96, dtype=dtype, seed=1),
    )
    wanted_TF = x_TF.double().requires_grad_()
    made_TF = _gated(wanted_TF, is_gelu=is_gelu)
    made_TF.backward(dy_TF.double())

    assert wanted_TF.grad is not None
    close(kernels.gate(x_TF, is_gelu=is_gelu), made_TF.detach())
    close(kernels.gate_backward(x_TF, dy_TF, is_gelu=is_gelu), wanted_TF.grad)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_of_large_values_stay_finite(kernels: Kernels, is_gelu: bool) -> None:
    gate_TF = torch.tensor([[-3e4, -200.0, -89.0, 89.0, 200.0, 3e4] * 16])
    x_TF = torch.cat((gate_TF, torch.ones_like(gate_TF)), -1)

    close(kernels.gate(x_TF, is_gelu=is_gelu), _gated(x_TF.double(), is_gelu=is_gelu))
    assert kernels.gate_backward(x_TF, gate_TF, is_gelu=is_gelu).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [256, 257, 1000])
def test_exp_logits_match_a_softmax(kernels: Kernels, dtype: torch.dtype, vocabulary: int) -> None:
    logits_RV = noise(5, vocabulary, dtype=dtype, size=5.0)
    inverse_temperatures_R = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0])
    exp_RW = torch.full((5, -(-vocabulary // 256) * 256), math.nan)
    wanted_RV = (logits_RV.double() * inverse_temperatures_R.double()[:, None]).softmax(-1)

    sums_RB, most_R = kernels.exp_logits(logits_RV, inverse_temperatures_R, 256, exp_RW)

    totals_R1 = sums_RB[:, -1:]
    close((exp_RW[:, :vocabulary] / totals_R1).float(), wanted_RV)
    assert not exp_RW[:, vocabulary:].any()
    assert torch.equal(most_R, logits_RV.float().amax(-1))
    blocks_RB = exp_RW.view(5, -1, 256).double().sum(-1).cumsum(-1)
    assert torch.allclose(sums_RB, blocks_RB, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_totals_equal_the_last_partial_sums_of_exp_logits(
    kernels: Kernels, dtype: torch.dtype, vocabulary: int
) -> None:
    """Bit for bit: passes and samples divide by the same."""
    logits_RV = noise(5, vocabulary, dtype=dtype, size=5.0)
    exp_RW = torch.empty(5, -(-vocabulary // 256) * 256)
    sums_RB, wanted_R = kernels.exp_logits(logits_RV, torch.ones(5), 256, exp_RW)

    totals_R, most_R = kernels.exp_totals(logits_RV, 256)

    assert torch.equal(totals_R, sums_RB[:, -1])
    assert torch.equal(most_R, wanted_R)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 256, 1003])
@pytest.mark.parametrize("targets", [1, 7])
def test_gradients_of_logits_are_those_of_autograd(
    kernels: Kernels, dtype: torch.dtype, vocabulary: int, targets: int
) -> None:
    """Also where a token is a target several times, and where it has nearly all of the shares."""
    logits_RV = noise(9, vocabulary, dtype=dtype, size=2.0)
    logits_RV[3, 2] = 15.0
    tokens_RK = torch.randint(5, (9, targets), generator=torch.Generator().manual_seed(1))
    tokens_RK[3] = 2
    dlp_RK = noise(9, targets, dtype=torch.float32, seed=3)
    wanted_RV = logits_RV.double().requires_grad_()
    logprobs_RK = wanted_RV.log_softmax(-1).gather(1, tokens_RK)
    logprobs_RK.backward(dlp_RK.double())

    totals_R, most_R = kernels.exp_totals(logits_RV, 256)
    factors_R = (-dlp_RK.sum(-1) / totals_R).float()
    found_RV = kernels.logit_gradients(logits_RV, most_R, factors_R, tokens_RK, dlp_RK)

    assert wanted_RV.grad is not None
    close(found_RV, wanted_RV.grad)
    sure_R = found_RV[3].double() / wanted_RV.grad[3] - 1.0
    assert float(sure_R[2].abs()) <= max(0.05, NEAR[dtype]), "what is left of 1 was rounded away"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_number_of_threads(kernels: Kernels, dtype: torch.dtype) -> None:
    """So many of them that threads share them."""
    x_TD, dy_TD = (noise(1031, 1024, dtype=dtype, seed=seed) for seed in (1, 2))
    weight_D = noise(1024, dtype=dtype, seed=3)
    cos_T1D, sin_T1D = (noise(1031, 1, 64, dtype=torch.float32, seed=seed) for seed in (4, 5))
    colder_T, tokens_TK = torch.ones(1031), torch.zeros(1031, 1, dtype=torch.int64)

    def run() -> list[Tensor]:
        shares_TD = torch.empty(1031, 1024)
        totals_T, most_T = kernels.exp_totals(x_TD, 256)
        return [
            kernels.rms_norm(x_TD, weight_D, 1e-5),
            kernels.rms_norm_backward(x_TD, weight_D, 1e-5, dy_TD),
            kernels.rope(x_TD.view(1031, 16, 64), cos_T1D, sin_T1D),
            kernels.gate(x_TD, is_gelu=False),
            kernels.gate_backward(x_TD, dy_TD[:, :512], is_gelu=True),
            *kernels.exp_logits(x_TD, colder_T, 256, shares_TD),
            *(shares_TD, totals_T, most_T),
            kernels.logit_gradients(x_TD, most_T, colder_T, tokens_TK, colder_T.unsqueeze(1)),
        ]

    found = run()
    torch.set_num_threads(1)

    assert all(map(torch.equal, found, run()))


def test_sums_of_nan_or_all_infinite_logits_are_not_finite(kernels: Kernels) -> None:
    """A NaN anywhere, and nothing finite; tokens that cannot be drawn have a share of 0."""
    logits_RV = noise(4, 100, dtype=torch.float32)
    logits_RV[0, 99] = math.nan
    logits_RV[1, 3] = math.nan
    logits_RV[2] = -math.inf
    logits_RV[3, 5] = -math.inf
    exp_RW = torch.empty(4, 256)

    sums_RB, _ = kernels.exp_logits(logits_RV, torch.ones(4), 256, exp_RW)

    assert sums_RB[:, -1].isfinite().tolist() == [False, False, False, True]
    assert exp_RW[3, 5] == 0


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("by_kernels", "default_type")
def test_token_sampling_does_not_depend_on_the_default_dtype() -> None:
    """`transformers` changes that while it loads a model, for all threads."""
    logits_RV = noise(3, 1000, dtype=torch.float32, size=5.0)
    settings = [DrawSettings(temperature=temperature) for temperature in (1.0, 0.7, 1.3)]
    wanted_RV = logits_RV.double().log_softmax(-1)

    # In a thread of its own, which has no room from before.
    with ThreadPoolExecutor() as thread:
        drawn = thread.submit(
            draw, logits_RV, settings, uniform_numbers([1, 2, 3], [0, 0, 0])
        ).result()

    found_R1 = wanted_RV.gather(1, drawn.tokens.unsqueeze(1))
    assert torch.allclose(drawn.logprobs.double(), found_R1.squeeze(1), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_give_the_same_results_with_and_without_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what rounding in between makes of it."""
    if library.kernels() is None:
        pytest.skip("there are no kernels to compare with")
    x_TD, weight_D = noise(6, 64, dtype=torch.float32), noise(64, dtype=dtype, seed=1)
    x_THD, gate_up_TF = (
        noise(6, 4, 64, dtype=dtype, seed=2),
        noise(6, 128, dtype=dtype, seed=3),
    )
    cos_T1D, sin_T1D = (noise(6, 1, 64, dtype=torch.float32, seed=seed) for seed in (4, 5))

    def run() -> list[Tensor]:
        return [
            layers.rms_norm(x_TD, weight_D, 1e-5, dtype),
            layers.apply_rope(x_THD, cos_T1D, sin_T1D),
            layers.gated_activation(gate_up_TF, "silu"),
            layers.gated_activation(gate_up_TF, "gelu_tanh"),
        ]

    with torch.no_grad():
        with_them = run()
        monkeypatch.setattr(library, "kernels", lambda: None)
        without = run()

    for found, wanted in zip(with_them, without, strict=True):
        assert found.dtype == wanted.dtype
        bound = 4 * NEAR[dtype] * max(1.0, float(wanted.abs().max()))
        assert float((found.double() - wanted.double()).abs().max()) <= bound
