"""Samples to draw, and what draws them to their end."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.numerics.small_models import VOCABULARY
from tinsmith.engine.base import SampleOutcome, SampleWork, WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler
from tinsmith.engine.model.lora import FusedLora, LoraLayout, LoraSpan
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import ModelInput, SampleResponse, SamplingParams
from tinsmith.types.requests import SampleRequest


def lora(model: Transformer, seed: int, rank: int = 4, size: float = 0.1) -> FusedLora:
    layout = LoraLayout(model.architecture, rank, attention=True, mlp=True, unembed=True)
    chance = torch.Generator().manual_seed(seed)
    flat = torch.randn(layout.size, generator=chance) * size
    return layout.fused(flat, model.dtype, is_frozen=True)


def logprobs_of(
    model: Transformer, tokens: list[int], loras: FusedLora | None
) -> np.ndarray[Any, Any]:
    """The log-probability of each token after the first, by one pass as training makes it."""
    count = len(tokens) - 1
    spans = [] if loras is None else [LoraSpan(0, count, loras)]
    rows = torch.tensor(tokens)
    with torch.no_grad():
        hidden = model.forward(
            rows[:-1], torch.arange(count), PackedAttention([PackedSegment(0, count)]), spans
        )
        found = model.head.logprobs(hidden, rows[1:, None], spans)
    return found[:, 0].numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def work(
    work_id: str = "it", prompt: list[int] | None = None, weights: str | None = None, **fields: Any
) -> SampleWork:
    names = SamplingParams.__struct_fields__
    params = {name: fields.pop(name) for name in names if name in fields}
    is_streamed, owner = fields.pop("is_streamed", False), fields.pop("owner", "")
    request = SampleRequest(
        prompt=ModelInput.from_ints(prompt or prompt_of(5)),
        sampling_params=SamplingParams(**{"max_tokens": 8, "seed": 7, "stop": [], **params}),
        **fields,
    )
    return SampleWork(
        work_id=work_id,
        base_model="m",
        weights_id=None if weights is None else WeightsId(weights),
        request=request,
        is_streamed=is_streamed,
        owner=owner,
    )


def run(sampler: BatchedSampler, *works: SampleWork) -> dict[str, SampleResponse]:
    """All answers; each must be good."""
    for one in works:
        sampler.admit(one)
    found: dict[str, SampleResponse] = {}
    while sampler.samples:
        for event in sampler.step():
            if isinstance(event, SampleOutcome):
                assert event.error is None, event.error
                assert event.result is not None
                found[event.work_id] = event.result
    return found


class SamplerStatistics(NamedTuple):
    """What a sampler has done, and what it holds."""

    prefilled_tokens: int
    hit_tokens: int
    sampled_tokens: int
    waiting: int
    prefilling: int
    running: int
    preemptions: int
    taken_bytes: int
    cached_bytes: int


def statistics(sampler: BatchedSampler) -> SamplerStatistics:
    queue, memory = sampler._queue, sampler._memory
    return SamplerStatistics(
        prefilled_tokens=sampler._prefilled_tokens,
        hit_tokens=queue.hit_tokens,
        sampled_tokens=sampler._sampled_tokens,
        waiting=len(sampler._arrived) + queue.waiting,
        prefilling=queue.prefilling,
        running=len(sampler._running),
        preemptions=queue.preemptions,
        taken_bytes=memory.taken_bytes,
        cached_bytes=memory.cache.bytes,
    )
