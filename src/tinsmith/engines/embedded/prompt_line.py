"""The way of samples from waiting to running: who is read next, and who has memory.

    waiting   → reading           → starting        → running
    no memory   prompt by chunks,   prompt is read,   a token in
    yet         taking turns        room is awaited   every step

Samples begin in the order in which they came, once the memory that one of their sequences may need
is theirs; so what has begun can always go on. A prompt that begins as one that is being read waits
for it, and one that was read before is taken from the cache.

Used by one thread. Knows nothing of the model.
"""

# D feature

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from tinsmith.engines.embedded.kv_memory import KvMemory
from tinsmith.engines.embedded.packs import Chunk
from tinsmith.engines.embedded.prefix_cache import CHUNK_TOKENS, ReadPrompt, shared_tokens
from tinsmith.engines.embedded.samples import RunningSequence, Sample
from tinsmith.model.kv_cache import Run, SequenceKeys

MOST_READING = 8
"""Prompts that are read in turns; more would only share the same budget."""
MOST_LOOKED_AT = 64
"""How many waiting samples are looked at in a step: some wait for a prompt that another reads."""


class _Source(NamedTuple):
    """Where the beginning of a prompt is to be had."""

    tokens: int
    run: Run | None = None
    prompt: ReadPrompt | None = None


class PromptLine:
    """See the top of the module."""

    def __init__(self, memory: KvMemory, empty_run: Callable[[], Run]) -> None:
        self.hit_tokens = 0
        """Prompt tokens that were not computed, because they were kept."""
        self._memory = memory
        self._empty_run = empty_run
        self._waiting: deque[Sample] = deque()
        self._reading: deque[Sample] = deque()
        self._starting: deque[Sample] = deque()

    @property
    def waiting(self) -> int:
        """How many samples wait to be read or to begin a sequence."""
        return len(self._waiting) + len(self._starting)

    @property
    def reading(self) -> int:
        """How many prompts are being read."""
        return len(self._reading)

    def add(self, samples: list[Sample]) -> None:
        """Let samples wait behind those that do."""
        self._waiting.extend(samples)

    # Reading

    def begin(self, budget: int, *, is_idle: bool) -> list[tuple[Sample, Exception]]:
        """Let waiting samples begin to be read; returns those that could not.

        Args:
            budget: How many tokens a step reads.
            is_idle: No sequence runs.
        """
        failed: list[tuple[Sample, Exception]] = []
        for sample in list(islice(self._waiting, MOST_LOOKED_AT)):
            if not self._takes_more(budget):
                break
            source = self._find_source(sample)
            if source is None:  # another sample reads what it begins with
                continue
            try:
                is_begun = self._try_begin(sample, source)
                if not is_begun and is_idle and not self._reading and not self._starting:
                    # What it would reuse takes the room that it needs; nothing else can leave.
                    is_begun = self._try_begin(sample, _Source(0))
                if not is_begun:
                    break
            except Exception as exc:  # noqa: BLE001 - out of memory, of this sample
                failed.append((sample, exc))
            self._waiting.remove(sample)
        return failed

    def _takes_more(self, budget: int) -> bool:
        if len(self._reading) < MOST_READING:
            return True
        return sum(_chunk_of(sample).end - sample.read for sample in self._reading) < budget

    def _find_source(self, sample: Sample) -> _Source | None:
        """What is known of the prompt; None to wait until another sample has read more of it."""
        # Rows that a question is about are computed, whatever is known.
        most = sample.answers.first_row
        found = self._memory.cache.find(sample.prompt_keys, most)
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
        self.hit_tokens += source.tokens
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

    def next_chunks(self, budget: int) -> list[Chunk]:
        """One chunk of each prompt whose turn it is, up to the budget but one at least."""
        chunks: list[Chunk] = []
        for sample in self._reading:
            chunk = _chunk_of(sample)
            budget -= chunk.end - chunk.start
            if chunks and budget < 0:
                break
            chunks.append(chunk)
        self._reading.rotate(-len(chunks))  # the others are first in the next step
        return sorted(chunks, key=lambda chunk: chunk.sample.weights.number)

    def read(self, chunk: Chunk, hidden_TD: Tensor) -> None:
        """A chunk was computed; with the last one the sample may start its sequences."""
        sample = chunk.sample
        sample.read = chunk.end
        if sample.read == len(sample.prompt):
            sample.last_1D = hidden_TD[-1:].clone()
            self._reading.remove(sample)
            self._starting.append(sample)
            self._keep_prompt(sample)

    def _keep_prompt(self, sample: Sample) -> None:
        """Let other samples have what was read."""
        if sample.weights.is_dropped:
            return
        assert sample.run is not None and sample.last_1D is not None
        prompt = ReadPrompt(sample.prompt_keys, sample.run, sample.last_1D)
        if sample.shares_prompt:
            # The cache accounts for it from now on, for as long as this sample uses it and after.
            prompt.users = 1
            self._give_back(sample, self._memory.bytes_for(prompt.length))
        else:
            prompt.is_lent = True
        sample.read_prompt = prompt
        self._memory.cache.add(prompt)

    # Sequences

    def start_sequences(self, places: int) -> list[RunningSequence]:
        """Begin sequences of prompts that are read, as there is room, so many at most."""
        started: list[RunningSequence] = []
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
        return started

    def _has_place(self, sample: Sample, *, is_first: bool) -> bool:
        if sample.spare_places:
            return True
        if not is_first or not self._memory.try_take(sample.sequence_bytes):
            return False
        sample.taken_bytes += sample.sequence_bytes
        sample.spare_places = 1
        return True

    def end_sequence(self, sequence: RunningSequence) -> None:
        """A sequence has its last token; another may have its place."""
        sample = sequence.sample
        sequence.keys = None
        sample.running -= 1
        if sample.unstarted:
            sample.spare_places += 1
        elif sample.shares_prompt:
            self._give_back(sample, sample.sequence_bytes)

    def release(self, sample: Sample) -> None:
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
        length = prompt.length
        try:
            if run.bytes > 2 * self._memory.bytes_for(length):
                run = run.copy(length)
            run.length = length
            prompt.run, prompt.is_lent = run, False
        except Exception:  # noqa: BLE001 - no memory for a copy: it need not be kept
            prompt.is_lent = False
            self._memory.cache.remove(prompt)

    def _give_back(self, sample: Sample, size: int) -> None:
        sample.taken_bytes -= size
        self._memory.give_back(size)


def _chunk_of(sample: Sample) -> Chunk:
    """The next chunk of its prompt."""
    end = (sample.read // CHUNK_TOKENS + 1) * CHUNK_TOKENS
    return Chunk(sample, sample.read, min(end, len(sample.prompt)))
