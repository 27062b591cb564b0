"""One pack of a step: a row for each running sequence, and chunks of prompts behind them.

A pack that cannot be computed (out of memory, a fault) is computed again in two parts, and so on:
what cannot be computed alone fails, and nothing else does.
"""

# S sequence, T row of the pack, D feature

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinsmith.engines.embedded.samples import RunningSequence, Sample, Weights
from tinsmith.model.cached_attention import CachedAttention
from tinsmith.model.kv_cache import CachedStretch, SequenceKeys
from tinsmith.model.lora import LoraSpan
from tinsmith.model.transformer import Transformer

Array: TypeAlias = "np.ndarray[Any, Any]"


class Chunk(NamedTuple):
    """Tokens that are read in one step: of a prompt, or of a sequence that goes on after a pause.

    Those of a sequence were drawn one by one, and are read as they were then.
    """

    sample: Sample
    start: int
    end: int
    sequence: RunningSequence | None = None

    @property
    def tokens(self) -> Array:
        """Their ids."""
        if self.sequence is None:
            return self.sample.prompt[self.start : self.end].astype(np.int64)
        return np.array(self.sequence.tokens[self.start : self.end], np.int64)

    @property
    def positions(self) -> Array:
        """Where they are in the whole sequence."""
        before = 0 if self.sequence is None else len(self.sample.prompt)
        return np.arange(before + self.start, before + self.end)

    @property
    def keys(self) -> SequenceKeys:
        """What they are added to."""
        if self.sequence is None:
            assert self.sample.run is not None, "it is being read"
            return SequenceKeys(None, self.sample.run)
        assert self.sequence.keys is not None, "it goes on"
        return self.sequence.keys


class PackRows(NamedTuple):
    """The hidden rows of a pack."""

    sequences: list[RunningSequence]
    hidden: Tensor
    """A row for each sequence."""
    chunks: list[tuple[Chunk, Tensor]]
    failed: list[tuple[Sample, Exception]]
    """Samples that could not be computed; they are in none of the others."""


def read_pack(
    transformer: Transformer, sequences: Sequence[RunningSequence], chunks: Sequence[Chunk]
) -> PackRows:
    """Compute the pack. The runs of what was computed have grown by it.

    Args:
        transformer: The base model.
        sequences: Those of the same weights beside each other, as are the chunks.
        chunks: At most one of each prompt and of each sequence that goes on.
    """
    if not sequences and not chunks:
        return PackRows([], _no_rows(transformer), [], [])
    stretches = _stretches(sequences, chunks)
    lengths = [one.keys.own.length for one in stretches]
    try:
        hidden_TD = _hidden(transformer, sequences, chunks, stretches)
    except Exception as exc:  # noqa: BLE001 - of one sample, to be found
        for stretch, length in zip(stretches, lengths, strict=True):
            stretch.keys.own.length = length
        return _read_halves(transformer, sequences, chunks, exc)
    sizes = [len(sequences), *(chunk.end - chunk.start for chunk in chunks)]
    hidden_SD, *parts = hidden_TD.split(sizes)
    return PackRows(list(sequences), hidden_SD, list(zip(chunks, parts, strict=True)), [])


def _read_halves(
    transformer: Transformer,
    sequences: Sequence[RunningSequence],
    chunks: Sequence[Chunk],
    error: Exception,
) -> PackRows:
    if len(sequences) + len(chunks) == 1:
        sample = sequences[0].sample if sequences else chunks[0].sample
        return PackRows([], _no_rows(transformer), [], [(sample, error)])
    cut, chunk_cut = (len(sequences) + 1) // 2, len(chunks) // 2
    first = read_pack(transformer, sequences[:cut], chunks[:chunk_cut])
    lost = {id(sample) for sample, _ in first.failed}
    rest = [one for one in sequences[cut:] if id(one.sample) not in lost]
    second = read_pack(transformer, rest, chunks[chunk_cut:])
    lost |= {id(sample) for sample, _ in second.failed}
    read = [*first.sequences, *second.sequences]
    kept = [place for place, one in enumerate(read) if id(one.sample) not in lost]
    return PackRows(
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
    chunks: Sequence[Chunk],
    stretches: Sequence[CachedStretch],
) -> Tensor:
    tokens = np.array([one.tokens[-1] for one in sequences], np.int64)
    positions = np.array([one.position for one in sequences], np.int64)
    rows = [(1, one.sample.weights) for one in sequences]
    if chunks:
        tokens = np.concatenate([tokens, *(chunk.tokens for chunk in chunks)])
        positions = np.concatenate([positions, *(chunk.positions for chunk in chunks)])
        rows += [(chunk.end - chunk.start, chunk.sample.weights) for chunk in chunks]
    return transformer.hidden(
        torch.from_numpy(tokens).to(transformer.device),
        torch.from_numpy(positions).to(transformer.device),
        CachedAttention(stretches),
        spans_of_weights(rows),
    )


def _stretches(
    sequences: Sequence[RunningSequence], chunks: Sequence[Chunk]
) -> list[CachedStretch]:
    stretches: list[CachedStretch] = []
    for row, one in enumerate(sequences):
        assert one.keys is not None, "it runs"
        stretches.append(CachedStretch(row, row + 1, one.keys, one.keys.own.length))
    row = len(sequences)
    for chunk in chunks:
        keys, rows = chunk.keys, chunk.end - chunk.start
        before, size = keys.own.length, rows if chunk.sequence is None else 1
        for place in range(before, before + rows, size):
            stretches.append(CachedStretch(row, row + size, keys, place))
            row += size
    return stretches


def spans_of_weights(rows: Iterable[tuple[int, Weights]]) -> list[LoraSpan]:
    """Which rows go through which adapter, given how many rows each member has."""
    spans: list[LoraSpan] = []
    start = 0
    for weights, members in groupby(rows, lambda member: member[1]):
        end = start + sum(count for count, _ in members)
        if weights.lora is not None:
            spans.append(LoraSpan(start, end, weights.lora))
        start = end
    return spans
