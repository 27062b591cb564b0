"""The fake engine's arithmetic, beside torch and beside differences."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tinsmith.engine.base import AdapterId, AdapterSpec, PassWork, StepWork
from tinsmith.engine.fake import arithmetic
from tinsmith.engine.fake.arithmetic import Vocabulary
from tinsmith.engine.fake.engine import VOCABULARY
from tinsmith.engine.fake.training import Adapter
from tinsmith.errors import ValidationError
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
)

WORDS = Vocabulary(VOCABULARY)
ID = AdapterId("a")


def _adapter(optimizer: OptimizerConfig | None = None) -> Adapter:
    spec = AdapterSpec(
        adapter_id=ID,
        base_model="m",
        lora=LoraConfig(rank=3),
        optimizer=optimizer or AdamOptimizerConfig(),
    )
    adapter = Adapter(spec, arithmetic.base_table("m"), arithmetic.fresh_weights(spec.lora, "s"))
    for name, weights in adapter.weights.items():
        if name.endswith(".B"):
            weights[:] = np.random.default_rng(1).normal(scale=0.1, size=weights.shape)
    return adapter


def _pass() -> PassWork:
    tokens = list(range(1, 40))
    datum = Datum(
        ModelInput.from_ints(tokens), {"target_tokens": tokens[::-1], "weights": [1.0] * 39}
    )
    return PassWork(work_id="p", adapter_id=ID, data=(datum,), loss_fn="cross_entropy")


def test_probabilities_of_the_whole_vocabulary_add_up_to_one() -> None:
    """After every context."""
    table = _adapter().table_CK
    tokens = np.arange(VOCABULARY)
    for row in (0, 17, 63):
        logprobs = WORDS.logprobs(table, np.full(VOCABULARY, row), tokens)
        assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_gradients_match_finite_differences() -> None:
    """Of the loss that is reported, at every matrix."""
    adapter = _adapter()
    adapter.run_pass(_pass(), WORDS)
    for name, gradient in adapter.gradients.items():
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        losses = []
        for change in (1e-2, -1e-2):
            other = _adapter()
            other.weights[name][place] += change
            losses.append(other.run_pass(_pass(), WORDS).metrics["loss:sum"])

        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(gradient[place], rel=2e-2)


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=0.01),
        AdamParams(learning_rate=0.1, weight_decay=0.3, beta1=0.5, beta2=0.9, eps=1e-3),
        AdamParams(learning_rate=0.05, grad_clip_norm=0.01),
    ],
)
def test_steps_match_adamw(params: AdamParams) -> None:
    """As torch takes them, clipping and decay included."""
    adapter = _adapter()
    names = list(adapter.weights)
    twins = [torch.nn.Parameter(torch.tensor(adapter.weights[name].copy())) for name in names]
    optimizer = torch.optim.AdamW(
        twins,
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for _ in range(4):
        adapter.run_pass(_pass(), WORDS)
        for twin, name in zip(twins, names, strict=True):
            twin.grad = torch.tensor(adapter.gradients[name].copy())
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(twins, params.grad_clip_norm)
        optimizer.step()
        adapter.step(StepWork(work_id="s", adapter_id=ID, params=params))

    for twin, name in zip(twins, names, strict=True):
        np.testing.assert_allclose(adapter.weights[name], twin.detach(), rtol=1e-3, atol=2e-5)


def test_a_step_of_another_optimizer_is_rejected() -> None:
    """The family is chosen when the model is made."""
    adapter = _adapter(DimuonOptimizerConfig())
    adapter.run_pass(_pass(), WORDS)
    before = adapter.run_pass(_pass(), WORDS).metrics["loss:sum"]

    with pytest.raises(ValidationError, match="dimuon"):
        adapter.step(StepWork(work_id="s", adapter_id=ID, params=AdamParams()))
    params = DimuonParams(learning_rate=0.01)
    adapter.step(StepWork(work_id="s", adapter_id=ID, params=params))
    assert adapter.run_pass(_pass(), WORDS).metrics["loss:sum"] < before


def test_an_uploaded_loss_is_rejected_and_the_remedy_names_the_embedded_engine() -> None:
    adapter = _adapter()
    work = msgspec.structs.replace(_pass(), loss_fn="custom")

    with pytest.raises(ValidationError, match=r"built-in losses only.*--engine embedded"):
        adapter.run_pass(work, WORDS)

    assert not adapter.gradients
