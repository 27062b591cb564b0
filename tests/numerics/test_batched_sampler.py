"""Samples against `transformers`, against forward passes, and against themselves among others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.numerics.sample_works import logprobs_of, lora, prompt_of, run, statistics, work
from tests.numerics.small_models import VOCABULARY, make_model
from tinsmith.engine.base import SampleOutcome, SampleWork, WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler, SamplerSettings
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.lora import FusedLora
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import SampleResponse, TensorData

FAMILIES = ["Llama", "Mistral", "Qwen3", "Qwen3Moe", "Gemma2"]
W = WeightsId("w")
BFLOAT16_BOUND = 0.02
"""Twice what was seen; of a model with more layers it is more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Transformer]]:
    """A model as `transformers` has it and as we do."""
    made: dict[str, tuple[Any, Transformer]] = {}

    def find(family: str) -> tuple[Any, Transformer]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            theirs = make_model(folder, family)
            made[family] = theirs, load_base_model(folder, dtype=torch.float32)
        return made[family]

    return find


@pytest.fixture(scope="module")
def llama(models: Callable[[str], tuple[Any, Transformer]]) -> Transformer:
    return models("Llama")[1]


def sequences(response: SampleResponse) -> list[tuple[bytes, bytes]]:
    """Tokens and log-probabilities, bit for bit."""
    return [
        (one.tokens_np.tobytes(), one.logprobs_np.tobytes())
        for one in response.sequences
        if one.logprobs_np is not None
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_samples_match_transformers(
    models: Callable[[str], tuple[Any, Transformer]], family: str
) -> None:
    """Token for token, for prompts of one token, of a part of a chunk and of several chunks."""
    theirs, ours = models(family)
    lengths = [1, 2, 5, 40, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 7]
    prompts = {str(length): prompt_of(length, length) for length in lengths}

    found = run(
        BatchedSampler(ours),
        *(work(n, p, temperature=0.0, max_tokens=24) for n, p in prompts.items()),
    )

    for name, prompt in prompts.items():
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
        assert found[name].sequences[0].tokens == expected[0, len(prompt) :].tolist(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_match_a_forward_pass(
    models: Callable[[str], tuple[Any, Transformer]], family: str
) -> None:
    """With an adapter and without, sampled tokens and prompt alike, whatever the temperature."""
    _, model = models(family)
    adapter = lora(model, 1)
    sampler = BatchedSampler(model)
    sampler.add_weights(W, adapter)
    prompt = prompt_of(CHUNK_TOKENS + 30)
    options: dict[str, Any] = {
        "num_samples": 3,
        "max_tokens": 30,
        "temperature": 1.3,
        "prompt_logprobs": True,
    }

    found = run(
        sampler, work("base", prompt, **options), work("lora", prompt, "w", top_k=40, **options)
    )

    for name, loras in (("base", None), ("lora", adapter)):
        for one in found[name].sequences:
            expected = logprobs_of(model, prompt + one.tokens, loras)
            assert one.logprobs_np is not None
            np.testing.assert_allclose(one.logprobs_np, expected[len(prompt) - 1 :], atol=1e-5)
            of_prompt = found[name].prompt_logprobs_np
            assert of_prompt is not None and np.isnan(of_prompt[0])
            np.testing.assert_allclose(of_prompt[1:], expected[: len(prompt) - 1], atol=1e-5)
    assert found["base"].sequences[0].tokens != found["lora"].sequences[0].tokens


def _crowd(count: int, seed: int) -> list[SampleWork]:
    """Samples of all kinds."""
    chance = random.Random(seed)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.7, "temperature": 0.8},
        {"num_samples": 5},
        {"prompt_logprobs": True},
    ]
    return [
        work(
            f"crowd-{seed}-{index}",
            prompt_of(chance.choice([1, 9, 60, 130, 200]), chance.randrange(9)),
            chance.choice([None, "w", "v"]),
            seed=index,
            max_tokens=chance.randrange(1, 40),
            **chance.choice(settings),
        )
        for index in range(count)
    ]


