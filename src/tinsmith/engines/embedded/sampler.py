"""Continuous batching: a step reads some of new prompts and draws a token for each sequence.

A step is one pack: one row for each running sequence, then chunks of prompts up to a budget, so
that a long prompt holds nobody up for longer than a few chunks take. Sequences join when their
prompt is read, and leave when they stop, at any step. Sequences of all weights share the pack; rows
of the same weights lie beside each other.

    waiting   → reading           → starting        → running
    no memory   prompt by chunks,   prompt is read,   a token in
    yet         taking turns        room is awaited   every step

What is drawn for a sample depends on its request alone, to the last bit: chunks are cut at fixed
places (`prefix_cache.py`), rows do not depend on rows beside them (`model/`), chance is counted
(`model/sample_tokens.py`), and how a prompt's keys are shared follows from the number of sequences.

Knows nothing of threads but that `admit`, `cancel` and the weights' methods come from any.
"""

# S sequence, T row of the pack, D feature, V vocabulary

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tinsmith.engines.base import SampleEvent, SampleOutcome, SampleWork, WeightsId
from tinsmith.engines.embedded.kv_memory import KvMemory
from tinsmith.engines.embedded.prefix_cache import CHUNK_TOKENS, ReadPrompt, shared_tokens
from tinsmith.engines.embedded.prompt_answers import not_numbers
from tinsmith.engines.embedded.samples import Best, RunningSequence, Sample, Weights
from tinsmith.engines.embedded.stops import stop_rule
from tinsmith.errors import NotFoundError, ValidationError
from tinsmith.model.attention import CachedAttention, CachedStretch
from tinsmith.model.kv_cache import Run, SequenceKeys
from tinsmith.model.lora import FusedLora, LoraSpan
from tinsmith.model.sample_tokens import chances, draw, top_logprobs
from tinsmith.model.transformer import Transformer

MOST_READING = 8
"""Prompts that are read in turns; more would only share the same budget."""
MOST_LOOKED_AT = 64
"""How many waiting samples are looked at in a step: some wait for a prompt that another reads."""
HEAD_ROWS = 128
"""For how many sequences logits are made at a time."""


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a sampler does at a time. None of it changes what is drawn."""

    kv_bytes: int = 2 << 30
    """What keys and values may take, those of cached prompts included."""
    prefill_tokens: int = 4 * CHUNK_TOKENS
    """How many tokens of prompts a step reads when no sequence is running."""
    busy_prefill_tokens: int = 2 * CHUNK_TOKENS
    """The same when some are, and wait for their next token meanwhile."""
    most_sequences: int = 512
    """How many sequences run at a time; others wait."""


class SamplerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler has done and holds."""

    steps: int
    read_tokens: int
    """Prompt tokens that were computed."""
    hit_tokens: int
    """Prompt tokens that were not, because they were kept."""
    drawn_tokens: int
    waiting: int
    reading: int
    running: int
    taken_bytes: int
    cached_bytes: int


class _Chunk(NamedTuple):
    sample: Sample
    start: int
    end: int


class _Source(NamedTuple):
    """Where the beginning of a prompt is to be had."""

    tokens: int
    run: Run | None = None
    prompt: ReadPrompt | None = None


