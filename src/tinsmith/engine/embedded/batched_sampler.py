"""Continuous batching with chunked prefill: each step decodes a token for every running sequence.

A step is one packed batch: a row for each running sequence, then chunks of prompts up to a budget,
so that a long prompt delays decoding by a few chunks at most. Sequences join when their prompt is
prefilled (`prefill_queue.py`) and leave when they stop, at any step. Sequences of all weights share
the batch (`step_batch.py`); rows of the same weights are adjacent.

While several owners have samples, steps are kept short for owners with few of them: of an owner
with many sequences only the first take part (`SamplerSettings.shared_rows`). The others keep their
KV cache and continue when there is room.

The result of a sample depends on its request alone, bit for bit: chunks start at fixed positions
(`prefix_cache.py`), rows do not depend on rows beside them (`model/`), random numbers are
counter-based (`model/token_sampling.py`), and only the number of sequences decides whether a
prompt's KV cache is shared.

Thread-safe are `admit`, `cancel` and the methods for weights; a single thread calls the others.
"""

# S sequence, T row of the batch, D feature, V vocabulary

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tinsmith.engine.base import SampleEvent, SampleOutcome, SampleWork, WeightsId
from tinsmith.engine.embedded.prefill_queue import PrefillQueue
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS, KvMemory
from tinsmith.engine.embedded.prompt_logprobs import non_finite_logits
from tinsmith.engine.embedded.running_samples import (
    Best,
    RunningSequence,
    Sample,
    SamplerWeights,
    stop_rule,
)
from tinsmith.engine.embedded.step_batch import PrefillChunk, lora_spans, run_step
from tinsmith.engine.model.kv_cache import KvBuffer
from tinsmith.engine.model.lora import FusedLora
from tinsmith.engine.model.token_sampling import draw, top_logprobs, uniform_numbers
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import NotFoundError, ValidationError

HEAD_ROWS = 128
"""Sequences whose logits are computed at a time."""

