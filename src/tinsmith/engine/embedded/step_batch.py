"""The packed batch of a sampler step: a row for each running sequence, then prefill chunks.

A batch that fails (out of memory, a bug) is split in two and retried, recursively: only the sample
that fails alone fails.
"""

# S sequence, T row of the batch, D feature

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.embedded.running_samples import RunningSequence, Sample, SamplerWeights
from tinsmith.engine.model.kv_cache import CachedAttention, CachedSegment, SequenceKv
from tinsmith.engine.model.lora import LoraSpan
from tinsmith.engine.model.transformer import Transformer

Array: TypeAlias = "np.ndarray[Any, Any]"


class PrefillChunk(NamedTuple):
    """Tokens to compute in one step: of a prompt, or of a sequence resumed after preemption.

    Those of a sequence were sampled one by one, and are recomputed in the same way.
    """

    sample: Sample
    start: int
    end: int
    sequence: RunningSequence | None = None

    @property
    def tokens(self) -> Array:
        """The token ids."""
        if self.sequence is None:
            return self.sample.prompt[self.start : self.end].astype(np.int64)
        return np.array(self.sequence.tokens[self.start : self.end], np.int64)

    @property
    def positions(self) -> Array:
        """Their positions in the sequence."""
        before = 0 if self.sequence is None else len(self.sample.prompt)
        return np.arange(before + self.start, before + self.end)

    @property
    def kv(self) -> SequenceKv:
        """The KV cache that they are appended to."""
        if self.sequence is None:
            assert self.sample.kv is not None, "its prefill has started"
            return SequenceKv(None, self.sample.kv)
        assert self.sequence.kv is not None, "it has resumed"
        return self.sequence.kv


class StepOutput(NamedTuple):
    """The hidden states of a step."""

    sequences: list[RunningSequence]
    hidden: Tensor
    """One row per sequence."""
    chunks: list[tuple[PrefillChunk, Tensor]]
    failed: list[tuple[Sample, Exception]]
    """Samples that failed; they are in none of the other fields."""


def run_step(
    transformer: Transformer, sequences: Sequence[RunningSequence], chunks: Sequence[PrefillChunk]
) -> StepOutput:
    """Compute the batch and append its keys and values to the KV caches.

    Args:
        transformer: The base model.
        sequences: Running sequences, grouped by weights.
        chunks: Grouped by weights; at most one per prompt and per resumed sequence.
    """
    if not sequences and not chunks:
        return StepOutput([], _no_rows(transformer), [], [])
    segments = _segments(sequences, chunks)
    lengths = [one.kv.own.length for one in segments]
    try:
        hidden_TD = _hidden(transformer, sequences, chunks, segments)
    except Exception as exc:  # noqa: BLE001 - retried in halves to find the sample
        for segment, length in zip(segments, lengths, strict=True):
            segment.kv.own.length = length
        return _retry_in_halves(transformer, sequences, chunks, exc)
    sizes = [len(sequences), *(chunk.end - chunk.start for chunk in chunks)]
    hidden_SD, *parts = hidden_TD.split(sizes)
    return StepOutput(list(sequences), hidden_SD, list(zip(chunks, parts, strict=True)), [])


def _retry_in_halves(
    transformer: Transformer,
    sequences: Sequence[RunningSequence],
    chunks: Sequence[PrefillChunk],
    error: Exception,
) -> StepOutput:
    if len(sequences) + len(chunks) == 1:
        sample = sequences[0].sample if sequences else chunks[0].sample
        return StepOutput([], _no_rows(transformer), [], [(sample, error)])
    cut, chunk_cut = (len(sequences) + 1) // 2, len(chunks) // 2
    first = run_step(transformer, sequences[:cut], chunks[:chunk_cut])
    lost = {id(sample) for sample, _ in first.failed}
    rest = [one for one in sequences[cut:] if id(one.sample) not in lost]
    second = run_step(transformer, rest, chunks[chunk_cut:])
    lost |= {id(sample) for sample, _ in second.failed}
    read = [*first.sequences, *second.sequences]
    kept = [place for place, one in enumerate(read) if id(one.sample) not in lost]
    return StepOutput(
        [read[place] for place in kept],
        torch.cat([first.hidden, second.hidden])[kept],
        [*first.chunks, *second.chunks],
        [*first.failed, *second.failed],
    )


def _no_rows(transformer: Transformer) -> Tensor:
    shape = (0, transformer.architecture.hidden)
    return torch.empty(shape, dtype=transformer.dtype, device=transformer.device)


def _hidden(
    transformer: Transformer,
    sequences: Sequence[RunningSequence],
    chunks: Sequence[PrefillChunk],
    segments: Sequence[CachedSegment],
) -> Tensor:
    tokens = np.array([one.tokens[-1] for one in sequences], np.int64)
    positions = np.array([one.position for one in sequences], np.int64)
    rows = [(1, one.sample.weights) for one in sequences]
    if chunks:
        tokens = np.concatenate([tokens, *(chunk.tokens for chunk in chunks)])
        positions = np.concatenate([positions, *(chunk.positions for chunk in chunks)])
        rows += [(chunk.end - chunk.start, chunk.sample.weights) for chunk in chunks]
    return transformer.forward(
        torch.from_numpy(tokens).to(transformer.device),
        torch.from_numpy(positions).to(transformer.device),
        CachedAttention(segments),
        lora_spans(rows),
    )


def _segments(
    sequences: Sequence[RunningSequence], chunks: Sequence[PrefillChunk]
) -> list[CachedSegment]:
    segments: list[CachedSegment] = []
    for row, one in enumerate(sequences):
        assert one.kv is not None, "it is running"
        segments.append(CachedSegment(row, row + 1, one.kv, one.kv.own.length))
    row = len(sequences)
    for chunk in chunks:
        kv, rows = chunk.kv, chunk.end - chunk.start
        before, size = kv.own.length, rows if chunk.sequence is None else 1
        for place in range(before, before + rows, size):
            segments.append(CachedSegment(row, row + size, kv, place))
            row += size
    return segments


def lora_spans(rows: Iterable[tuple[int, SamplerWeights]]) -> list[LoraSpan]:
    """Which rows go through which adapter, from the number of rows of each member."""
    spans: list[LoraSpan] = []
    start = 0
    for weights, members in groupby(rows, lambda member: member[1]):
        end = start + sum(count for count, _ in members)
        if weights.lora is not None:
            spans.append(LoraSpan(start, end, weights.lora))
        start = end
    return spans