KINDS: dict[str, dict[str, Any]] = {
    "one token": {"prompt": prompt_of(1)},
    "plain": {"prompt": prompt_of(21)},
    "long": {"prompt": prompt_of(2 * CHUNK_TOKENS + 50)},
    "many": {"prompt": prompt_of(CHUNK_TOKENS + 20), "num_samples": 6},
    "whole chunks": {"prompt": prompt_of(2 * CHUNK_TOKENS)},
    "adapter": {"prompt": prompt_of(CHUNK_TOKENS + 3), "weights": "w", "num_samples": 2},
    "filtered": {"prompt": prompt_of(40), "top_k": 9, "top_p": 0.9, "temperature": 0.9},
    "asking": {
        "prompt": prompt_of(150),
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "prompt_alt_tokens_k": 2,
        "topk_sample_logprobs": 2,
    },
}


@pytest.fixture(scope="module")
def adapters(llama: Transformer) -> dict[str, FusedLora]:
    return {"w": lora(llama, 1, 4), "v": lora(llama, 2, 7)}


def _sampler(llama: Transformer, adapters: dict[str, FusedLora], **settings: Any) -> BatchedSampler:
    sampler = BatchedSampler(llama, settings=SamplerSettings(**settings))
    for name, adapter in adapters.items():
        sampler.add_weights(WeightsId(name), adapter)
    return sampler


@pytest.fixture(scope="module")
def alone(llama: Transformer, adapters: dict[str, FusedLora]) -> dict[str, SampleResponse]:
    """Each kind in a sampler of its own."""
    return {
        name: run(_sampler(llama, adapters), work(name, max_tokens=40, **kind))[name]
        for name, kind in KINDS.items()
    }


def _assert_same(found: SampleResponse, expected: SampleResponse) -> None:
    """Everything but how much was in the cache."""
    assert sequences(found) == sequences(expected)
    assert found._parts()[:4] == expected._parts()[:4]
    assert found.prompt_alt_tokens == expected.prompt_alt_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 64 * CHUNK_TOKENS])
