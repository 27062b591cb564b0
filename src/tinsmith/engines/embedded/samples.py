"""Samples that were admitted, and the sequences that are drawn for them.

Knows nothing of packs and of the model: `sampler.py` moves them on.
"""

# D feature

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from tinsmith.engines.base import SampleOutcome, SampleTokens, SampleWork
from tinsmith.engines.embedded.prefix_cache import ReadPrompt, prompt_keys
from tinsmith.engines.embedded.prompt_answers import PromptAnswers
from tinsmith.engines.embedded.stops import StopRule
from tinsmith.errors import ValidationError
from tinsmith.model.kv_cache import Run, SequenceKeys
from tinsmith.model.lora import FusedLora
from tinsmith.model.sample_tokens import DrawSettings, stream_key
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.sampling import SampledSequence, SampleResponse, StopReason
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

Array: TypeAlias = "np.ndarray[Any, Any]"
Best: TypeAlias = tuple[Array, Array]
"""The likeliest tokens at a place, best first, and their log-probabilities."""


class Weights:
    """Sampler weights as samples hold them; they stay while one does, also when dropped."""

    def __init__(self, number: int, lora: FusedLora | None) -> None:
        self.number = number
        """Never given twice: other weights under the same id have another one."""
        self.lora = lora
        self.is_dropped = False
        """No new samples are drawn with them."""


class Sample:
    """A request on its way."""

    def __init__(
        self, work: SampleWork, weights: Weights, stops: StopRule, most: int, vocabulary: int
    ) -> None:
        request = work.request
        params = request.sampling_params
        self.work = work
        self.weights = weights
        self.stops = stops
        self.most = most
        """How many tokens each sequence may have."""
        self.prompt = prompt_tokens(request.prompt, vocabulary)
        self.prompt_keys = prompt_keys(weights.number, self.prompt)
        self.draws = DrawSettings(params.temperature, params.top_k, params.top_p)
        self.seed = work.work_id if params.seed is None else str(params.seed)
        self.answers = PromptAnswers(request, self.prompt, self.seed, vocabulary)
        self.is_cancelled = False
        self.owner = work.owner
        self.number = (0, 0)
        """Samples are served in the order of these; `PromptLine.add` has the rule."""
        self.run: Run | None = None
        """Of its prompt."""
        self.read = 0
        """How many tokens of the prompt are in the run."""
        self.hits = 0
        """How many of them were there before."""
        self.read_prompt: ReadPrompt | None = None
        """What the cache has of the prompt, while this sample has a hold on it."""
        self.last_1D: Tensor | None = None
        """What the first token of each sequence is drawn from, once the prompt is read."""
        self.sequences: list[RunningSequence] = []
        """Those that have begun."""
        self.paused: list[RunningSequence] = []
        """Those of them that gave way to others, and go on when there is room."""
        self.ended = 0
        """How many of them have their last token."""
        self.taken_bytes = 0
        """What it has of the memory for keys and values, its sequences included."""

    @property
    def shares_prompt(self) -> bool:
        """Whether its sequences read one run of the prompt; a single one goes on with the run."""
        return self.work.request.num_samples > 1

    @property
    def unstarted(self) -> int:
        """How many sequences have not begun."""
        return self.work.request.num_samples - len(self.sequences)

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return self.ended == self.work.request.num_samples

    def start_sequence(self, keys: SequenceKeys) -> RunningSequence:
        """Begin the next of its sequences."""
        sequence = RunningSequence(self, len(self.sequences), keys)
        self.sequences.append(sequence)
        return sequence

    def outcome(self) -> SampleOutcome:
        """The whole answer, once it is done."""
        result = SampleResponse(
            [sequence.result() for sequence in self.sequences],
            prompt_cache_hit_tokens=self.hits,
            **self.answers.fields(),
        )
        return SampleOutcome(work_id=self.work.work_id, result=result)


class RunningSequence:
    """One sequence of a sample."""

    __slots__ = (
        "_best",
        "_stop_text",
        "_told",
        "index",
        "key",
        "keys",
        "logprobs",
        "sample",
        "stop_reason",
        "taken_bytes",
        "tokens",
    )

    def __init__(self, sample: Sample, index: int, keys: SequenceKeys) -> None:
        self.sample = sample
        self.index = index
        self.key = stream_key(sample.seed, str(index))
        self.keys: SequenceKeys | None = keys
        """None when it has ended or is paused."""
        self.taken_bytes = 0
        """What a run of its own has of the memory, if that is not the sample's."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        self._best: list[Best] = []
        self._stop_text = sample.stops.follow(sample.prompt[-16:].tolist())
        self._told = 0

    @property
    def unread(self) -> int:
        """How many of its tokens, from the end, are not in its keys; one of a sequence that runs.

        The last one is never read before the next is drawn.
        """
        assert self.keys is not None, "it runs, or is about to"
        return len(self.sample.prompt) + len(self.tokens) - self.keys.length

    @property
    def position(self) -> int:
        """Where its last token is."""
        return len(self.sample.prompt) + len(self.tokens) - 1

    def add(self, token: int, logprob: float, best: Best | None = None) -> None:
        """Take the next token, and see whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if best is not None:
            self._best.append(best)
        sample = self.sample
        is_stop = token in sample.stops.token_ids
        if self._stop_text is not None:
            is_stop = self._stop_text.ends_with(token) or is_stop
        if is_stop:
            self.stop_reason = "stop"
        elif len(self.tokens) >= sample.most:
            self.stop_reason = "length"

    def news(self) -> SampleTokens:
        """What was not told yet."""
        new = slice(self._told, None)
        self._told = len(self.tokens)
        return SampleTokens(
            work_id=self.sample.work.work_id,
            sequence=self.index,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
        )

    def result(self) -> SampledSequence:
        """The sequence as it is answered."""
        return SampledSequence(
            self.stop_reason or "length",
            tokens_np=np.array(self.tokens, np.int32),
            logprobs_np=np.array(self.logprobs, np.float32),
            topk_logprobs_np=self._topk(self.sample.work.request.topk_sample_logprobs),
        )

    def _topk(self, k: int) -> TopkLogprobs | None:
        if not k:
            return None
        ids = np.zeros((len(self._best), k), np.int32)
        logprobs = np.full((len(self._best), k), EMPTY_LOGPROB, np.float32)
        for row, (some_ids, some_logprobs) in enumerate(self._best):
            ids[row, : len(some_ids)] = some_ids
            logprobs[row, : len(some_ids)] = some_logprobs
        return TopkLogprobs(ids, logprobs)


def prompt_tokens(prompt: ModelInput, vocabulary: int) -> Array:
    """The ids of a prompt.

    Raises:
        ValidationError: It holds something else than text, ids outside the vocabulary, or nothing.
    """
    chunks = prompt.chunks
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in chunks):
        raise ValidationError("the model reads text alone, and the prompt holds something else")
    parts = [chunk.numbers.numpy() for chunk in chunks if isinstance(chunk, EncodedTextChunk)]
    tokens: Array = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise ValidationError("the prompt is empty; there must be at least one token")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValidationError(f"the prompt holds ids outside 0…{vocabulary - 1}")
    return tokens
