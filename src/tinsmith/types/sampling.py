"""Types of sampling: parameters and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import Kind, Numbers, finite, pack
from tinsmith.types.record import (
    ArrayWriter,
    Frozen,
    Record,
    Request,
    checked_list,
    made_once,
    set_once,
)
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import TopkLogprobs, TopkRows, topk_from_plain

if TYPE_CHECKING:
    import numpy as np

StopReason: TypeAlias = Literal["length", "stop"]


class SamplingParams(Request):
    """How to sample tokens.

    `stop` is a string, a list of strings or a list of token ids. None stops at the end-of-sequence
    token; an empty list stops only at `max_tokens`. `top_k` -1 means all tokens.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampledSequence(Frozen):
    """One sampled sequence: its tokens, why it stopped, and logprobs if requested.

    The numbers are kept as received. `tokens`, `logprobs` and `topk_logprobs` are Python values,
    created on first use; the names ending in `_np` are numpy arrays.
    """

    __slots__ = ("_logprobs", "_made", "_tokens", "_topk", "sequence_id", "stop_reason")

    stop_reason: StopReason
    sequence_id: str
    _tokens: Numbers
    _logprobs: Numbers | None
    _topk: TopkLogprobs | None
    _made: dict[str, Any]

    def __init__(
        self,
        stop_reason: StopReason,
        sequence_id: str = "",
        tokens_np: Any = None,
        logprobs_np: Any = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        *,
        tokens: Any = None,
        logprobs: Any = None,
    ) -> None:
        if stop_reason not in ("length", "stop"):
            raise ValidationError(f"stop_reason must be 'length' or 'stop', not {stop_reason!r}")
        given = tokens if tokens_np is None else tokens_np
        set_once(self, "stop_reason", stop_reason)
        set_once(self, "sequence_id", sequence_id)
        set_once(self, "_tokens", _held(() if given is None else given, "int32", "tokens"))
        given = logprobs if logprobs_np is None else logprobs_np
        set_once(self, "_logprobs", _optional(given, "logprobs"))
        set_once(self, "_topk", topk_logprobs_np)
        set_once(self, "_made", {})

    @property
    def tokens(self) -> list[int]:
        """The token ids; the same list every time."""
        return made_once(self, "tokens", self._tokens.tolist)

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token, or None; the same list every time."""
        if self._logprobs is None:
            return None
        return made_once(self, "logprobs", self._logprobs.tolist)

    @property
    def topk_logprobs(self) -> TopkRows | None:
        """The most likely tokens at each position, as a sequence of rows, or None."""
        return None if self._topk is None else TopkRows(self._topk)

    @property
    def tokens_np(self) -> np.ndarray[Any, Any]:
        """The token ids as a numpy int32 array."""
        return made_once(self, "tokens_np", self._tokens.numpy)

    @property
    def logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The log-probabilities as a numpy float32 array, or None."""
        if self._logprobs is None:
            return None
        return made_once(self, "logprobs_np", self._logprobs.numpy)

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        """The most likely tokens at each position as matrices, or None."""
        return self._topk

    @property
    def token_numbers(self) -> Numbers:
        """The token ids as a buffer."""
        return self._tokens

    @property
    def logprob_numbers(self) -> Numbers | None:
        """The log-probabilities as a buffer, or None."""
        return self._logprobs

    def with_sequence_id(self, sequence_id: str) -> SampledSequence:
        """A copy with this id, which the service assigned at submission."""
        return SampledSequence(
            self.stop_reason, sequence_id, self._tokens, self._logprobs, self._topk
        )

    def _parts(self) -> tuple[Any, ...]:
        return self.stop_reason, self.sequence_id, self._tokens, self._logprobs, self._topk

    def __repr__(self) -> str:
        return (
            f"SampledSequence(stop_reason={self.stop_reason!r}, "
            f"sequence_id={self.sequence_id!r}, {len(self._tokens)} tokens)"
        )

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        """The JSON format of SDK 0.24 and older, which has no ids."""
        plain: dict[str, Any] = {
            "stop_reason": self.stop_reason,
            "tokens": write_array(self._tokens),
        }
        if self._logprobs is not None:
            plain["logprobs"] = write_array(self._logprobs)
        return plain

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        if not isinstance(plain, dict) or "tokens" not in plain:
            raise ValueError("Expected a sequence: an object with tokens and stop_reason")
        return cls(
            plain.get("stop_reason"),  # type: ignore[arg-type]
            tokens=plain["tokens"],
            logprobs=plain.get("logprobs"),
        )


class PromptAltTokens(Frozen):
    """Tokens sampled at each position of the prompt as alternatives to the actual one."""

    __slots__ = ("logprobs", "tokens")

    tokens: TensorData
    logprobs: TensorData

    def __init__(self, tokens: TensorData, logprobs: TensorData) -> None:
        set_once(self, "tokens", tokens)
        set_once(self, "logprobs", logprobs)

    def _parts(self) -> tuple[Any, ...]:
        return self.tokens, self.logprobs

    def __repr__(self) -> str:
        return f"PromptAltTokens(tokens={self.tokens!r}, logprobs={self.logprobs!r})"


