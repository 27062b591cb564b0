"""The path of a sample from waiting to running: prefill order, KV memory and preemption.

    waiting   → prefilling          → prefilled         → running
    no KV       prompt in chunks,     waits for room      one token
    memory yet  round robin           to start            per step

Samples of one owner start in arrival order. Owners alternate: an owner's first sample comes before
the second sample of any other. A prompt that shares a prefix with one that the same owner is
prefilling waits for it; a prefix that was computed before comes from the prefix cache.

A sequence reserves memory as it grows, since its final length is unknown. When memory runs out, the
last sequence in the order is *preempted*: it loses its KV cache and resumes later. The first sample
is never preempted, and a sample that would not fit alone is not admitted, so every sample finishes.
A resumed sequence recomputes the keys and values of its tokens one by one, as when they were
sampled, and continues with the same tokens as without the preemption. Because that costs the work
twice, nothing starts or resumes until the running sequences have room to grow by half, unless it
is ahead of other owners' samples in the order; then these are preempted for it.

Used by one thread. Knows nothing of the model.
"""

# D feature

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from tinsmith.engine.embedded.prefix_cache import (
    CHUNK_TOKENS,
    CachedPrompt,
    KvMemory,
    shared_tokens,
)
from tinsmith.engine.embedded.running_samples import RunningSequence, Sample
from tinsmith.engine.embedded.step_batch import PrefillChunk
from tinsmith.engine.model.kv_cache import PAGE_TOKENS, KvBuffer, SequenceKv

MOST_PREFILLING = 8
"""Prompts of one owner that are prefilled round robin; more would only share the same budget.
Prompts of a single chunk do not count: they need not wait for long ones."""
MOST_LOOKED_AT = 64
"""Waiting samples considered per step; some of them wait for another sample's prefill."""


class _PrefixSource(NamedTuple):
    """Where the KV cache of a prompt's prefix can be copied from."""

    tokens: int
    kv: KvBuffer | None = None
    prompt: CachedPrompt | None = None