class Sampler:
    """Draws samples from one base model and weights on it; see the top of the module."""

    def __init__(
        self,
        transformer: Transformer,
        *,
        tokenizer_folder: Path | None = None,
        settings: SamplerSettings | None = None,
    ) -> None:
        self._transformer = transformer
        self._shape = transformer.architecture
        self._tokenizer_folder = tokenizer_folder
        self._settings = settings or SamplerSettings()
        self._memory = KvMemory(self._shape, transformer.dtype, self._settings.kv_bytes)
        self._lock = threading.Lock()
        # Under the lock
        self._samples: dict[str, Sample] = {}
        self._arrived: list[Sample] = []
        self._cancelled: list[Sample] = []
        self._base = Weights(0, None)
        self._weights: dict[WeightsId, Weights] = {}
        self._dropped: list[int] = []
        self._last_number = 0
        # Of the thread that steps
        self._waiting: deque[Sample] = deque()
        self._reading: deque[Sample] = deque()
        self._starting: deque[Sample] = deque()
        self._running: list[RunningSequence] = []
        self._ended: list[tuple[Sample, SampleEvent]] = []
        self._steps = self._read_tokens = self._hit_tokens = self._drawn_tokens = 0

    # From any thread

    @property
    def samples(self) -> int:
        """How many were admitted and have not ended."""
        return len(self._samples)

    def admit(self, work: SampleWork) -> None:
        """Let a sample join at the next step; one whose id is here already is not admitted twice.

        Raises:
            NotFoundError: Its weights are not here.
            ValidationError: It asks for what cannot be done: a stop text without a tokenizer, a
                prompt that is no text or longer than the context, more memory than there is.
        """
        request = work.request
        stops = stop_rule(request.sampling_params, self._shape.eos_tokens, self._tokenizer_folder)
        most = self._most_tokens(work)
        with self._lock:
            if work.work_id in self._samples:
                return
            weights = self._base
            if work.weights_id is not None:
                if work.weights_id not in self._weights:
                    raise NotFoundError(f"the weights {work.weights_id} are not loaded")
                weights = self._weights[work.weights_id]
            sample = Sample(work, weights, stops, most, self._shape.vocabulary)
            self._samples[work.work_id] = sample
            self._arrived.append(sample)

    def _most_tokens(self, work: SampleWork) -> int:
        """How many tokens a sequence may have: by the request, the context and the memory."""
        length, asked = work.request.prompt.length, work.request.sampling_params.max_tokens
        room = self._shape.max_context - length
        if room < 1:
            raise ValidationError(
                f"the prompt has {length} tokens, and the context {self._shape.max_context}"
            )
        most = room if asked is None else max(1, min(asked, room))
        prompt = self._memory.bytes_for(length)
        fitting = self._memory.tokens_in(self._memory.limit_bytes - prompt)
        if fitting < (1 if asked is None else most):
            raise ValidationError(
                f"keys and values of {length} + {most} tokens take more than the "
                f"{self._memory.limit_bytes} bytes that there are for samples",
                remedy="ask for fewer tokens, or give the engine more memory",
            )
        return min(most, fitting)

    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next step; nothing more is told of it. Unknown ids are ignored."""
        with self._lock:
            sample = self._samples.pop(work_id, None)
            if sample is not None:
                sample.is_cancelled = True
                self._cancelled.append(sample)

    def add_weights(self, weights_id: WeightsId, lora: FusedLora) -> None:
        """Have weights to sample from; under a known id they take the place of the old ones."""
        with self._lock:
            self._forget_weights(weights_id)
            self._last_number += 1
            self._weights[weights_id] = Weights(self._last_number, lora)

    def drop_weights(self, weights_id: WeightsId) -> None:
        """Forget weights. Samples that were admitted with them have them until they end."""
        with self._lock:
            self._forget_weights(weights_id)

    def _forget_weights(self, weights_id: WeightsId) -> None:
        weights = self._weights.pop(weights_id, None)
        if weights is not None:
            self._dropped.append(weights.number)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether samples may be admitted with them."""
        return weights_id in self._weights

    def statistics(self) -> SamplerStatistics:
        """What it has done and holds; of another thread, roughly."""
        return SamplerStatistics(
            steps=self._steps,
            read_tokens=self._read_tokens,
            hit_tokens=self._hit_tokens,
            drawn_tokens=self._drawn_tokens,
            waiting=len(self._waiting) + len(self._arrived) + len(self._starting),
            reading=len(self._reading),
            running=len(self._running),
            taken_bytes=self._memory.taken_bytes,
            cached_bytes=self._memory.cache.bytes,
        )

    # By the thread that computes

    @torch.no_grad()
    def step(self) -> list[SampleEvent]:
        """Read the next chunks and draw the next tokens; tell what came and what ended."""
        self._take_messages()
        self._begin_reading()
        running, hidden_SD, chunks = self._forward(self._running, self._next_chunks())
        for chunk, hidden_TD in chunks:
            self._take_chunk(chunk, hidden_TD)
        started = self._start_sequences()
        if started:
            hidden_SD = torch.cat([hidden_SD, *(_last_row(one.sample) for one in started)])
        self._draw([*running, *started], hidden_SD)
        self._running = _by_weights(one for one in [*running, *started] if one.keys is not None)
        self._steps += 1
        return self._events()

    def fail_all(self, error: BaseException) -> list[SampleEvent]:
        """End every sample with an error."""
        self._take_messages()
        with self._lock:
            admitted = list(self._samples.values())
        for sample in admitted:
            self._fail(sample, error)
        self._running = []
        return self._events()

    def _take_messages(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            dropped, self._dropped = self._dropped, []
        self._waiting.extend(arrived)
        for sample in cancelled:
            self._release(sample)
        if cancelled:
            self._running = [one for one in self._running if one.keys is not None]
        for number in dropped:
            self._memory.cache.forget(number)

    def _events(self) -> list[SampleEvent]:
        """What is to be told, but nothing of samples that were cancelled meanwhile."""
        with self._lock:
            told = [(sample, event) for sample, event in self._ended if not sample.is_cancelled]
            for sample, event in told:
                if isinstance(event, SampleOutcome):
                    self._samples.pop(sample.work.work_id, None)
        self._ended = []
        return [event for _, event in told]

    # Prompts

    def _begin_reading(self) -> None:
        """Let waiting samples begin, in their order, as memory and the readers' turns allow."""
        for sample in list(islice(self._waiting, MOST_LOOKED_AT)):
            if not self._takes_more():
                break
            source = self._find_source(sample)
            if source is None:  # another sample reads what it begins with
                continue
            try:
                is_begun = self._try_begin(sample, source)
                if not is_begun and not (self._reading or self._starting or self._running):
                    # What it would reuse takes the room that it needs; nothing else can leave.
                    is_begun = self._try_begin(sample, _Source(0))
                if not is_begun:
                    break
            except Exception as exc:  # noqa: BLE001 - out of memory, of this sample
                self._fail(sample, exc)
                continue
            self._waiting.remove(sample)

    def _takes_more(self) -> bool:
        if len(self._reading) < MOST_READING:
            return True
        ready = sum(_chunk_of(sample).end - sample.read for sample in self._reading)
        return ready < self._settings.prefill_tokens

    def _find_source(self, sample: Sample) -> _Source | None:
        """What is known of the prompt; None to wait until another sample has read more of it."""
        # Rows that a question is about are computed, whatever is known.
        most = sample.answers.first_row
        found = self._memory.cache.find(sample.weights.number, sample.prompt, most)
        best = _Source(0) if found is None else _Source(found[1], found[0].run, found[0])
        for other in self._reading:
            if other.weights is sample.weights:
                tokens = shared_tokens(sample.prompt, other.prompt, most)
                if tokens <= best.tokens:
                    continue
                if tokens > other.read or tokens == len(sample.prompt):
                    return None
                best = _Source(tokens, other.run)
        return best

    def _try_begin(self, sample: Sample, source: _Source) -> bool:
        """Take the memory that it needs and begin; False if there is not enough now."""
        length, memory, prompt = len(sample.prompt), self._memory, source.prompt
        is_read = source.tokens == length
        shares = is_read and sample.shares_prompt and prompt is not None and not prompt.is_lent
        if sample.shares_prompt:
            sample.sequence_bytes = memory.bytes_for(sample.most)
            needed = sample.sequence_bytes + (0 if shares else memory.bytes_for(length))
        else:
            sample.sequence_bytes = needed = memory.bytes_for(length + sample.most)
        if prompt is not None:
            prompt.users += 1  # not to be forgotten for the sake of this sample
        try:
            if not memory.try_take(needed):
                return False
            sample.taken_bytes, sample.spare_places = needed, 1
            sample.run = self._first_run(source, is_shared=shares)
        finally:
            if prompt is not None and not (shares and sample.run is not None):
                prompt.users -= 1
        sample.read = sample.hits = source.tokens
        self._hit_tokens += source.tokens
        if is_read:
            assert prompt is not None
            sample.last_1D = prompt.last_1D
            sample.read_prompt = prompt if shares else None
            self._starting.append(sample)
        else:
            self._reading.append(sample)
        return True

    def _first_run(self, source: _Source, *, is_shared: bool) -> Run:
        if source.run is None:
            return self._empty_run()
        return source.run if is_shared else source.run.copy(source.tokens)

    def _empty_run(self) -> Run:
        return Run(self._shape, self._transformer.dtype, self._transformer.device)

    def _next_chunks(self) -> list[_Chunk]:
        """One chunk of each prompt whose turn it is, up to the budget but one at least."""
        settings = self._settings
        budget = settings.busy_prefill_tokens if self._running else settings.prefill_tokens
        chunks: list[_Chunk] = []
        for sample in self._reading:
            chunk = _chunk_of(sample)
            budget -= chunk.end - chunk.start
            if chunks and budget < 0:
                break
            chunks.append(chunk)
        self._reading.rotate(-len(chunks))  # the others are first in the next step
        return sorted(chunks, key=lambda chunk: chunk.sample.weights.number)

    def _take_chunk(self, chunk: _Chunk, hidden_TD: Tensor) -> None:
        sample = chunk.sample
        try:
            sample.answers.take(chunk.start, hidden_TD, self._transformer.head, sample.weights.lora)
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            self._fail(sample, exc)
            return
        sample.read = chunk.end
        self._read_tokens += chunk.end - chunk.start
        if sample.read == len(sample.prompt):
            sample.last_1D = hidden_TD[-1:].clone()
            self._reading.remove(sample)
            self._starting.append(sample)
            self._keep_prompt(sample)

    def _keep_prompt(self, sample: Sample) -> None:
        """Let other samples have what was read."""
        if not self._is_known(sample):
            return
        assert sample.run is not None and sample.last_1D is not None
        number, tokens = sample.weights.number, sample.prompt
        prompt = ReadPrompt(number, tokens, sample.run, sample.last_1D)
        if sample.shares_prompt:
            # The cache accounts for it from now on, for as long as this sample uses it and after.
            prompt.users = 1
            self._give_back(sample, self._memory.bytes_for(len(tokens)))
        else:
            prompt.is_lent = True
        sample.read_prompt = prompt
        self._memory.cache.add(prompt)

    def _is_known(self, sample: Sample) -> bool:
        weights_id = sample.work.weights_id
        return weights_id is None or self._weights.get(weights_id) is sample.weights

    # Sequences

    def _start_sequences(self) -> list[RunningSequence]:
        """Begin sequences of prompts that are read, as there is room."""
        started: list[RunningSequence] = []
        places = self._settings.most_sequences - len(self._running)
        for sample in list(self._starting):
            # Only the first may ask for more memory: others would take it away before its turn.
            is_first = sample is self._starting[0]
            while sample.unstarted and places > 0 and self._has_place(sample, is_first=is_first):
                assert sample.run is not None
                sample.spare_places -= 1
                shared = sample.run if sample.shares_prompt else None
                own = self._empty_run() if sample.shares_prompt else sample.run
                started.append(sample.start_sequence(SequenceKeys(shared, own)))
                places -= 1
            if not sample.unstarted:
                self._starting.remove(sample)
        return _by_weights(started)

    def _has_place(self, sample: Sample, *, is_first: bool) -> bool:
        if sample.spare_places:
            return True
        if not is_first or not self._memory.try_take(sample.sequence_bytes):
            return False
        sample.taken_bytes += sample.sequence_bytes
        sample.spare_places = 1
        return True

    def _forward(
        self, sequences: Sequence[RunningSequence], chunks: Sequence[_Chunk]
    ) -> tuple[list[RunningSequence], Tensor, list[tuple[_Chunk, Tensor]]]:
        """The hidden rows of sequences and chunks; without those that failed."""
        stretches = _stretches(sequences, chunks)
        if not stretches:
            return [], self._no_rows(), []
        lengths = [one.keys.own.length for one in stretches]
        try:
            hidden_TD = self._hidden(sequences, chunks, stretches)
        except Exception as exc:  # noqa: BLE001 - of one sample, to be found
            for stretch, length in zip(stretches, lengths, strict=True):
                stretch.keys.own.length = length
            return self._forward_halves(sequences, chunks, exc)
        rows = [
            (chunk, hidden_TD[stretch.start : stretch.end])
            for chunk, stretch in zip(chunks, stretches[len(sequences) :], strict=True)
        ]
        return list(sequences), hidden_TD[: len(sequences)], rows

    def _forward_halves(
        self, sequences: Sequence[RunningSequence], chunks: Sequence[_Chunk], error: Exception
    ) -> tuple[list[RunningSequence], Tensor, list[tuple[_Chunk, Tensor]]]:
        """A pack that failed, again in two: the one that cannot be computed fails alone."""
        if len(sequences) + len(chunks) == 1:
            self._fail(sequences[0].sample if sequences else chunks[0].sample, error)
            return [], self._no_rows(), []
        cut, chunk_cut = (len(sequences) + 1) // 2, len(chunks) // 2
        first = self._forward(sequences[:cut], chunks[:chunk_cut])
        # Its sample may have failed with another sequence in the first half.
        rest = [one for one in sequences[cut:] if one.keys is not None]
        second = self._forward(rest, chunks[chunk_cut:])
        alive = [*first[0], *second[0]]
        hidden_SD = torch.cat([first[1], second[1]])
        kept = [place for place, one in enumerate(alive) if one.keys is not None]
        return [alive[place] for place in kept], hidden_SD[kept], [*first[2], *second[2]]

    def _no_rows(self) -> Tensor:
        shape = (0, self._shape.hidden)
        return torch.empty(shape, dtype=self._transformer.dtype, device=self._transformer.device)

    def _hidden(
        self,
        sequences: Sequence[RunningSequence],
        chunks: Sequence[_Chunk],
        stretches: Sequence[CachedStretch],
    ) -> Tensor:
        tokens = [np.array([one.tokens[-1] for one in sequences], np.int64)]
        positions = [np.array([one.position for one in sequences], np.int64)]
        for sample, start, end in chunks:
            tokens.append(sample.prompt[start:end].astype(np.int64))
            positions.append(np.arange(start, end))
        device = self._transformer.device
        return self._transformer.hidden(
            torch.from_numpy(np.concatenate(tokens)).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            CachedAttention(stretches),
            _spans(
                [
                    *((1, one.sample.weights) for one in sequences),
                    *((end - start, sample.weights) for sample, start, end in chunks),
                ]
            ),
        )

    def _draw(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        """The next token of each sequence, from its hidden row."""
        for start in range(0, len(sequences), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            self._draw_some(sequences[rows], hidden_SD[rows])

    def _draw_some(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        try:
            spans = _spans((1, one.sample.weights) for one in sequences)
            logits_SV = self._transformer.head.logits(hidden_SD, spans)
            keys, counts = [one.key for one in sequences], [len(one.tokens) for one in sequences]
            drawn = draw(
                logits_SV,
                [one.sample.draws for one in sequences],
                chances(keys, counts).to(logits_SV.device),
            )
            tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
            best = _best_of(sequences, logits_SV, drawn.log_totals)
        except Exception as exc:  # noqa: BLE001 - of one sample, to be found
            if len(sequences) == 1:
                self._fail(sequences[0].sample, exc)
                return
            for place, one in enumerate(sequences):
                if one.keys is not None:
                    self._draw_some([one], hidden_SD[place : place + 1])
            return
        for row, one in enumerate(sequences):
            if one.keys is not None:
                self._take_token(one, tokens[row], logprobs[row], best.get(row))

    def _take_token(
        self, sequence: RunningSequence, token: int, logprob: float, best: Best | None
    ) -> None:
        sample = sequence.sample
        try:
            if not math.isfinite(logprob):
                raise not_numbers()
            sequence.add(token, logprob, best)
            self._drawn_tokens += 1
            if sample.work.is_streamed:
                self._ended.append((sample, sequence.news()))
            if sequence.stop_reason is not None:
                self._end_sequence(sequence)
            if sample.is_done:
                outcome = sample.outcome()
                self._release(sample)
                self._ended.append((sample, outcome))
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            self._fail(sample, exc)

    # Ends

    def _end_sequence(self, sequence: RunningSequence) -> None:
        sample = sequence.sample
        sequence.keys = None
        sample.running -= 1
        if sample.unstarted:
            sample.spare_places += 1
        elif sample.shares_prompt:
            self._give_back(sample, sample.sequence_bytes)

    def _fail(self, sample: Sample, error: BaseException) -> None:
        self._release(sample)
        outcome = SampleOutcome(work_id=sample.work.work_id, error=error)
        self._ended.append((sample, outcome))

    def _release(self, sample: Sample) -> None:
        """Let go of everything that a sample has, wherever it is."""
        for queue in (self._waiting, self._reading, self._starting):
            if sample in queue:
                queue.remove(sample)
        for sequence in sample.sequences:
            sequence.keys = None
        self._give_back(sample, sample.taken_bytes)
        prompt, run = sample.read_prompt, sample.run
        sample.read_prompt = sample.run = None
        if prompt is None or run is None:
            return
        if prompt.is_lent:
            self._return_prompt(prompt, run)
        else:
            prompt.users -= 1
        self._memory.trim()

    def _return_prompt(self, prompt: ReadPrompt, run: Run) -> None:
        """Keep of a sequence's run what the prompt has of it."""
        length = len(prompt.tokens)
        try:
            if run.bytes > 2 * self._memory.bytes_for(length):
                run = run.copy(length)
            run.length = length
            prompt.run, prompt.is_lent = run, False
        except Exception:  # noqa: BLE001 - no memory for a copy: it need not be kept
            self._memory.cache.remove(prompt)

    def _give_back(self, sample: Sample, size: int) -> None:
        sample.taken_bytes -= size
        self._memory.give_back(size)


def _chunk_of(sample: Sample) -> _Chunk:
    """The next chunk of its prompt."""
    end = (sample.read // CHUNK_TOKENS + 1) * CHUNK_TOKENS
    return _Chunk(sample, sample.read, min(end, len(sample.prompt)))


def _last_row(sample: Sample) -> Tensor:
    assert sample.last_1D is not None, "its prompt is read"
    return sample.last_1D


def _by_weights(sequences: Iterable[RunningSequence]) -> list[RunningSequence]:
    return sorted(sequences, key=lambda one: one.sample.weights.number)


def _stretches(
    sequences: Sequence[RunningSequence], chunks: Sequence[_Chunk]
) -> list[CachedStretch]:
    stretches: list[CachedStretch] = []
    for row, one in enumerate(sequences):
        assert one.keys is not None, "it runs"
        stretches.append(CachedStretch(row, row + 1, one.keys))
    row = len(sequences)
    for sample, start, end in chunks:
        assert sample.run is not None, "it is being read"
        keys = SequenceKeys(None, sample.run)
        stretches.append(CachedStretch(row, row + end - start, keys))
        row += end - start
    return stretches


def _spans(rows: Iterable[tuple[int, Weights]]) -> list[LoraSpan]:
    """Which rows go through which adapter, given how many rows each member has."""
    spans: list[LoraSpan] = []
    start = 0
    for weights, members in groupby(rows, lambda member: member[1]):
        end = start + sum(count for count, _ in members)
        if weights.lora is not None:
            spans.append(LoraSpan(start, end, weights.lora))
        start = end
    return spans


def _best_of(
    sequences: Sequence[RunningSequence], logits_SV: Tensor, log_totals_S: Tensor
) -> dict[int, Best]:
    """The likeliest tokens in the rows of sequences that ask for them."""
    wanted: dict[int, list[int]] = {}
    for row, one in enumerate(sequences):
        k = one.sample.work.request.topk_sample_logprobs
        if k:
            wanted.setdefault(k, []).append(row)
    found: dict[int, Best] = {}
    for k, rows in wanted.items():
        ids_SK, logprobs_SK = top_logprobs(logits_SV[rows], log_totals_S[rows], k)
        parts = zip(ids_SK.cpu().numpy(), logprobs_SK.cpu().numpy(), strict=True)
        found.update(zip(rows, parts, strict=True))
    return found
