"""The fake engine's arithmetic, beside torch and beside differences."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tinsmith.engines.base import AdapterId, AdapterSpec, PassWork, SampleWork, StepWork
from tinsmith.engines.fake import arithmetic
from tinsmith.engines.fake.arithmetic import Vocabulary
from tinsmith.engines.fake.engine import VOCABULARY, FakeEngine, fake_model
from tinsmith.engines.fake.training import Adapter
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
    SamplingParams,
)
from tinsmith.types.requests import SampleRequest

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


def test_gradients_are_those_of_differences() -> None:
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
def test_steps_are_those_of_adamw(params: AdamParams) -> None:
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


def test_a_step_of_another_optimizer_is_refused() -> None:
    """The family is chosen when the model is made."""
    adapter = _adapter(DimuonOptimizerConfig())
    adapter.run_pass(_pass(), WORDS)
    before = adapter.run_pass(_pass(), WORDS).metrics["loss:sum"]

    with pytest.raises(ValidationError, match="dimuon"):
        adapter.step(StepWork(work_id="s", adapter_id=ID, params=AdamParams()))
    params = DimuonParams(learning_rate=0.01)
    adapter.step(StepWork(work_id="s", adapter_id=ID, params=params))
    assert adapter.run_pass(_pass(), WORDS).metrics["loss:sum"] < before


def test_prompts_that_were_read_before_count_as_cached() -> None:
    """In whole pieces from the start, and not with other weights."""

    async def run() -> list[int]:
        hits = []
        async with FakeEngine([fake_model("m"), fake_model("n")]) as engine:
            for number, (base, prompt) in enumerate(
                [("m", range(200)), ("m", range(200)), ("m", range(100)), ("n", range(200))]
            ):
                request = SampleRequest(
                    prompt=ModelInput.from_ints(list(prompt)),
                    sampling_params=SamplingParams(max_tokens=1),
                )
                work = SampleWork(
                    work_id=str(number), base_model=base, weights_id=None, request=request
                )
                engine.admit(work)
                [event] = await engine.step_sampler()
                assert event.result is not None  # type: ignore[union-attr]  # one token, one end
                hits.append(event.result.prompt_cache_hit_tokens)  # type: ignore[union-attr]
        return hits

    assert asyncio.run(run()) == [0, 192, 64, 0]
