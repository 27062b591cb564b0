"""Samples and passes give a token the same log-probability, in bfloat16 too where kernels multiply.

Rounding in bfloat16 is coarse, and what is rounded the other way in one layer changes most numbers
after a few: only what is computed in the same way agrees at all, and that agrees to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numerics.sample_works import logprobs_of, prompt_of, run, work
from tests.numerics.small_models import make_model
from tinsmith.engine.base import WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler
from tinsmith.engine.model.kernels.library import matmul_kernels
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.lora import LoraLayout, LoraSpan
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer

LENGTHS = (1, 63, 100, 200)
"""Of prompts: less than a block of keys, and more, and no whole number of them."""


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
}
MODELS: list[tuple[str, dict[str, object]]] = [
    ("Llama", {"vocab_size": 301, "hidden_size": 100}),
    ("Mistral", {"sliding_window": 30}),
    ("Gemma3", {"sliding_window": 30}),
    ("Qwen3", {"tie_word_embeddings": False}),
    ("Qwen2Moe", {"moe_intermediate_size": 40}),
]
"""Odd vocabularies and rows that are no whole vectors, windows, norms of heads, experts."""


def _model(folder: Path, family: str = "Llama", **settings: object) -> Transformer:
    if matmul_kernels(torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("there are no kernels that multiply in bfloat16 on this machine")
    make_model(folder, family, **{**SIZES, **settings})
    return load_base_model(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return _model(tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize("rank", [None, 2, 8, 12, 32])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_sampled_logprobs_equal_those_of_forward_in_bfloat16(
    model: Transformer, rank: int | None, num_samples: int
) -> None:
    """To the last bit, of the base and adapters of any even rank, of one sample and several."""
    _assert_same(model, rank, num_samples)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("family", "settings"), MODELS)
def test_sampled_logprobs_equal_those_of_forward_in_other_model_families(
    tmp_path: Path, family: str, settings: dict[str, object]
) -> None:
    """In sequences longer than their windows too, and however many threads there are."""
    model = _model(tmp_path, family, num_hidden_layers=4, **settings)

    _assert_same(model, 8, num_samples=2)
    _assert_same_with_gradients(model)


def _assert_same(model: Transformer, rank: int | None, num_samples: int) -> None:
    sampler = BatchedSampler(model)
    trained = None
    if rank is not None:
        layout = LoraLayout(model.architecture, rank, attention=True, mlp=True, unembed=True)
        chance = torch.Generator().manual_seed(rank)
        flat = torch.randn(layout.size, generator=chance) * 0.1
        trained = layout.fused(flat, model.dtype)
        sampler.add_weights(WeightsId("w"), layout.fused(flat, model.dtype, is_frozen=True))
    weights = None if rank is None else "w"
    prompts = {f"of-{length}": prompt_of(length, length) for length in LENGTHS}
    works = [
        work(name, prompt, weights, num_samples=num_samples, max_tokens=80)
        for name, prompt in prompts.items()
    ]

    answers = run(sampler, *works)

    for name, prompt in prompts.items():
        for one in answers[name].sequences:
            assert one.logprobs_np is not None
            expected = logprobs_of(model, [*prompt, *one.tokens], trained)[len(prompt) - 1 :]
            np.testing.assert_array_equal(one.logprobs_np, expected)


def test_passes_with_gradients_and_without_are_the_same(model: Transformer) -> None:
    """To the last bit: `forward` and `forward_backward` say the same of a token."""
    _assert_same_with_gradients(model)


def _assert_same_with_gradients(model: Transformer) -> None:
    layout = LoraLayout(model.architecture, 8, attention=True, mlp=True, unembed=False)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(1)) * 0.1
    tokens, count = torch.tensor(prompt_of(150)), 150

    def hidden(*, recomputes: bool = False) -> torch.Tensor:
        made = layout.fused(flat, model.dtype, gradients=torch.empty(layout.size))
        spans = [LoraSpan(0, count, made)]
        where = torch.arange(count), PackedAttention([PackedSegment(0, count)])
        return model.forward(tokens, *where, spans, recomputes=recomputes).detach()

    with_gradients, with_less_memory = hidden(), hidden(recomputes=True)
    with torch.no_grad():
        without = hidden()

    assert torch.equal(with_gradients, without)
    assert torch.equal(with_less_memory, without)
