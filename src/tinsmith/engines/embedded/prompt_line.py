"""The way of samples from waiting to running: who is read next, and who has memory.

    waiting   → reading           → starting        → running
    no memory   prompt by chunks,   prompt is read,   a token in
    yet         taking turns        room is awaited   every step

Samples of one owner begin in the order in which they came. Owners are served beside each other: an
owner's first sample comes before the second one of any other. A prompt that begins as one that the
same owner is reading waits for it, and one that was read before is taken from the cache.

Sequences take memory as they grow, since nobody knows how long they become. When there is none
left, the last in that order gives way: it is *paused*, without keys, and goes on later. The first
of all is never paused, and no sample is admitted that does not fit alone: so every sample ends, the
first one first. A sequence that goes on reads the tokens that it has, each as when it was drawn,
and draws no other than it would have. That is work done twice; so nothing begins or goes on before
those that run have room to become half as long again, unless it comes before others' samples in the
order: these give way to it.

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

from tinsmith.engines.embedded.kv_memory import KvMemory
from tinsmith.engines.embedded.packs import Chunk
from tinsmith.engines.embedded.prefix_cache import CHUNK_TOKENS, ReadPrompt, shared_tokens
from tinsmith.engines.embedded.samples import RunningSequence, Sample
from tinsmith.model.kv_cache import PAGE_TOKENS, Run, SequenceKeys

MOST_READING = 8
"""Prompts that are read in turns; more would only share the same budget. Those of one chunk have
their one turn beside them: they do not wait until a long one is read."""
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
        self.failed: list[tuple[Sample, Exception]] = []
        """Samples that there was no memory for after all. They are released."""
        self.pauses = 0
        """How often a sequence gave way."""
        self._arrivals = itertools.count()
        # In the order of their numbers, but for those that take turns
        self._waiting: list[Sample] = []
        self._reading: deque[Sample] = deque()
        self._starting: list[Sample] = []
        self._begun: list[Sample] = []
        """All that have memory: those of the two above, and those whose sequences run."""
        self._resumed: deque[RunningSequence] = deque()
        """Sequences that go on, and read what they have drawn before."""
        self._lacking: dict[str, Sample] = {}
        """The sample of an owner that was to begin a sequence in the last step without memory."""

    @property
    def waiting(self) -> int:
        """How many samples wait to be read or to begin a sequence."""
        return len(self._waiting) + len(self._starting)

    @property
    def reading(self) -> int:
        """How many prompts are being read."""
        return len(self._reading)

    def add(self, samples: list[Sample]) -> None:
        """Let samples wait.

        One stands behind the sequences that its owner has here, counted from the first of all: so
        owners alternate, whoever came earlier. The first of all stays the first.
        """
        if not samples:
            return
        here = [*self._waiting, *self._begun]
        first = min((one.number[0] for one in here), default=0)
        held = Counter[str]()
        for one in here:
            held[one.owner] += one.work.request.num_samples
        for sample in samples:
            sample.number = first + held[sample.owner], next(self._arrivals)
            held[sample.owner] += sample.work.request.num_samples
            insort(self._waiting, sample, key=_number)

    # Reading

    def begin(self, budget: int, held_back: Collection[str] = ()) -> None:
        """Let waiting samples begin to be read.

        Args:
            budget: How many tokens a step reads.
            held_back: Owners whose samples do not begin now.
        """
        candidates = [one for one in self._waiting if one.owner not in held_back]
        without_memory: set[str] = set()
        for sample in candidates[:MOST_LOOKED_AT]:
            if sample.owner in without_memory or not self._takes_more(sample, budget):
                continue
            lacking = self._lacking.get(sample.owner)
            if lacking is not None and lacking.number < sample.number:
                continue  # it would take the memory away before its turn
            source = self._find_source(sample)
            if source is None:  # another sample reads what it begins with
                continue
            try:
                is_begun = self._try_begin(sample, source, self._headroom())
                while not is_begun and self._try_displace(sample):
                    # What it would reuse may have gone with the other one.
                    is_begun = self._try_begin(sample, self._find_source(sample) or _Source(0))
                if not is_begun and not self._begun:
                    # What it would reuse takes the room that it needs; nothing else can leave.
                    is_begun = self._try_begin(sample, _Source(0))
                if not is_begun:
                    without_memory.add(sample.owner)
                    continue
            except Exception as exc:  # noqa: BLE001 - out of memory, of this sample
                self.failed.append((sample, exc))
                self.release(sample)
            else:
                self._waiting.remove(sample)

    def _takes_more(self, sample: Sample, budget: int) -> bool:
        reading = [one for one in self._reading if one.owner == sample.owner]
        if _is_short(sample):
            return sum(len(one.prompt) for one in reading if _is_short(one)) < budget
        if len(reading) < MOST_READING:
            return True
        return sum(_chunk_of(one).end - one.read for one in reading) < budget

    def _find_source(self, sample: Sample) -> _Source | None:
        """What is known of the prompt; None to wait until another sample has read more of it."""
        # Rows that a question is about are computed, whatever is known.
        most = sample.answers.first_row
        found = self._memory.cache.find(sample.prompt_keys, most)
        best = _Source(0) if found is None else _Source(found[1], found[0].run, found[0])
        for other in self._reading:
            if other.weights is sample.weights and other.owner == sample.owner:
                tokens = shared_tokens(sample.prompt, other.prompt, most)
                if tokens <= best.tokens:
                    continue
                if tokens > other.read or tokens == len(sample.prompt):
                    return None
                best = _Source(tokens, other.run)
        return best

    def _try_begin(self, sample: Sample, source: _Source, spare: int = 0) -> bool:
        """Take the memory that it needs and begin; False if there is not enough now."""
        length, memory, prompt = len(sample.prompt), self._memory, source.prompt
        is_read = source.tokens == length
        shares = is_read and sample.shares_prompt and prompt is not None and not prompt.is_lent
        # A single sequence goes on in the run of its prompt.
        room = length
        if not sample.shares_prompt:
            room += len(sample.paused[0].tokens) if sample.paused else 1
        needed = 0 if shares else memory.pages(room)
        if prompt is not None:
            prompt.users += 1  # not to be forgotten for the sake of this sample
        try:
            if prompt is not None and shares:
                self._fit(prompt)
            if not memory.try_take(needed, spare):
                return False
            sample.taken_bytes = needed
            sample.run = prompt.run if shares and prompt else self._first_run(source, room)
        finally:
            if prompt is not None and not (shares and sample.run is not None):
                prompt.users -= 1
        sample.read = source.tokens
        if not sample.sequences:
            sample.hits = source.tokens
        self.hit_tokens += source.tokens
        insort(self._begun, sample, key=_number)
        if is_read:
            assert prompt is not None
            sample.last_1D = prompt.last_1D
            sample.read_prompt = prompt if shares else None
            insort(self._starting, sample, key=_number)
        else:
            self._reading.append(sample)
        return True

    def _fit(self, prompt: ReadPrompt) -> None:
        """Let go of room that a sequence left; while the run is shared, it has to count as read."""
        length = prompt.length
        if prompt.run.bytes > self._memory.pages(length):
            prompt.run = prompt.run.copy(length, length)
            self._memory.cache.count(prompt)

    def _first_run(self, source: _Source, room: int) -> Run:
        if source.run is not None:
            return source.run.copy(source.tokens, room)
        run = self._empty_run()
        run.reserve(room)
        return run

    def next_chunks(self, budget: int, held_back: Collection[str] = ()) -> list[Chunk]:
        """A chunk of each prompt and sequence whose turn it is, up to the budget but one at least.

        Owners take turns. Of one owner, sequences that go on come first: they came before the
        prompts.
        """
        chunks: list[Chunk] = []
        for chunk in _by_turns(
            [*map(_drawn_chunk_of, self._resumed), *map(_chunk_of, self._reading)]
        ):
            if chunk.sample.owner in held_back:
                continue
            budget -= chunk.end - chunk.start
            if chunks and budget < 0:
                break
            chunks.append(chunk)
        for chunk in chunks:  # the others are first in the next step
            if chunk.sequence is not None:
                self._resumed.remove(chunk.sequence)
                self._resumed.append(chunk.sequence)
            else:
                self._reading.remove(chunk.sample)
                self._reading.append(chunk.sample)
        return sorted(chunks, key=lambda chunk: chunk.sample.weights.number)

    def read(self, chunk: Chunk, hidden_TD: Tensor) -> None:
        """A chunk was computed; with the last one the sample may start its sequences."""
        sample = chunk.sample
        sample.read = chunk.end
        if sample.read == len(sample.prompt):
            sample.answers.are_whole()
            sample.last_1D = hidden_TD[-1:].clone()
            self._reading.remove(sample)
            insort(self._starting, sample, key=_number)
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
            self._give_back(sample, sample.taken_bytes)
        else:
            prompt.is_lent = True
        sample.read_prompt = prompt
        self._memory.cache.add(prompt)

    # Sequences

    def start_sequences(
        self, most: int, running: Sequence[RunningSequence], held_back: Collection[str] = ()
    ) -> list[RunningSequence]:
        """Begin sequences of prompts that are read, and let paused ones go on, as there is room.

        Args:
            most: How many sequences of one owner may run.
            running: Those that do.
            held_back: Owners whose sequences do not begin now.
        """
        started: list[RunningSequence] = []
        starting = [one for one in self._starting if one.owner not in held_back]
        counts = Counter(one.sample.owner for one in [*running, *self._resumed])
        spare, self._lacking = self._headroom() if starting else 0, {}
        for sample in starting:
            while (
                counts[sample.owner] < most
                and sample.run is not None
                and (sample.paused or sample.unstarted)
            ):
                size = self._bytes_to_start(sample)
                # Only an owner's first may ask for memory: others would take it before its turn.
                is_first = sample.owner not in self._lacking
                if size and not (is_first and self._memory.try_take(size, spare)):
                    self._lacking.setdefault(sample.owner, sample)
                    is_idle = not (running or started or self._resumed)
                    if not (is_first and self._try_make_room(sample, size, is_idle=is_idle)):
                        break
                started += self._start(sample, size)
                spare += PAGE_TOKENS * self._memory.token_bytes
                counts[sample.owner] += 1
            if sample in self._starting and not sample.paused and not sample.unstarted:
                self._starting.remove(sample)
        return [one for one in started if one.keys is not None]  # their sample may have failed

    def _bytes_to_start(self, sample: Sample) -> int:
        """What its next sequence takes; a single one has its memory since the prompt began."""
        if not sample.shares_prompt:
            return 0
        return self._memory.pages(len(sample.paused[0].tokens) if sample.paused else 1)

    def _try_make_room(self, sample: Sample, size: int, *, is_idle: bool) -> bool:
        """Take memory from those behind it: others' samples, or any if nothing runs."""
        while not self._memory.try_take(size):
            if self._try_displace(sample):
                continue
            if not is_idle or self._begun[-1] is sample:
                return False  # one that came before it has not read its prompt yet
            self._pause_youngest()
        return True

    def _try_displace(self, sample: Sample) -> bool:
        """Let the last of all give way, if it is another owner's and behind this one."""
        last = self._begun[-1] if self._begun else sample
        if last.owner == sample.owner or last.number < sample.number:
            return False
        self._pause_youngest()
        return True

    def _start(self, sample: Sample, size: int) -> list[RunningSequence]:
        """Begin a sequence with so much memory; none if a paused one goes on instead."""
        assert sample.run is not None, "its prompt is read"
        sample.taken_bytes += size
        keys = SequenceKeys(None, sample.run)
        if sample.shares_prompt:
            keys = SequenceKeys(sample.run, self._empty_run())
        try:
            keys.own.reserve(size // self._memory.token_bytes)
        except Exception as exc:  # noqa: BLE001 - out of memory, of this sample
            self.failed.append((sample, exc))
            self.release(sample)
            return []
        if not sample.paused:
            started = sample.start_sequence(keys)
            started.taken_bytes = size
            return [started]
        resumed = sample.paused.pop(0)
        resumed.keys, resumed.taken_bytes = keys, size
        self._resumed.append(resumed)
        return []

    def resumed(self) -> list[RunningSequence]:
        """Sequences that were paused and may draw again."""
        ready = [one for one in self._resumed if one.unread == 1]
        for one in ready:
            self._resumed.remove(one)
        return ready

    def grow(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Take memory for a token of each, if need be from the youngest; returns who still runs."""
        full = [one for one in running if one.keys is not None and one.keys.own.is_full]
        for one in sorted(full, key=lambda one: (one.sample.number, one.index)):
            while one.keys is not None:
                own = one.keys.own
                more = self._memory.growth(own, own.length + 1)
                if self._memory.try_take(more):
                    one.sample.taken_bytes += more
                    one.taken_bytes += more
                    break
                self._pause_youngest()
        return [one for one in running if one.keys is not None]

    def _headroom(self) -> int:
        """What those that have begun are expected to take beside what they have."""
        tokens = 0
        for sample in self._begun:
            if not sample.sequences:
                tokens += PAGE_TOKENS
            for one in sample.sequences:
                if one.keys is not None:
                    drawn = len(one.tokens)
                    more = min(max(PAGE_TOKENS, drawn // 2), sample.most - drawn)
                    tokens += max(0, one.keys.own.length + one.unread + more - one.keys.own.room)
        return tokens * self._memory.token_bytes

    def _pause_youngest(self) -> None:
        """Let the youngest sequence give way, or the youngest sample if none of it runs."""
        sample = self._begun[-1]
        one = next((one for one in reversed(sample.sequences) if one.keys is not None), None)
        if one is not None:
            self._pause(one)
        if one is not None and sample.shares_prompt:
            if sample not in self._starting:
                insort(self._starting, sample, key=_number)
            return
        self._leave(sample)
        insort(self._waiting, sample, key=_number)

    def _pause(self, sequence: RunningSequence) -> None:
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        insort(sequence.sample.paused, sequence, key=lambda one: one.index)
        self._drop_keys(sequence)
        self.pauses += 1

    def _drop_keys(self, sequence: RunningSequence) -> None:
        sequence.keys = None
        if sequence.sample.shares_prompt:  # else they are the sample's
            self._give_back(sequence.sample, sequence.taken_bytes)
        sequence.taken_bytes = 0

    def end_sequence(self, sequence: RunningSequence) -> None:
        """A sequence has its last token."""
        sequence.sample.ended += 1
        self._drop_keys(sequence)

    def release(self, sample: Sample) -> None:
        """Let go of everything that a sample has, wherever it is."""
        if sample in self._waiting:
            self._waiting.remove(sample)
        for sequence in sample.sequences:
            sequence.keys = None
            if sequence in self._resumed:
                self._resumed.remove(sequence)
        sample.paused.clear()
        self._leave(sample)

    def _leave(self, sample: Sample) -> None:
        """Give back the sample's memory, and what it has of its prompt."""
        for queue in (self._reading, self._starting, self._begun):
            if sample in queue:
                queue.remove(sample)
        if self._lacking.get(sample.owner) is sample:
            del self._lacking[sample.owner]
        self._give_back(sample, sample.taken_bytes)
        prompt, run = sample.read_prompt, sample.run
        sample.read_prompt = sample.run = sample.last_1D = None
        if prompt is None or run is None:
            return
        if prompt.is_lent:
            self._return_prompt(prompt, run)
        else:
            prompt.users -= 1
        self._memory.trim()

    def _return_prompt(self, prompt: ReadPrompt, run: Run) -> None:
        """Keep of a sequence's run what the prompt has of it."""
        length, cache = prompt.length, self._memory.cache
        try:
            if run.bytes > 2 * self._memory.bytes_for(length):
                run = run.copy(length, length)
        except Exception:  # noqa: BLE001 - no memory for a copy: it need not be kept
            prompt.is_lent = False
            cache.remove(prompt)
            return
        run.length = length
        prompt.run, prompt.is_lent = run, False
        cache.count(prompt)

    def _give_back(self, sample: Sample, size: int) -> None:
        sample.taken_bytes -= size
        self._memory.give_back(size)


def _is_short(sample: Sample) -> bool:
    return len(sample.prompt) <= CHUNK_TOKENS


def _chunk_of(sample: Sample) -> Chunk:
    """The next chunk of its prompt."""
    end = (sample.read // CHUNK_TOKENS + 1) * CHUNK_TOKENS
    return Chunk(sample, sample.read, min(end, len(sample.prompt)))


def _drawn_chunk_of(sequence: RunningSequence) -> Chunk:
    """The next of the tokens that it has drawn, but for the last one."""
    start, last = len(sequence.tokens) - sequence.unread, len(sequence.tokens) - 1
    return Chunk(sequence.sample, start, min(start + CHUNK_TOKENS, last), sequence)


def _by_turns(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The first chunk of each owner, then the second of each, and so on."""
    seen = Counter[str]()
    turns: list[tuple[int, Chunk]] = []
    for chunk in chunks:
        turns.append((seen[chunk.sample.owner], chunk))
        seen[chunk.sample.owner] += 1
    return [chunk for _, chunk in sorted(turns, key=lambda one: one[0])]


def _number(sample: Sample) -> tuple[int, int]:
    return sample.number