PREFILL_TOKENS_PER_SEQUENCE = 8
"""Prefill tokens per running sequence when many prompts wait. They take about twice as long as the
sequence's own token, and samples that arrive together start together."""


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a sampler does per step. Does not affect results."""

    kv_bytes: int = 2 << 30
    """Memory for the KV cache, the prefix cache included."""
    prefill_tokens: int = 4 * CHUNK_TOKENS
    """Prefill tokens per step when no sequence is running."""
    busy_prefill_tokens: int = 2 * CHUNK_TOKENS
    """Prefill tokens per step beside running sequences; more if many are running."""
    most_sequences: int = 128
    """Maximum sequences in a step, and running sequences per owner. More gain little throughput,
    and a new sample waits for the end of a step."""
    shared_rows: int = 16
    """Sequences of one owner per step while other owners have fewer."""


class BatchedSampler:
    """Samples from one base model and its sampler weights."""

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
        self._owners = Counter[str]()
        """Samples per owner."""
        self._arrived: list[Sample] = []
        self._cancelled: list[Sample] = []
        self._base = SamplerWeights(0, None)
        self._weights: dict[WeightsId, SamplerWeights] = {}
        self._dropped: list[int] = []
        self._last_number = 0
        # Used by the stepping thread only
        self._queue = PrefillQueue(self._memory, self._empty_buffer)
        self._running: list[RunningSequence] = []
        self._due: list[tuple[Sample, SampleEvent]] = []
        self._prefilled_tokens = self._sampled_tokens = 0

    def _empty_buffer(self) -> KvBuffer:
        return KvBuffer(self._shape, self._transformer.dtype, self._transformer.device)

    # From any thread

    @property
    def samples(self) -> int:
        """Admitted samples that have not ended."""
        return len(self._samples)

    @property
    def owners(self) -> set[str]:
        """Owners with admitted samples."""
        with self._lock:
            return set(self._owners)

    def admit(self, work: SampleWork) -> None:
        """Add a sample at the next step; no effect if its id is already admitted.

        Raises:
            NotFoundError: Its weights are not loaded.
            ValidationError: It cannot be sampled: a stop text without a tokenizer, a prompt that is
                not text or longer than the context, or not enough memory.
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
            self._owners[work.owner] += 1
            self._arrived.append(sample)

    def _most_tokens(self, work: SampleWork) -> int:
        """Maximum tokens per sequence, by the request, the context and the memory."""
        if work.request.num_samples < 1:
            raise ValidationError(
                f"num_samples is {work.request.num_samples}; it must be 1 or more"
            )
        length, asked = work.request.prompt.length, work.request.sampling_params.max_tokens
        if length > self._shape.max_context:
            raise ValidationError(
                f"the prompt has {length} tokens; the context is {self._shape.max_context}"
            )
        room = max(1, self._shape.max_context - length)
        most = room if asked is None else max(1, min(asked, room))
        prompt = self._memory.bytes_for(length)
        fitting = self._memory.tokens_in(self._memory.limit_bytes - prompt)
        if fitting < (1 if asked is None else most):
            raise ValidationError(
                f"the KV cache of {length} + {most} tokens exceeds the "
                f"{self._memory.limit_bytes} bytes available for sampling",
                remedy="reduce max_tokens, or give the engine more memory",
            )
        return min(most, fitting)

    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next step; no events follow. Unknown ids are ignored."""
        with self._lock:
            sample = self._forget(work_id)
            if sample is not None:
                sample.is_cancelled = True
                self._cancelled.append(sample)

    def _forget(self, work_id: str) -> Sample | None:
        sample = self._samples.pop(work_id, None)
        if sample is not None:
            self._owners[sample.owner] -= 1
            if not self._owners[sample.owner]:
                del self._owners[sample.owner]
        return sample

    def add_weights(self, weights_id: WeightsId, lora: FusedLora) -> None:
        """Add weights to sample from; replaces weights of the same id."""
        with self._lock:
            self._forget_weights(weights_id)
            self._last_number += 1
            self._weights[weights_id] = SamplerWeights(self._last_number, lora)

    def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload weights. Samples that were admitted with them keep them until they end."""
        with self._lock:
            self._forget_weights(weights_id)

    def _forget_weights(self, weights_id: WeightsId) -> None:
        weights = self._weights.pop(weights_id, None)
        if weights is not None:
            weights.is_dropped = True
            self._dropped.append(weights.number)

    # Stepping thread

    @torch.inference_mode()
    def step(self, others: Collection[str] = ()) -> list[SampleEvent]:
        """Compute the next prefill chunks and sample the next tokens; returns the new events.

        Args:
            others: Owners that wait for this step at other samplers.
        """
        self._process_messages()
        held = _by_weights([*self._running, *self._queue.resumed()])
        running, held_back = self._share_step(held, self.owners.union(others))
        running = self._queue.grow(running)
        chunks = self._next_chunks(len(running), held_back)
        running = [one for one in running if one.kv is not None]  # some may have been preempted
        rows = run_step(self._transformer, running, chunks)
        self._fail_samples(rows.failed)
        for chunk, hidden_TD in rows.chunks:
            self._finish_chunk(chunk, hidden_TD)
        running, hidden_SD = rows.sequences, rows.hidden
        held = [one for one in held if one.kv is not None]
        most = self._settings.most_sequences
        started = _by_weights(self._queue.start_sequences(most, held, held_back))
        if started:
            hidden_SD = torch.cat([hidden_SD, *(_last_row(one.sample) for one in started)])
        self._draw([*running, *started], hidden_SD)
        self._running = [one for one in [*held, *started] if one.kv is not None]
        self._fail_samples(self._queue.failed)
        return self._events()

    def fail_all(self, error: BaseException) -> list[SampleEvent]:
        """End every sample with an error."""
        self._process_messages()
        with self._lock:
            admitted = list(self._samples.values())
        for sample in admitted:
            self._fail(sample, error)
        self._queue.failed.clear()  # included above
        self._running = []
        return self._events()

    def _process_messages(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            dropped, self._dropped = self._dropped, []
        self._queue.add(arrived)
        for sample in cancelled:
            self._queue.release(sample)
        if cancelled:
            self._running = [one for one in self._running if one.kv is not None]
        for number in dropped:
            self._memory.cache.forget(number)

    def _events(self) -> list[SampleEvent]:
        """The new events, without those of samples cancelled meanwhile."""
        with self._lock:
            due = [(sample, event) for sample, event in self._due if not sample.is_cancelled]
            for sample, event in due:
                if isinstance(event, SampleOutcome):
                    self._forget(sample.work.work_id)
        self._due = []
        return [event for _, event in due]

    def _share_step(
        self, held: list[RunningSequence], owners: Collection[str]
    ) -> tuple[list[RunningSequence], set[str]]:
        """The sequences that take part in a step, and the owners that have more than that.

        An owner's first sequences take part until they end.
        """
        if len(owners) < 2:
            return held, set()
        of_owner: dict[str, list[RunningSequence]] = {owner: [] for owner in owners}
        for one in sorted(held, key=lambda one: (one.sample.number, one.index)):
            of_owner.setdefault(one.sample.owner, []).append(one)
        most = max(self._settings.shared_rows, 2 * min(map(len, of_owner.values())))
        left = self._settings.most_sequences
        chosen: list[RunningSequence] = []
        held_back: set[str] = set()
        by_size = sorted(of_owner.items(), key=lambda item: len(item[1]))
        for place, (owner, own) in enumerate(by_size):
            rows = max(1, min(most, left // (len(by_size) - place)))
            chosen += own[:rows]
            left -= len(own[:rows])
            if len(own) >= rows:
                held_back.add(owner)
        return _by_weights(chosen), held_back

    def _next_chunks(self, running: int, held_back: Collection[str]) -> list[PrefillChunk]:
        budget = self._settings.prefill_tokens
        if running:
            budget = max(self._settings.busy_prefill_tokens, PREFILL_TOKENS_PER_SEQUENCE * running)
        self._queue.start_prefill(budget, held_back)
        return self._queue.next_chunks(budget, held_back)

    def _finish_chunk(self, chunk: PrefillChunk, hidden_TD: Tensor) -> None:
        head, sample = self._transformer.head, chunk.sample
        if chunk.sequence is not None:
            return
        try:
            sample.prompt_logprobs.add_rows(chunk.start, hidden_TD, head, sample.weights.lora)
        except Exception as exc:  # noqa: BLE001 - this sample fails alone
            self._fail(sample, exc)
            return
        self._prefilled_tokens += chunk.end - chunk.start
        self._queue.finish_chunk(chunk, hidden_TD)

    def _draw(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        """Sample the next token of each sequence from its hidden state."""
        for start in range(0, len(sequences), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            self._draw_some(sequences[rows], hidden_SD[rows])

    def _draw_some(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        try:
            spans = lora_spans((1, one.sample.weights) for one in sequences)
            logits_SV = self._transformer.head.logits(hidden_SD, spans)
            keys, counts = [one.key for one in sequences], [len(one.tokens) for one in sequences]
            drawn = draw(
                logits_SV,
                [one.sample.draws for one in sequences],
                uniform_numbers(keys, counts).to(logits_SV.device),
            )
            tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
            best = _top_tokens(sequences, logits_SV, drawn.logsumexp)
        except Exception as exc:  # noqa: BLE001 - retried one by one to find the sample
            if len(sequences) == 1:
                self._fail(sequences[0].sample, exc)
                return
            for place, one in enumerate(sequences):
                if one.kv is not None:
                    self._draw_some([one], hidden_SD[place : place + 1])
            return
        for row, one in enumerate(sequences):
            if one.kv is not None:
                self._add_token(one, tokens[row], logprobs[row], best.get(row))

    def _add_token(
        self, sequence: RunningSequence, token: int, logprob: float, best: Best | None
    ) -> None:
        sample = sequence.sample
        try:
            if not math.isfinite(logprob):
                raise non_finite_logits()
            sequence.add(token, logprob, best)
            self._sampled_tokens += 1
            if sample.work.is_streamed:
                self._due.append((sample, sequence.new_tokens()))
            if sequence.stop_reason is not None:
                self._queue.end_sequence(sequence)
            if sample.is_done:
                outcome = sample.outcome()
                self._queue.release(sample)
                self._due.append((sample, outcome))
        except Exception as exc:  # noqa: BLE001 - this sample fails alone
            self._fail(sample, exc)

    def _fail_samples(self, failed: list[tuple[Sample, Exception]]) -> None:
        for sample, error in failed:
            self._fail(sample, error)
        failed.clear()

    def _fail(self, sample: Sample, error: BaseException) -> None:
        self._queue.release(sample)
        outcome = SampleOutcome(work_id=sample.work.work_id, error=error)
        self._due.append((sample, outcome))


def _last_row(sample: Sample) -> Tensor:
    assert sample.last_1D is not None, "the prompt is prefilled"
    return sample.last_1D


def _by_weights(sequences: Iterable[RunningSequence]) -> list[RunningSequence]:
    return sorted(sequences, key=lambda one: one.sample.weights.number)


def _top_tokens(
    sequences: Sequence[RunningSequence], logits_SV: Tensor, logsumexp_S: Tensor
) -> dict[int, Best]:
    """The top tokens of the sequences that request them."""
    wanted: dict[int, list[int]] = {}
    for row, one in enumerate(sequences):
        k = one.sample.work.request.topk_sample_logprobs
        if k:
            wanted.setdefault(k, []).append(row)
    found: dict[int, Best] = {}
    for k, rows in wanted.items():
        ids_SK, logprobs_SK = top_logprobs(logits_SV[rows], logsumexp_S[rows], k)
        parts = zip(ids_SK.cpu().numpy(), logprobs_SK.cpu().numpy(), strict=True)
        found.update(zip(rows, parts, strict=True))
    return found