class PrefillQueue:
    """All admitted samples in the order in which they are served.

    Args:
        memory: The budget for keys and values.
        empty_buffer: Makes a KV buffer without tokens.
    """

    def __init__(self, memory: KvMemory, empty_buffer: Callable[[], KvBuffer]) -> None:
        self.hit_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self._memory = memory
        self._empty_buffer = empty_buffer
        self.failed: list[tuple[Sample, Exception]] = []
        """Samples that failed for lack of memory. They are released."""
        self.preemptions = 0
        """How often a sequence was preempted."""
        self._arrivals = itertools.count()
        # All in the order of their numbers, except the round-robin queues
        self._waiting: list[Sample] = []
        self._prefilling: deque[Sample] = deque()
        self._prefilled: list[Sample] = []
        self._holding_memory: list[Sample] = []
        """Samples with KV memory: prefilling, prefilled or running."""
        self._resumed: deque[RunningSequence] = deque()
        """Preempted sequences that are recomputing their KV cache."""
        self._short_of_memory: dict[str, Sample] = {}
        """By owner, the first sample that could not start a sequence in the last step."""

    @property
    def waiting(self) -> int:
        """Samples that wait for prefill or to start a sequence."""
        return len(self._waiting) + len(self._prefilled)

    @property
    def prefilling(self) -> int:
        """Prompts that are being prefilled."""
        return len(self._prefilling)

    def add(self, samples: list[Sample]) -> None:
        """Queue samples.

        A sample's number is the count of its owner's earlier sequences, starting from the lowest
        number in the queue. So owners alternate, and the first sample stays the first.
        """
        if not samples:
            return
        here = [*self._waiting, *self._holding_memory]
        first = min((one.number[0] for one in here), default=0)
        held = Counter[str]()
        for one in here:
            held[one.owner] += one.work.request.num_samples
        for sample in samples:
            sample.number = first + held[sample.owner], next(self._arrivals)
            held[sample.owner] += sample.work.request.num_samples
            insort(self._waiting, sample, key=_number)

    # Prefill

    def start_prefill(self, budget: int, held_back: Collection[str] = ()) -> None:
        """Start the prefill of waiting samples.

        Args:
            budget: Prompt tokens per step.
            held_back: Owners whose samples do not start now.
        """
        candidates = [one for one in self._waiting if one.owner not in held_back]
        without_memory: set[str] = set()
        for sample in candidates[:MOST_LOOKED_AT]:
            if sample.owner in without_memory or not self._can_prefill(sample, budget):
                continue
            short = self._short_of_memory.get(sample.owner)
            if short is not None and short.number < sample.number:
                continue  # it would take the memory of an earlier sample
            source = self._find_source(sample)
            if source is None:  # another sample is computing its prefix
                continue
            try:
                is_started = self._try_start(sample, source, self._headroom())
                while not is_started and self._try_preempt_for(sample):
                    # The prefix may have been evicted with the preempted sample.
                    is_started = self._try_start(
                        sample, self._find_source(sample) or _PrefixSource(0)
                    )
                if not is_started and not self._holding_memory:
                    # The cached prefix takes up the room it needs; nothing else can be freed.
                    is_started = self._try_start(sample, _PrefixSource(0))
                if not is_started:
                    without_memory.add(sample.owner)
                    continue
            except Exception as exc:  # noqa: BLE001 - out of memory: this sample fails alone
                self.failed.append((sample, exc))
                self.release(sample)
            else:
                self._waiting.remove(sample)

    def _can_prefill(self, sample: Sample, budget: int) -> bool:
        prefilling = [one for one in self._prefilling if one.owner == sample.owner]
        if _is_short(sample):
            return sum(len(one.prompt) for one in prefilling if _is_short(one)) < budget
        if len(prefilling) < MOST_PREFILLING:
            return True
        return sum(_chunk_of(one).end - one.prefilled for one in prefilling) < budget

    def _find_source(self, sample: Sample) -> _PrefixSource | None:
        """The longest known prefix; None to wait for another sample that is computing it."""
        # Rows whose logprobs are requested have to be computed in any case.
        most = sample.prompt_logprobs.first_row
        found = self._memory.cache.find(sample.prompt_keys, most)
        best = _PrefixSource(0) if found is None else _PrefixSource(found[1], found[0].kv, found[0])
        for other in self._prefilling:
            if other.weights is sample.weights and other.owner == sample.owner:
                tokens = shared_tokens(sample.prompt, other.prompt, most)
                if tokens <= best.tokens:
                    continue
                if tokens > other.prefilled or tokens == len(sample.prompt):
                    return None
                best = _PrefixSource(tokens, other.kv)
        return best

    def _try_start(self, sample: Sample, source: _PrefixSource, spare: int = 0) -> bool:
        """Reserve the memory it needs and start prefill; False if there is not enough now."""
        length, memory, prompt = len(sample.prompt), self._memory, source.prompt
        is_read = source.tokens == length
        shares = is_read and sample.shares_prompt and prompt is not None and not prompt.is_lent
        # A single sequence continues in the buffer of its prompt.
        room = length
        if not sample.shares_prompt:
            room += len(sample.preempted[0].tokens) if sample.preempted else 1
        needed = 0 if shares else memory.pages(room)
        if prompt is not None:
            prompt.users += 1  # protects it from eviction meanwhile
        try:
            if prompt is not None and shares:
                self._fit(prompt)
            if not memory.try_reserve(needed, spare):
                return False
            sample.taken_bytes = needed
            sample.kv = prompt.kv if shares and prompt else self._new_buffer(source, room)
        finally:
            if prompt is not None and not (shares and sample.kv is not None):
                prompt.users -= 1
        sample.prefilled = source.tokens
        if not sample.sequences:
            sample.hits = source.tokens
        self.hit_tokens += source.tokens
        insort(self._holding_memory, sample, key=_number)
        if is_read:
            assert prompt is not None
            sample.last_1D = prompt.last_1D
            sample.cached_prompt = prompt if shares else None
            insort(self._prefilled, sample, key=_number)
        else:
            self._prefilling.append(sample)
        return True

    def _fit(self, prompt: CachedPrompt) -> None:
        """Trim spare room that a sequence left in the buffer before sharing it."""
        length = prompt.length
        if prompt.kv.bytes > self._memory.pages(length):
            prompt.kv = prompt.kv.copy(length, length)
            self._memory.cache.count(prompt)

    def _new_buffer(self, source: _PrefixSource, room: int) -> KvBuffer:
        if source.kv is not None:
            return source.kv.copy(source.tokens, room)
        kv = self._empty_buffer()
        kv.reserve(room)
        return kv

    def next_chunks(self, budget: int, held_back: Collection[str] = ()) -> list[PrefillChunk]:
        """The chunks to compute in this step: up to the budget, at least one.

        Round robin over owners. Within an owner, resumed sequences come before prompts.
        """
        chunks: list[PrefillChunk] = []
        for chunk in _round_robin(
            [*map(_replay_chunk_of, self._resumed), *map(_chunk_of, self._prefilling)]
        ):
            if chunk.sample.owner in held_back:
                continue
            budget -= chunk.end - chunk.start
            if chunks and budget < 0:
                break
            chunks.append(chunk)
        for chunk in chunks:  # to the end: the others come first in the next step
            if chunk.sequence is not None:
                self._resumed.remove(chunk.sequence)
                self._resumed.append(chunk.sequence)
            else:
                self._prefilling.remove(chunk.sample)
                self._prefilling.append(chunk.sample)
        return sorted(chunks, key=lambda chunk: chunk.sample.weights.number)

    def finish_chunk(self, chunk: PrefillChunk, hidden_TD: Tensor) -> None:
        """Note a computed chunk; after the last one the sample's sequences may start."""
        sample = chunk.sample
        sample.prefilled = chunk.end
        if sample.prefilled == len(sample.prompt):
            sample.prompt_logprobs.mark_complete()
            sample.last_1D = hidden_TD[-1:].clone()
            self._prefilling.remove(sample)
            insort(self._prefilled, sample, key=_number)
            self._cache_prompt(sample)

    def _cache_prompt(self, sample: Sample) -> None:
        """Offer the prompt's KV cache to other samples."""
        if sample.weights.is_dropped:
            return
        assert sample.kv is not None and sample.last_1D is not None
        prompt = CachedPrompt(sample.prompt_keys, sample.kv, sample.last_1D)
        if sample.shares_prompt:
            # From now on the prefix cache accounts for the memory.
            prompt.users = 1
            self._free_bytes(sample, sample.taken_bytes)
        else:
            prompt.is_lent = True
        sample.cached_prompt = prompt
        self._memory.cache.add(prompt)

    # Sequences

    def start_sequences(
        self, most: int, running: Sequence[RunningSequence], held_back: Collection[str] = ()
    ) -> list[RunningSequence]:
        """Start sequences of prefilled prompts and resume preempted ones while there is room.

        Args:
            most: Maximum running sequences per owner.
            running: The running sequences.
            held_back: Owners whose sequences do not start now.
        """
        started: list[RunningSequence] = []
        prefilled = [one for one in self._prefilled if one.owner not in held_back]
        counts = Counter(one.sample.owner for one in [*running, *self._resumed])
        spare, self._short_of_memory = self._headroom() if prefilled else 0, {}
        for sample in prefilled:
            while (
                counts[sample.owner] < most
                and sample.kv is not None
                and (sample.preempted or sample.unstarted)
            ):
                size = self._bytes_to_start(sample)
                # Only an owner's first sample may reserve; later ones would overtake it.
                is_first = sample.owner not in self._short_of_memory
                if size and not (is_first and self._memory.try_reserve(size, spare)):
                    self._short_of_memory.setdefault(sample.owner, sample)
                    is_idle = not (running or started or self._resumed)
                    if not (is_first and self._try_make_room(sample, size, is_idle=is_idle)):
                        break
                started += self._start(sample, size)
                spare += PAGE_TOKENS * self._memory.token_bytes
                counts[sample.owner] += 1
            if sample in self._prefilled and not sample.preempted and not sample.unstarted:
                self._prefilled.remove(sample)
        return [one for one in started if one.kv is not None]  # else their sample has failed

    def _bytes_to_start(self, sample: Sample) -> int:
        """Bytes for its next sequence; a single one continues in the prompt's buffer."""
        if not sample.shares_prompt:
            return 0
        return self._memory.pages(len(sample.preempted[0].tokens) if sample.preempted else 1)

    def _try_make_room(self, sample: Sample, size: int, *, is_idle: bool) -> bool:
        """Reserve memory by preempting later samples: other owners', or any if nothing runs."""
        while not self._memory.try_reserve(size):
            if self._try_preempt_for(sample):
                continue
            if not is_idle or self._holding_memory[-1] is sample:
                return False  # an earlier sample is still in prefill
            self._preempt_youngest()
        return True

    def _try_preempt_for(self, sample: Sample) -> bool:
        """Preempt the last sample, if it is another owner's and later than this one."""
        last = self._holding_memory[-1] if self._holding_memory else sample
        if last.owner == sample.owner or last.number < sample.number:
            return False
        self._preempt_youngest()
        return True

    def _start(self, sample: Sample, size: int) -> list[RunningSequence]:
        """Start a sequence with `size` bytes; empty if a preempted one resumes instead."""
        assert sample.kv is not None, "the prompt is prefilled"
        sample.taken_bytes += size
        kv = SequenceKv(None, sample.kv)
        if sample.shares_prompt:
            kv = SequenceKv(sample.kv, self._empty_buffer())
        try:
            kv.own.reserve(size // self._memory.token_bytes)
        except Exception as exc:  # noqa: BLE001 - out of memory, of this sample
            self.failed.append((sample, exc))
            self.release(sample)
            return []
        if not sample.preempted:
            started = sample.start_sequence(kv)
            started.taken_bytes = size
            return [started]
        resumed = sample.preempted.pop(0)
        resumed.kv, resumed.taken_bytes = kv, size
        self._resumed.append(resumed)
        return []

    def resumed(self) -> list[RunningSequence]:
        """Resumed sequences whose KV cache is complete again."""
        ready = [one for one in self._resumed if one.uncached == 1]
        for one in ready:
            self._resumed.remove(one)
        return ready

    def grow(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Reserve memory for one more token each, preempting if needed; the ones still running."""
        full = [one for one in running if one.kv is not None and one.kv.own.is_full]
        for one in sorted(full, key=lambda one: (one.sample.number, one.index)):
            while one.kv is not None:
                own = one.kv.own
                more = self._memory.growth(own, own.length + 1)
                if self._memory.try_reserve(more):
                    one.sample.taken_bytes += more
                    one.taken_bytes += more
                    break
                self._preempt_youngest()
        return [one for one in running if one.kv is not None]

    def _headroom(self) -> int:
        """Bytes by which the samples with memory are expected to grow."""
        tokens = 0
        for sample in self._holding_memory:
            if not sample.sequences:
                tokens += PAGE_TOKENS
            for one in sample.sequences:
                if one.kv is not None:
                    drawn = len(one.tokens)
                    more = min(max(PAGE_TOKENS, drawn // 2), sample.most - drawn)
                    tokens += max(0, one.kv.own.length + one.uncached + more - one.kv.own.room)
        return tokens * self._memory.token_bytes

    def _preempt_youngest(self) -> None:
        """Preempt the last running sequence of the last sample, or its prefill if none runs."""
        sample = self._holding_memory[-1]
        one = next((one for one in reversed(sample.sequences) if one.kv is not None), None)
        if one is not None:
            self._preempt(one)
        if one is not None and sample.shares_prompt:
            if sample not in self._prefilled:
                insort(self._prefilled, sample, key=_number)
            return
        self._free_memory(sample)
        insort(self._waiting, sample, key=_number)

    def _preempt(self, sequence: RunningSequence) -> None:
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        insort(sequence.sample.preempted, sequence, key=lambda one: one.index)
        self._free_kv(sequence)
        self.preemptions += 1

    def _free_kv(self, sequence: RunningSequence) -> None:
        sequence.kv = None
        if sequence.sample.shares_prompt:  # else the memory is the sample's
            self._free_bytes(sequence.sample, sequence.taken_bytes)
        sequence.taken_bytes = 0

    def end_sequence(self, sequence: RunningSequence) -> None:
        """Free a finished sequence."""
        sequence.sample.ended += 1
        self._free_kv(sequence)

    def release(self, sample: Sample) -> None:
        """Remove a sample from all queues and free its memory."""
        if sample in self._waiting:
            self._waiting.remove(sample)
        for sequence in sample.sequences:
            sequence.kv = None
            if sequence in self._resumed:
                self._resumed.remove(sequence)
        sample.preempted.clear()
        self._free_memory(sample)

    def _free_memory(self, sample: Sample) -> None:
        """Free the sample's memory and return its prompt to the prefix cache."""
        for queue in (self._prefilling, self._prefilled, self._holding_memory):
            if sample in queue:
                queue.remove(sample)
        if self._short_of_memory.get(sample.owner) is sample:
            del self._short_of_memory[sample.owner]
        self._free_bytes(sample, sample.taken_bytes)
        prompt, kv = sample.cached_prompt, sample.kv
        sample.cached_prompt = sample.kv = sample.last_1D = None
        if prompt is None or kv is None:
            return
        if prompt.is_lent:
            self._return_prompt(prompt, kv)
        else:
            prompt.users -= 1
        self._memory.trim()

    def _return_prompt(self, prompt: CachedPrompt, kv: KvBuffer) -> None:
        """Keep the prompt's part of a finished sequence's buffer."""
        length, cache = prompt.length, self._memory.cache
        try:
            if kv.bytes > 2 * self._memory.bytes_for(length):
                kv = kv.copy(length, length)
        except Exception:  # noqa: BLE001 - no memory for the copy: the prompt is evicted
            prompt.is_lent = False
            cache.remove(prompt)
            return
        kv.length = length
        prompt.kv, prompt.is_lent = kv, False
        cache.count(prompt)

    def _free_bytes(self, sample: Sample, size: int) -> None:
        sample.taken_bytes -= size
        self._memory.free(size)


def _is_short(sample: Sample) -> bool:
    return len(sample.prompt) <= CHUNK_TOKENS


def _chunk_of(sample: Sample) -> PrefillChunk:
    """The next chunk of the sample's prompt."""
    end = (sample.prefilled // CHUNK_TOKENS + 1) * CHUNK_TOKENS
    return PrefillChunk(sample, sample.prefilled, min(end, len(sample.prompt)))


def _replay_chunk_of(sequence: RunningSequence) -> PrefillChunk:
    """The next sampled tokens to recompute, except the last, which was never fed back."""
    start, last = len(sequence.tokens) - sequence.uncached, len(sequence.tokens) - 1
    return PrefillChunk(sequence.sample, start, min(start + CHUNK_TOKENS, last), sequence)


def _round_robin(chunks: Iterable[PrefillChunk]) -> list[PrefillChunk]:
    """The first chunk of each owner, then the second of each, and so on."""
    seen = Counter[str]()
    turns: list[tuple[int, PrefillChunk]] = []
    for chunk in chunks:
        turns.append((seen[chunk.sample.owner], chunk))
        seen[chunk.sample.owner] += 1
    return [chunk for _, chunk in sorted(turns, key=lambda one: one[0])]


def _number(sample: Sample) -> tuple[int, int]:
    return sample.number