class SampleResponse(Frozen):
    """The sequences of one sample request, and the requested values of its prompt.

    Prompt logprobs have one entry per position. The first one, and those not computed, are None in
    the list and NaN in the numpy array.
    """

    __slots__ = (
        "_made",
        "_prompt_logprobs",
        "_topk_prompt",
        "prompt_alt_tokens",
        "prompt_cache_hit_tokens",
        "sequences",
        "target_prompt_logprobs",
    )

    sequences: Sequence[SampledSequence]
    target_prompt_logprobs: TensorData | None
    prompt_cache_hit_tokens: int
    prompt_alt_tokens: PromptAltTokens | None
    _prompt_logprobs: Numbers | None
    _topk_prompt: TopkLogprobs | None
    _made: dict[str, Any]

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs_np: Any = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
        *,
        prompt_logprobs: Sequence[float | None] | None = None,
    ) -> None:
        if prompt_logprobs is not None and prompt_logprobs_np is None:
            prompt_logprobs_np = [math.nan if x is None else x for x in prompt_logprobs]
        set_once(self, "sequences", sequences)
        set_once(self, "target_prompt_logprobs", target_prompt_logprobs)
        set_once(self, "prompt_cache_hit_tokens", prompt_cache_hit_tokens)
        set_once(self, "prompt_alt_tokens", prompt_alt_tokens)
        held = _optional(prompt_logprobs_np, "prompt_logprobs")
        set_once(self, "_prompt_logprobs", held)
        set_once(self, "_topk_prompt", topk_prompt_logprobs_np)
        set_once(self, "_made", {})

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The log-probability of each prompt token given those before; the same list every time."""
        if self._prompt_logprobs is None:
            return None
        return made_once(self, "prompt_logprobs", self._list_prompt_logprobs)

    def _list_prompt_logprobs(self) -> list[float | None]:
        assert self._prompt_logprobs is not None
        return [None if math.isnan(x) else x for x in self._prompt_logprobs.tolist()]

    @property
    def topk_prompt_logprobs(self) -> TopkRows | None:
        """The most likely tokens at each prompt position, as a sequence of rows, or None."""
        return None if self._topk_prompt is None else TopkRows(self._topk_prompt)

    @property
    def prompt_logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The prompt's log-probabilities as a numpy float32 array, NaN where missing, or None."""
        if self._prompt_logprobs is None:
            return None
        return made_once(self, "prompt_logprobs_np", self._prompt_logprobs.numpy)

    @property
    def topk_prompt_logprobs_np(self) -> TopkLogprobs | None:
        """The most likely tokens at each prompt position as matrices, or None."""
        return self._topk_prompt

    @property
    def prompt_logprob_numbers(self) -> Numbers | None:
        """The prompt's log-probabilities as a buffer, or None."""
        return self._prompt_logprobs

    def with_sequence_ids(self, sequence_ids: Sequence[str]) -> SampleResponse:
        """A copy whose sequences have these ids, in order.

        Raises:
            ValueError: The numbers of ids and sequences differ.
        """
        if len(sequence_ids) != len(self.sequences):
            raise ValidationError(
                f"received {len(self.sequences)} sequences with {len(sequence_ids)} sequence ids"
            )
        named = [
            sequence.with_sequence_id(sequence_id)
            for sequence, sequence_id in zip(self.sequences, sequence_ids, strict=True)
        ]
        return SampleResponse(named, *self._parts()[1:])

    def _parts(self) -> tuple[Any, ...]:
        return (
            list(self.sequences),
            self._prompt_logprobs,
            self._topk_prompt,
            self.target_prompt_logprobs,
            self.prompt_cache_hit_tokens,
            self.prompt_alt_tokens,
        )

    def __repr__(self) -> str:
        return f"SampleResponse(sequences={list(self.sequences)!r})"

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        """The JSON format of SDK 0.24 and older."""
        plain: dict[str, Any] = {
            "sequences": [sequence._to_plain(write_array) for sequence in self.sequences],
            "type": "sample",
        }
        if self.prompt_logprobs is not None:
            plain["prompt_logprobs"] = [
                None if logprob is None else finite(logprob) for logprob in self.prompt_logprobs
            ]
        if self._topk_prompt is not None:
            plain["topk_prompt_logprobs"] = self._topk_prompt._to_plain(write_array)
        return plain

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        sequences = plain.get("sequences") if isinstance(plain, dict) else None
        if not isinstance(sequences, list):
            raise ValueError("Expected an object with a list of sequences")
        return cls(
            [SampledSequence._from_plain(sequence) for sequence in sequences],
            prompt_logprobs=checked_list(plain.get("prompt_logprobs"), "prompt_logprobs"),
            topk_prompt_logprobs_np=topk_from_plain(plain.get("topk_prompt_logprobs")),
        )


class CreateSamplingSessionResponse(Record):
    """The sampler was created."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionResponse(Record):
    """The number that identifies a clone of a sampling client."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Record):
    """The model that a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    tokenizer_id: str | None = None
    """Only from tinsmith services; otherwise use the name of the base model."""


def _optional(values: Any, what: str) -> Numbers | None:
    return None if values is None else _held(values, "float32", what)


def _held(values: Any, kind: Kind, what: str) -> Numbers:
    is_held = isinstance(values, Numbers) and values.kind == kind  # as from all decoders
    return values if is_held else pack(values, kind, what)[0]
