"""Sampling with `transformers`: `generate` with a static batch, and its continuous batching."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workloads.engine.data import prompts
from benchmarks.workloads.engine.measure import Turn, settle
from benchmarks.workloads.engine.models import size_of
from benchmarks.workloads.engine.peft_loop import load, with_adapters

_NO_END = 1 << 30
"""An id that is no token's: samples run to their length."""


def static(
    model: str,
    count: str,
    prompt: str = "128",
    new: str = "64",
    samples: str = "1",
    lora: str = "",
    dtype: str = "float32",
    threads: str = "1",
) -> Callable[[], dict[str, float]]:
    """One batch, which begins and ends as one."""
    size, kind = size_of(model), getattr(torch, dtype)
    loaded = load(model, kind, int(threads)).eval()
    if lora:
        loaded = with_adapters(loaded, ["one"]).eval()
    turns = itertools.count(1)

    def run(count: int, new: int) -> dict[str, float]:
        ids = torch.tensor(prompts(count, int(prompt), size.vocabulary, next(turns)))
        turn = Turn(kind)

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            turn.saw_token()
            return scores

        with torch.inference_mode():
            made = loaded.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=int(samples),
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=[note],
            )
        tokens = made.shape[0] * (made.shape[1] - ids.shape[1])
        assert tokens == count * int(samples) * new
        return turn.figures(tokens, size.sampling_flops(ids.numel(), tokens))

    run(1, 4)
    settle()
    return lambda: run(int(count), int(new))


def _batched(loaded: Any, asked: list[list[int]], new: int) -> Any:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    longest = max(map(len, asked)) + new
    blocks = sum(-(-(len(one) + new) // 64) for one in asked)
    return loaded.generate_batch(
        inputs=asked,
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=_NO_END,
            pad_token_id=0,
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=64, num_blocks=blocks + 8, max_batch_tokens=max(512, longest)
        ),
        record_timestamps=True,
        progress_bar=False,
        persistent_manager=False,
        warmup=False,
    )


def continuous(
    model: str, count: str, prompt: str = "128", new: str = "64"
) -> Callable[[], dict[str, float]]:
    """`generate_batch`."""
    size = size_of(model)
    loaded = load(model).eval()
    turns = itertools.count(1)

    def run(count: int, new: int) -> dict[str, float]:
        asked = prompts(count, int(prompt), size.vocabulary, next(turns))
        turn = Turn()
        with torch.inference_mode():
            made = _batched(loaded, asked, new)
        tokens = sum(len(one.generated_tokens) for one in made.values())
        assert tokens == count * new, f"{tokens} tokens came"
        return turn.figures(tokens, size.sampling_flops(count * int(prompt), tokens))

    run(1, 4)
    settle()
    return lambda: run(int(count), int(new))


def long_among_short(model: str, long: str, shorts: str) -> Callable[[], dict[str, float]]:
    """As ours, with continuous batching."""
    import time

    size = size_of(model)
    loaded = load(model).eval()
    turns = itertools.count(1)

    def run(long: int) -> dict[str, float]:
        number = next(turns)
        asked = prompts(1, long, size.vocabulary, number)
        asked += prompts(int(shorts), 32, size.vocabulary, 500 + number)
        turn = Turn()
        began = time.perf_counter()
        with torch.inference_mode():
            made = _batched(loaded, asked, 16)
        tokens = sum(len(one.generated_tokens) for one in made.values())
        short = [one for one in made.values() if len(one.prompt_ids) == 32]
        turn.first_tokens([one.timestamps[0] - began for one in short])
        return turn.figures(tokens, size.sampling_flops(sum(map(len, asked)), tokens))

    run(64)
    settle()
    return lambda: run(int(long))
