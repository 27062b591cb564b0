"""Continuous batching: a step reads some of new prompts and draws a token for each sequence.

A step is one pack: one row for each running sequence, then chunks of prompts up to a budget, so
that a long prompt holds nobody up for longer than a few chunks take. Sequences join when their
prompt is read (`prompt_line.py`), and leave when they stop, at any step. Sequences of all weights
share the pack (`packs.py`); rows of the same weights lie beside each other.

While samples of several owners are here, a step is kept short for the sake of those that have few:
of an owner that has many sequences only the first ones take part (`SamplerSettings.shared_rows`).
The others keep their KV cache and go on when there is room for them.

What is drawn for a sample depends on its request alone, to the last bit: chunks are cut at fixed
places (`prefix_cache.py`), rows do not depend on rows beside them (`model/`), chance is counted
(`model/sample_tokens.py`), and how a prompt's keys are shared follows from the number of sequences.

Knows nothing of threads but that `admit`, `cancel` and the weights' methods come from any.
"""

# S sequence, T row of the pack, D feature, V vocabulary

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tinsmith.engines.base import SampleEvent, SampleOutcome, SampleWork, WeightsId
from tinsmith.engines.embedded.kv_memory import KvMemory
from tinsmith.engines.embedded.packs import Chunk, read_pack, spans_of_weights
from tinsmith.engines.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engines.embedded.prompt_answers import not_numbers
from tinsmith.engines.embedded.prompt_line import PromptLine
from tinsmith.engines.embedded.samples import Best, RunningSequence, Sample, Weights
from tinsmith.engines.embedded.stops import stop_rule
from tinsmith.errors import NotFoundError, ValidationError
from tinsmith.model.kv_cache import Run
from tinsmith.model.lora import FusedLora
from tinsmith.model.sample_tokens import chances, draw, top_logprobs
from tinsmith.model.transformer import Transformer

HEAD_ROWS = 128
"""For how many sequences logits are made at a time."""

