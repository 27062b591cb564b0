"""Log-probabilities of rows, alone and among others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.engine.model.head import MOST_TARGETS, Head
from tinsmith.engine.model.linear import Linear

VOCABULARY, FEATURES, ROWS = 40_000, 8, 120
"""So many logits that torch shares a row out among threads, if it is the only one."""


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads", "computed_by")
def test_a_row_does_not_depend_on_other_rows() -> None:
    """Bit for bit; what shares a pack cannot be seen in the numbers."""
    chance = torch.Generator().manual_seed(0)
    head = Head(Linear(torch.randn(VOCABULARY, FEATURES, generator=chance)))
    hidden_RD = torch.randn(ROWS, FEATURES, generator=chance)
    targets_RK = torch.randint(VOCABULARY, (ROWS, 1), generator=chance)

    together_RK = head.logprobs(hidden_RD, targets_RK)

    for rows in (1, 17):
        for start in range(0, ROWS - rows, rows):
            some = slice(start, start + rows)
            assert torch.equal(head.logprobs(hidden_RD[some], targets_RK[some]), together_RK[some])


@pytest.mark.usefixtures("_two_threads", "computed_by")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_gradient_of_a_row_does_not_depend_on_other_rows(softcap: float | None) -> None:
    """Bit for bit, and so is what the loss is told of it."""
    chance = torch.Generator().manual_seed(0)
    head = Head(Linear(torch.randn(VOCABULARY, FEATURES, generator=chance)), softcap)
    hidden_RD = torch.randn(ROWS, FEATURES, generator=chance)
    targets_RK = torch.randint(VOCABULARY, (ROWS, 1), generator=chance)

    def found(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        some = hidden_RD[start:end], targets_RK[start:end]
        return head.logprobs_and_gradient(*some, [], lambda _low, _high, lp_RK: lp_RK.cos())

    together = found(0, ROWS)

    for rows in (1, 3, 17):
        for start in range(0, ROWS - rows, rows):
            alone = found(start, start + rows)
            assert torch.equal(alone[0], together[0][start : start + rows])
            assert torch.equal(alone[1], together[1][start : start + rows])


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logprob_of_a_target_does_not_depend_on_other_targets(dtype: torch.dtype) -> None:
    """To the last bit: a sampled token may be looked up beside all others that might have been."""
    chance = torch.Generator().manual_seed(0)
    head = Head(Linear(torch.randn(1000, FEATURES, generator=chance).to(dtype)))
    hidden_RD = torch.randn(20, FEATURES, generator=chance).to(dtype)
    targets_RK = torch.randint(1000, (20, MOST_TARGETS + 1), generator=chance)

    many_RK = head.logprobs(hidden_RD, targets_RK)

    assert torch.equal(many_RK[:, :1], head.logprobs(hidden_RD, targets_RK[:, :1]))


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("targets", [1, 3, MOST_TARGETS + 1])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_match_autograd(targets: int, softcap: float | None) -> None:
    """Of rows with one target and with many, some of which have no slope."""
    chance = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(301, FEATURES, generator=chance)
    hidden_RD = torch.randn(20, FEATURES, generator=chance)
    targets_RK = torch.randint(301, (20, targets), generator=chance)
    dlp_RK = torch.randn(20, targets, generator=chance)
    dlp_RK[4:9] = 0.0
    wanted_RD = hidden_RD.double().requires_grad_()
    logits_RV = wanted_RD @ weight_VD.double().T
    if softcap is not None:
        logits_RV = softcap * (logits_RV / softcap).tanh()
    wanted_RK = logits_RV.log_softmax(-1).gather(1, targets_RK)
    wanted_RK.backward(dlp_RK.double())
    head = Head(Linear(weight_VD), softcap)

    found_RK, gradient_RD = head.logprobs_and_gradient(
        hidden_RD, targets_RK, [], lambda start, end, _: dlp_RK[start:end]
    )

    assert wanted_RD.grad is not None
    torch.testing.assert_close(found_RK, wanted_RK.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient_RD, wanted_RD.grad.float(), rtol=1e-4, atol=1e-4)
    again_RD = head.backward(hidden_RD, targets_RK, dlp_RK)
    torch.testing.assert_close(again_RD, gradient_RD)
