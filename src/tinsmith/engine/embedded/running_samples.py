"""Admitted samples, their sequences and stop conditions: the state that the sampler works on.

Knows nothing of batches and of the model.

**Stops** are token ids and texts. A stop is part of the sequence: its last token is the stop token,
or the one that completes the stop text, including any text of that token after the stop. A sequence
also ends at the model's EOS tokens, except with an empty `stop` list, which disables all stops.

Text is decoded incrementally. A character may span several tokens and counts once it is complete.
Some decoders strip a leading space, so a token is decoded together with the few before it, those of
the prompt included. Special tokens are decoded as written, so a stop text may be one. A stop text
that starts in the prompt does not count.
"""

# D feature

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from tinsmith.engine.base import SampleOutcome, SampleTokens, SampleWork
from tinsmith.engine.embedded.prefix_cache import CachedPrompt, prompt_keys
from tinsmith.engine.embedded.prompt_logprobs import PromptLogprobs
from tinsmith.engine.model.kv_cache import KvBuffer, SequenceKv
from tinsmith.engine.model.lora import FusedLora
from tinsmith.engine.model.token_sampling import DrawSettings, stream_key
from tinsmith.errors import ValidationError
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.sampling import SampledSequence, SampleResponse, SamplingParams, StopReason
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer


CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded before the first sampled token."""
CHARACTER_TOKENS = 4
"""Maximum tokens of a character: each has at least one byte of it."""
MOST_UNREAD = 2 * CHARACTER_TOKENS
"""Maximum tokens waiting for a complete character; earlier bytes are invalid."""
_BROKEN = "\ufffd"
"""Stands for bytes that are not (yet) a complete character."""


class StopRule:
    """The stop conditions of one request."""

    def __init__(
        self, token_ids: frozenset[int], texts: tuple[str, ...], tokenizer: Tokenizer | None
    ) -> None:
        self.token_ids = token_ids
        self.texts = texts
        self._tokenizer = tokenizer

    def follow(self, prompt: Sequence[int]) -> StopTextMatcher | None:
        """A matcher for a new sequence; None if there are no stop texts."""
        if not self.texts:
            return None
        assert self._tokenizer is not None
        return StopTextMatcher(self._tokenizer, self.texts, prompt[-CONTEXT_TOKENS:])


def stop_rule(
    params: SamplingParams, eos_tokens: Sequence[int], tokenizer_folder: Path | None
) -> StopRule:
    """The stop conditions of a request.

    Args:
        params: The sampling parameters.
        eos_tokens: The model's EOS tokens.
        tokenizer_folder: The folder of `tokenizer.json`; None if there is none.

    Raises:
        ValidationError: There are stop texts, but no tokenizer.
    """
    if params.stop is None:
        return StopRule(frozenset(eos_tokens), (), None)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = tuple(stop for stop in stops if isinstance(stop, str) and stop)
    token_ids = frozenset(stop for stop in stops if isinstance(stop, int))
    if stops:
        token_ids |= frozenset(eos_tokens)
    return StopRule(token_ids, texts, _tokenizer(tokenizer_folder) if texts else None)


class StopTextMatcher:
    """Decodes one sequence incrementally, and detects stop texts."""

    def __init__(
        self, tokenizer: Tokenizer, texts: tuple[str, ...], context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._overlap = max(map(len, texts)) - 1
        self._tokens = list(context)
        self._read = len(self._tokens)
        """Number of decoded tokens; they are kept as context for the next ones."""
        self._before = self._decode(self._tokens).rstrip(_BROKEN)
        self._tail = ""
        """The end of the decoded text, in which a stop may start."""

    def ends_with(self, token: int) -> bool:
        """Append a token; whether the text now contains a stop."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        text = self._tail + whole.rstrip(_BROKEN)[len(self._before) :]
        if any(stop in text for stop in self._texts):
            return True
        if not whole.endswith(_BROKEN):
            self._set_read(len(self._tokens), text)
        elif len(self._tokens) - self._read >= MOST_UNREAD:
            settled = len(self._tokens) - CHARACTER_TOKENS
            text = self._decode(self._tokens[:settled])[len(self._before) :]
            self._set_read(settled, self._tail + text)
        return False

    def _set_read(self, settled: int, text: str) -> None:
        """Drop the context that the next tokens do not need."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        del self._tokens[: self._read]
        self._read = settled - self._read
        self._before = self._decode(self._tokens[: self._read]).rstrip(_BROKEN)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _tokenizer(folder: Path | None) -> Tokenizer:
    if folder is None:
        raise ValidationError(
            "stop texts need a tokenizer, which the model does not have",
            remedy="give stops as token ids",
        )
    return _load(folder)


@functools.lru_cache(maxsize=16)
def _load(folder: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise ValidationError(
            "stop texts need the tokenizers package, which is not installed on the service",
            remedy="give stops as token ids, or install tinsmith[tokenizers] there",
        ) from exc
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:
        raise ValidationError(
            f"stop texts need the model's tokenizer, which cannot be loaded: {exc}",
            remedy="give stops as token ids",
        ) from exc


Array: TypeAlias = "np.ndarray[Any, Any]"
Best: TypeAlias = tuple[Array, Array]
"""The top tokens at a position in descending order, and their log-probabilities."""


class SamplerWeights:
    """Sampler weights; samples that use them keep them alive after they are unloaded."""

    def __init__(self, number: int, lora: FusedLora | None) -> None:
        self.number = number
        """Unique: other weights under the same id have another number."""
        self.lora = lora
        self.is_dropped = False
        """Whether they are unloaded: no new samples may use them."""


class Sample:
    """An admitted sample work."""

    def __init__(
        self, work: SampleWork, weights: SamplerWeights, stops: StopRule, most: int, vocabulary: int
    ) -> None:
        request = work.request
        params = request.sampling_params
        self.work = work
        self.weights = weights
        self.stops = stops
        self.most = most
        """Maximum tokens per sequence."""
        self.prompt = prompt_tokens(request.prompt, vocabulary)
        self.prompt_keys = prompt_keys(weights.number, self.prompt)
        self.draws = DrawSettings(params.temperature, params.top_k, params.top_p)
        self.seed = work.work_id if params.seed is None else str(params.seed)
        self.prompt_logprobs = PromptLogprobs(request, self.prompt, self.seed, vocabulary)
        self.is_cancelled = False
        self.owner = work.owner
        self.number = (0, 0)
        """Samples are served in this order; assigned by `PrefillQueue.add`."""
        self.kv: KvBuffer | None = None
        """The KV cache of its prompt."""
        self.prefilled = 0
        """Prompt tokens in the KV cache."""
        self.hits = 0
        """Prompt tokens that came from the prefix cache."""
        self.cached_prompt: CachedPrompt | None = None
        """The entry of the prefix cache that this sample uses or has lent its buffer to."""
        self.last_1D: Tensor | None = None
        """The last hidden state of the prompt, from which first tokens are sampled."""
        self.sequences: list[RunningSequence] = []
        """Started sequences."""
        self.preempted: list[RunningSequence] = []
        """Started sequences that were preempted and wait for memory."""
        self.ended = 0
        """Number of finished sequences."""
        self.taken_bytes = 0
        """Reserved KV memory, its sequences included."""

    @property
    def shares_prompt(self) -> bool:
        """Whether its sequences share the prompt's buffer; a single one continues in it."""
        return self.work.request.num_samples > 1

    @property
    def unstarted(self) -> int:
        """Sequences that have not started."""
        return self.work.request.num_samples - len(self.sequences)

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return self.ended == self.work.request.num_samples

    def start_sequence(self, kv: SequenceKv) -> RunningSequence:
        """Start its next sequence."""
        sequence = RunningSequence(self, len(self.sequences), kv)
        self.sequences.append(sequence)
        return sequence

    def outcome(self) -> SampleOutcome:
        """The result, once it is done."""
        result = SampleResponse(
            [sequence.result() for sequence in self.sequences],
            prompt_cache_hit_tokens=self.hits,
            **self.prompt_logprobs.fields(),
        )
        return SampleOutcome(work_id=self.work.work_id, result=result)


