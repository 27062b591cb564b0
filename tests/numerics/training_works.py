"""Passes over data, adapters to run them on, and what runs them to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.numerics.small_models import VOCABULARY
from tinsmith.engine.base import AdapterId, AdapterSpec, PassWork, TrainingWork
from tinsmith.engine.embedded.adapter_state import AdapterState, fresh_adapter
from tinsmith.engine.embedded.trainer import Trainer
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import AdamOptimizerConfig, Datum, LoraConfig, ModelInput

A, B = AdapterId("a"), AdapterId("b")
LARGE, SMALL = 1 << 30, 1 << 20
"""Bytes for a pass: all that a test has in one piece, and a few dozen rows."""


def an_adapter(
    model: Transformer, adapter: AdapterId = A, *, rank: int = 4, seed: int = 1, **lora: Any
) -> AdapterState:
    """One that has been trained for a while: no factor of it is zero."""
    spec = AdapterSpec(
        adapter_id=adapter,
        base_model="base",
        lora=LoraConfig(rank=rank, seed=seed, **lora),
        optimizer=AdamOptimizerConfig(),
    )
    made = fresh_adapter(spec, model.architecture, "cpu")
    chance = torch.Generator().manual_seed(seed)
    made.weights = made.weights + 0.02 * torch.randn(made.layout.size, generator=chance)
    return made


def a_datum(tokens: Any, seed: int = 0, **inputs: Any) -> Datum:
    tokens = np.array(tokens, np.int64)
    chance = np.random.default_rng(seed)
    given = {
        "target_tokens": np.append(tokens[1:], 5),
        "weights": chance.normal(size=len(tokens)).astype(np.float32),
        "logprobs": chance.normal(-6, 0.1, size=len(tokens)).astype(np.float32),
        "advantages": chance.normal(size=len(tokens)).astype(np.float32),
    }
    return Datum(ModelInput.from_ints(tokens), {**given, **inputs})


def data_of(*lengths: int, seed: int = 0) -> list[Datum]:
    chance = np.random.default_rng(seed)
    return [a_datum(chance.integers(0, VOCABULARY, n), seed + at) for at, n in enumerate(lengths)]


def a_pass(
    data: list[Datum], adapter: AdapterId = A, loss: str = "cross_entropy", work_id: str = "w"
) -> PassWork:
    needs = {"weights"} if loss == "cross_entropy" else {"logprobs", "advantages"}
    kept = tuple(
        Datum(
            one.model_input,
            {k: v for k, v in one.loss_fn_inputs.items() if k in {"target_tokens", *needs}},
        )
        for one in data
    )
    return PassWork(work_id=work_id, adapter_id=adapter, data=kept, loss_fn=loss)


def train(
    model: Transformer,
    works: Sequence[TrainingWork],
    *adapters: AdapterState,
    pass_bytes: int = LARGE,
) -> list[Any]:
    trainer = Trainer({"base": model}, pass_bytes=pass_bytes)
    outcomes = trainer.train(works, {one.spec.adapter_id: one for one in adapters})
    assert [one.error for one in outcomes] == [None] * len(works)
    return [one.result for one in outcomes]


def gradients_of(adapter: AdapterState) -> torch.Tensor:
    assert adapter.gradients is not None
    return adapter.gradients