PROMPT_TOKENS_FOR_EACH = 8
"""How many tokens of prompts are read, if many prompts wait, for each sequence that runs. They take
about twice as long as that sequence's own token, and those that came together begin together."""


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a sampler does at a time. None of it changes what is drawn."""

    kv_bytes: int = 2 << 30
    """What keys and values may take, those of cached prompts included."""
    prefill_tokens: int = 4 * CHUNK_TOKENS
    """How many tokens of prompts a step reads when no sequence is running."""
    busy_prefill_tokens: int = 2 * CHUNK_TOKENS
    """The same when some are, and wait for their next token meanwhile; more if many are."""
    most_sequences: int = 128
    """How many sequences take part in a step, and how many of one owner run; others wait. A core
    gains little from more, and whoever comes waits for the end of a step."""
    shared_rows: int = 16
    """How many sequences of one owner take part in a step while other owners have fewer."""


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
    pauses: int
    """How often a sequence gave way to older ones, for lack of memory."""
    taken_bytes: int
    cached_bytes: int


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
        self._owners = Counter[str]()
        """How many of them each has."""
        self._arrived: list[Sample] = []
        self._cancelled: list[Sample] = []
        self._base = Weights(0, None)
        self._weights: dict[WeightsId, Weights] = {}
        self._dropped: list[int] = []
        self._last_number = 0
        # Of the thread that steps
        self._line = PromptLine(self._memory, self._empty_run)
        self._running: list[RunningSequence] = []
        self._told: list[tuple[Sample, SampleEvent]] = []
        self._steps = self._read_tokens = self._drawn_tokens = 0

    def _empty_run(self) -> Run:
        return Run(self._shape, self._transformer.dtype, self._transformer.device)

    # From any thread

    @property
    def samples(self) -> int:
        """How many were admitted and have not ended."""
        return len(self._samples)

    @property
    def owners(self) -> set[str]:
        """Whose samples are here."""
        with self._lock:
            return set(self._owners)

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
            self._owners[work.owner] += 1
            self._arrived.append(sample)

    def _most_tokens(self, work: SampleWork) -> int:
        """How many tokens a sequence may have: by the request, the context and the memory."""
        if work.request.num_samples < 1:
            raise ValidationError(
                f"num_samples is {work.request.num_samples}; it must be 1 or more"
            )
        length, asked = work.request.prompt.length, work.request.sampling_params.max_tokens
        if length > self._shape.max_context:
            raise ValidationError(
                f"the prompt has {length} tokens, and the context {self._shape.max_context}"
            )
        room = max(1, self._shape.max_context - length)
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
            weights.is_dropped = True
            self._dropped.append(weights.number)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether samples may be admitted with them."""
        return weights_id in self._weights

    def statistics(self) -> SamplerStatistics:
        """What it has done and holds; of another thread, roughly."""
        return SamplerStatistics(
            steps=self._steps,
            read_tokens=self._read_tokens,
            hit_tokens=self._line.hit_tokens,
            drawn_tokens=self._drawn_tokens,
            waiting=len(self._arrived) + self._line.waiting,
            reading=self._line.reading,
            running=len(self._running),
            pauses=self._line.pauses,
            taken_bytes=self._memory.taken_bytes,
            cached_bytes=self._memory.cache.bytes,
        )

    # By the thread that computes

    @torch.inference_mode()
    def step(self, others: Collection[str] = ()) -> list[SampleEvent]:
        """Read the next chunks and draw the next tokens; tell what came and what ended.

        Args:
            others: Owners that wait for the end of this step elsewhere.
        """
        self._take_messages()
        held = _by_weights([*self._running, *self._line.resumed()])
        running, held_back = self._share(held, self.owners.union(others))
        running = self._line.grow(running)
        chunks = self._next_chunks(len(running), held_back)
        running = [one for one in running if one.keys is not None]  # some may have given way
        rows = read_pack(self._transformer, running, chunks)
        self._fail_some(rows.failed)
        for chunk, hidden_TD in rows.chunks:
            self._take_chunk(chunk, hidden_TD)
        running, hidden_SD = rows.sequences, rows.hidden
        held = [one for one in held if one.keys is not None]
        most = self._settings.most_sequences
        started = _by_weights(self._line.start_sequences(most, held, held_back))
        if started:
            hidden_SD = torch.cat([hidden_SD, *(_last_row(one.sample) for one in started)])
        self._draw([*running, *started], hidden_SD)
        self._running = [one for one in [*held, *started] if one.keys is not None]
        self._fail_some(self._line.failed)
        self._steps += 1
        return self._events()

    def fail_all(self, error: BaseException) -> list[SampleEvent]:
        """End every sample with an error."""
        self._take_messages()
        with self._lock:
            admitted = list(self._samples.values())
        for sample in admitted:
            self._fail(sample, error)
        self._line.failed.clear()  # they are among all
        self._running = []
        return self._events()

    def _take_messages(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            dropped, self._dropped = self._dropped, []
        self._line.add(arrived)
        for sample in cancelled:
            self._line.release(sample)
        if cancelled:
            self._running = [one for one in self._running if one.keys is not None]
        for number in dropped:
            self._memory.cache.forget(number)

    def _events(self) -> list[SampleEvent]:
        """What is to be told, but nothing of samples that were cancelled meanwhile."""
        with self._lock:
            told = [(sample, event) for sample, event in self._told if not sample.is_cancelled]
            for sample, event in told:
                if isinstance(event, SampleOutcome):
                    self._forget(sample.work.work_id)
        self._told = []
        return [event for _, event in told]

    def _share(
        self, held: list[RunningSequence], owners: Collection[str]
    ) -> tuple[list[RunningSequence], set[str]]:
        """Who takes part in a step, and the owners that have more than may take part.

        Of an owner those that came first do: they end, and others take their place.
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

    def _next_chunks(self, running: int, held_back: Collection[str]) -> list[Chunk]:
        budget = self._settings.prefill_tokens
        if running:
            budget = max(self._settings.busy_prefill_tokens, PROMPT_TOKENS_FOR_EACH * running)
        self._line.begin(budget, held_back)
        return self._line.next_chunks(budget, held_back)

    def _take_chunk(self, chunk: Chunk, hidden_TD: Tensor) -> None:
        head, sample = self._transformer.head, chunk.sample
        if chunk.sequence is not None:
            return
        try:
            sample.answers.take(chunk.start, hidden_TD, head, sample.weights.lora)
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            self._fail(sample, exc)
            return
        self._read_tokens += chunk.end - chunk.start
        self._line.read(chunk, hidden_TD)

    def _draw(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        """The next token of each sequence, from its hidden row."""
        for start in range(0, len(sequences), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            self._draw_some(sequences[rows], hidden_SD[rows])

    def _draw_some(self, sequences: Sequence[RunningSequence], hidden_SD: Tensor) -> None:
        try:
            spans = spans_of_weights((1, one.sample.weights) for one in sequences)
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
                self._told.append((sample, sequence.news()))
            if sequence.stop_reason is not None:
                self._line.end_sequence(sequence)
            if sample.is_done:
                outcome = sample.outcome()
                self._line.release(sample)
                self._told.append((sample, outcome))
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            self._fail(sample, exc)

    def _fail_some(self, failed: list[tuple[Sample, Exception]]) -> None:
        for sample, error in failed:
            self._fail(sample, error)
        failed.clear()

    def _fail(self, sample: Sample, error: BaseException) -> None:
        self._line.release(sample)
        outcome = SampleOutcome(work_id=sample.work.work_id, error=error)
        self._told.append((sample, outcome))


def _last_row(sample: Sample) -> Tensor:
    assert sample.last_1D is not None, "its prompt is read"
    return sample.last_1D


def _by_weights(sequences: Iterable[RunningSequence]) -> list[RunningSequence]:
    return sorted(sequences, key=lambda one: one.sample.weights.number)


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