def test_a_sample_is_the_same_alone_and_in_a_batch(
    llama: Transformer,
    adapters: dict[str, FusedLora],
    alone: dict[str, SampleResponse],
    kind: str,
    budget: int,
) -> None:
    """Bit for bit, whatever runs already, joins later and is read beside it."""
    sampler = _sampler(llama, adapters, prefill_tokens=budget, busy_prefill_tokens=budget)
    for one in _crowd(6, 1):
        sampler.admit(one)
    for _ in range(5):
        sampler.step()

    found = run(sampler, work(kind, max_tokens=40, **KINDS[kind]), *_crowd(6, 2))

    _assert_same(found[kind], alone[kind])


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_sample_within_the_window_is_unaffected_by_one_beyond_it(
    tmp_path: Path, family: str
) -> None:
    """Bit for bit: how a sequence is computed is a matter of its own length."""
    make_model(tmp_path, family, sliding_window=20)
    model = load_base_model(tmp_path)
    shorts = [
        work(f"short-{length}-{number}", prompt_of(length), num_samples=number)
        for length, number in ((3, 1), (6, 1), (11, 1), (6, 3))
    ]

    alone = [run(BatchedSampler(model), one)[one.work_id] for one in shorts]
    found = run(BatchedSampler(model), *shorts, work("long", prompt_of(60, 3), max_tokens=20))

    for one, wanted in zip(shorts, alone, strict=True):
        _assert_same(found[one.work_id], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_with_a_warm_prefix_cache(
    llama: Transformer,
    adapters: dict[str, FusedLora],
    alone: dict[str, SampleResponse],
    kind: str,
) -> None:
    """Filled by the same prompt, by a longer one, and by one that begins alike."""
    prompt, weights = KINDS[kind]["prompt"], KINDS[kind].get("weights")
    sampler = _sampler(llama, adapters)
    for name, other in {
        "longer": prompt + prompt_of(60, 5),
        "alike": prompt[: CHUNK_TOKENS + 1] + prompt_of(70, 6),
    }.items():
        run(sampler, work(name, other, weights, max_tokens=3))
        found = run(sampler, work(kind, max_tokens=40, **KINDS[kind]))[kind]
        _assert_same(found, alone[kind])
    again = run(sampler, work(kind, max_tokens=40, **KINDS[kind]))[kind]
    _assert_same(again, alone[kind])
    if kind != "asking":
        assert again.prompt_cache_hit_tokens == len(prompt)


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_cancellations_and_waits_give_the_same_samples(
    llama: Transformer, adapters: dict[str, FusedLora], seed: int, owners: int
) -> None:
    """Samples that come, are cancelled and wait for memory, in an order that chance makes."""
    chance = random.Random(seed)
    works = {
        one.work_id: msgspec.structs.replace(one, owner=str(place % owners))
        for place, one in enumerate(_crowd(14, seed))
    }
    limit = 900 * 512  # a token takes 512 bytes; the largest needs about 300
    sampler = _sampler(
        llama,
        adapters,
        kv_bytes=limit,
        most_sequences=9,
        shared_rows=2,
        prefill_tokens=chance.choice([1, 300]),
        busy_prefill_tokens=chance.choice([1, 300]),
    )
    coming, found, gone = list(works.values()), dict[str, SampleResponse](), set[str]()
    while coming or sampler.samples:
        if coming and chance.random() < 0.3:
            sampler.admit(coming.pop())
        if chance.random() < 0.04:
            name = chance.choice(list(works))
            gone |= {name} - found.keys() - {one.work_id for one in coming}
            sampler.cancel(name)
        for event in sampler.step():
            assert isinstance(event, SampleOutcome) and event.result is not None
            found[event.work_id] = event.result
        held = statistics(sampler)
        assert 0 <= held.taken_bytes <= limit - held.cached_bytes

    assert held.taken_bytes == held.running == held.prefilling == held.waiting == 0
    assert found.keys() == works.keys() - gone
    for name, response in found.items():
        _assert_same(response, run(_sampler(llama, adapters), works[name])[name])


@pytest.mark.parametrize(
    ("dtype", "held_in"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_a_sample_is_the_same_if_its_sequences_wait_for_slots(
    tmp_path: Path, dtype: torch.dtype, held_in: torch.dtype
) -> None:
    """A hundred that read their prompt together are as a few at a time are."""
    make_model(tmp_path)
    model = load_base_model(tmp_path, dtype=dtype, held_in=held_in)
    asked = work("it", prompt_of(CHUNK_TOKENS + 22), num_samples=100, max_tokens=4)

    together = run(BatchedSampler(model), asked)["it"]
    waiting = run(BatchedSampler(model, settings=SamplerSettings(most_sequences=7)), asked)["it"]

    assert sequences(waiting) == sequences(together)


def test_sampled_logprobs_in_bfloat16_are_close_to_a_forward_pass(tmp_path: Path) -> None:
    """Keys that were kept are rounded as keys are in a pass; sums are formed in another order."""
    make_model(tmp_path)
    model = load_base_model(tmp_path, dtype=torch.bfloat16)
    prompt = prompt_of(CHUNK_TOKENS + 30)

    found = run(BatchedSampler(model), work(prompt=prompt, num_samples=3, max_tokens=30))["it"]

    for one in found.sequences:
        expected = logprobs_of(model, prompt + one.tokens, None)[len(prompt) - 1 :]
        assert one.logprobs_np is not None
        np.testing.assert_allclose(one.logprobs_np, expected, atol=BFLOAT16_BOUND)


def test_token_frequencies_match_the_softmax(llama: Transformer) -> None:
    """Chi-square of the first token over 4,000 sequences."""
    prompt, count = prompt_of(12), 4000
    with torch.no_grad():
        attention = PackedAttention([PackedSegment(0, len(prompt))])
        hidden = llama.forward(torch.tensor(prompt), torch.arange(len(prompt)), attention)
        shares = llama.head.logits(hidden[-1:])[0].softmax(-1)

    found = run(BatchedSampler(llama), work(prompt=prompt, num_samples=count, max_tokens=1))["it"]

    seen = torch.bincount(
        torch.tensor([one.tokens[0] for one in found.sequences]), minlength=VOCABULARY
    )
    expected = shares * count
    often = expected >= 5
    squares = ((seen[often] - expected[often]) ** 2 / expected[often]).sum()
    degrees = int(often.sum())
    assert degrees > 50
    assert squares < degrees + 4.5 * (2 * degrees) ** 0.5


def test_prompt_logprobs_match_a_forward_pass(llama: Transformer) -> None:
    """Likeliest tokens, targets dense and sparse, last-n and alternatives."""
    prompt = prompt_of(CHUNK_TOKENS + 12)
    rows = len(prompt) - 1
    with torch.no_grad():
        attention = PackedAttention([PackedSegment(0, len(prompt))])
        hidden = llama.forward(torch.tensor(prompt), torch.arange(len(prompt)), attention)
        expected = llama.head.logits(hidden).log_softmax(-1)[:-1].numpy()
    dense = np.arange(rows * 2).reshape(rows, 2) % VOCABULARY
    dense[3, 1] = -1
    starts = [0, *([0] * 5), *([1] * (rows - 6)), 3]
    sparse = TensorData([9, 4, 5], "int64", [rows, 4], starts, [1, 0, 3])
    sampler = BatchedSampler(llama)

    found = run(
        sampler,
        work("top", prompt, topk_prompt_logprobs=4, prompt_alt_tokens_k=50),
        work("last", prompt, prompt_logprobs=True, prompt_logprobs_last_n=5),
        work("dense", prompt, target_prompt_logprobs=TensorData.from_numpy(dense)),
        work("sparse", prompt, target_prompt_logprobs=sparse),
    )

    top = found["top"].topk_prompt_logprobs
    assert top is not None and top[0] is None and len(top) == len(prompt)
    best = np.argsort(-expected, axis=-1)[:, :4]
    for place in range(rows):
        row = top[place + 1]
        assert row is not None and [token for token, _ in row] == best[place].tolist()
        np.testing.assert_allclose([lp for _, lp in row], expected[place][best[place]], atol=1e-5)
    last = found["last"].prompt_logprobs_np
    assert last is not None and np.isnan(last[:-5]).all()
    wanted = expected[np.arange(rows), prompt[1:]]
    np.testing.assert_allclose(last[-5:], wanted[-5:], atol=1e-5)
    targets = found["dense"].target_prompt_logprobs
    assert targets is not None and targets.shape == [rows, 2]
    wanted = np.where(dense < 0, 0, expected[np.arange(rows)[:, None], dense])
    np.testing.assert_allclose(targets.to_numpy(), wanted, atol=1e-5)
    targets = found["sparse"].target_prompt_logprobs
    assert targets is not None and targets.sparse_crow_indices == starts
    wanted = expected[[5, rows - 1, rows - 1], [9, 4, 5]]
    np.testing.assert_allclose(targets.numbers.numpy(), wanted, atol=1e-5)
    others = found["top"].prompt_alt_tokens
    assert others is not None and others.tokens.shape == [rows, 50]
    tokens = others.tokens.to_numpy()
    wanted = expected[np.arange(rows)[:, None], tokens]
    np.testing.assert_allclose(others.logprobs.to_numpy(), wanted, atol=1e-5)
    # Drawn from the model: on average as likely as its entropy says.
    entropy = -(np.exp(expected) * expected).sum(-1).mean()
    assert abs(-wanted.mean() - entropy) < 0.05