class RunningSequence:
    """One sequence of a sample."""

    __slots__ = (
        "_best",
        "_reported",
        "_stop_text",
        "index",
        "key",
        "kv",
        "logprobs",
        "sample",
        "stop_reason",
        "taken_bytes",
        "tokens",
    )

    def __init__(self, sample: Sample, index: int, kv: SequenceKv) -> None:
        self.sample = sample
        self.index = index
        self.key = stream_key(sample.seed, str(index))
        self.kv: SequenceKv | None = kv
        """None when it has ended or is preempted."""
        self.taken_bytes = 0
        """Reserved memory of its own buffer, if that is not the prompt's."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        self._best: list[Best] = []
        self._stop_text = sample.stops.follow(sample.prompt[-16:].tolist())
        self._reported = 0

    @property
    def uncached(self) -> int:
        """Trailing tokens that are not in the KV cache; 1 for a running sequence.

        The last token is fed to the model only when the next one is sampled.
        """
        assert self.kv is not None, "it is running or resuming"
        return len(self.sample.prompt) + len(self.tokens) - self.kv.length

    @property
    def position(self) -> int:
        """Position of its last token."""
        return len(self.sample.prompt) + len(self.tokens) - 1

    def add(self, token: int, logprob: float, best: Best | None = None) -> None:
        """Append a token, and check whether it is the last."""
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

    def new_tokens(self) -> SampleTokens:
        """The tokens since the last call."""
        new = slice(self._reported, None)
        self._reported = len(self.tokens)
        return SampleTokens(
            work_id=self.sample.work.work_id,
            sequence=self.index,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
        )

    def result(self) -> SampledSequence:
        """The sequence as an API type."""
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
    """The token ids of a prompt.

    Raises:
        ValidationError: It is empty, or has other chunks than text or ids outside the vocabulary.
    """
    chunks = prompt.chunks
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in chunks):
        raise ValidationError("the model takes text only, but the prompt has other chunks")
    parts = [chunk.numbers.numpy() for chunk in chunks if isinstance(chunk, EncodedTextChunk)]
    tokens: Array = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise ValidationError("the prompt is empty; it must have at least one token")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValidationError(f"the prompt has token ids outside 0…{vocabulary - 1}")
    return tokens
