"""What is asked of a sampler and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, overload

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import Kind, Numbers, finite, pack, rows
from tinsmith.types.record import ArrayWriter, Frozen, Record, Request, set_once
from tinsmith.types.tensors import TensorData

if TYPE_CHECKING:
    import numpy as np

StopReason: TypeAlias = Literal["length", "stop"]

EMPTY_LOGPROB = -99999.0
"""Stands, with token id 0, in the unused cells of a top-k matrix."""

MadeT = TypeVar("MadeT")

TopkRow: TypeAlias = list[tuple[int, float]] | None


class SamplingParams(Request):
    """How to draw tokens.

    `stop` is text, a list of texts or a list of token ids; None stops at the end-of-sequence token
    and an empty list at nothing, so that the sample runs to `max_tokens`. `top_k` -1 means all
    tokens.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TopkLogprobs(Frozen):
    """The k most likely tokens at each position, as two matrices of `length` rows.

    Matrices may be given as numpy arrays or nested lists. Unused cells hold id 0 and -99999.0.
    """

    __slots__ = ("_ids", "_logprobs", "_made", "_shape")

    _ids: Numbers
    _logprobs: Numbers
    _shape: tuple[int, int]
    _made: dict[str, Any]

    def __init__(self, token_ids: Any, logprobs: Any, shape: tuple[int, int] | None = None) -> None:
        ids, ids_shape = pack(token_ids, "int32", "token_ids")
        values, values_shape = pack(logprobs, "float32", "logprobs")
        if shape is None:
            if len(ids_shape) != 2 or ids_shape != values_shape:
                raise ValidationError(
                    f"token_ids and logprobs must be matrices of one shape, "
                    f"not {ids_shape} and {values_shape}"
                )
            shape = (ids_shape[0], ids_shape[1])
        if not len(ids) == len(values) == shape[0] * shape[1]:
            raise ValidationError(
                f"{shape[0]} positions of {shape[1]} need {shape[0] * shape[1]} cells, "
                f"not {len(ids)} ids and {len(values)} logprobs"
            )
        set_once(self, "_ids", ids)
        set_once(self, "_logprobs", values)
        set_once(self, "_shape", shape)
        set_once(self, "_made", {})

    @classmethod
    def of_numbers(cls, ids: Numbers, logprobs: Numbers, shape: tuple[int, int]) -> Self:
        """Matrices of numbers known to be right in kind and count; unchecked."""
        topk = object.__new__(cls)
        set_once(topk, "_ids", ids)
        set_once(topk, "_logprobs", logprobs)
        set_once(topk, "_shape", shape)
        set_once(topk, "_made", {})
        return topk

    @property
    def length(self) -> int:
        """How many positions there are."""
        return self._shape[0]

    @property
    def k(self) -> int:
        """How many cells each position has."""
        return self._shape[1]

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        """The ids as a numpy int32 matrix of shape (length, k); the same one each time."""
        return _made_once(self, "token_ids", lambda: self._ids.numpy().reshape(self._shape))

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        """The log-probabilities as a numpy float32 matrix of that shape; the same one each time."""
        return _made_once(self, "logprobs", lambda: self._logprobs.numpy().reshape(self._shape))

    @property
    def id_numbers(self) -> Numbers:
        """The ids in memory, row by row."""
        return self._ids

    @property
    def logprob_numbers(self) -> Numbers:
        """The log-probabilities in memory, row by row."""
        return self._logprobs

    def _parts(self) -> tuple[Any, ...]:
        return self._ids, self._logprobs, self._shape

    def __repr__(self) -> str:
        return f"TopkLogprobs(length={self.length}, k={self.k})"

    def _to_plain(self, write_array: ArrayWriter) -> list[Any]:  # noqa: ARG002 - pairs, not arrays
        return [
            None if row is None else [[token, finite(logprob)] for token, logprob in row]
            for row in TopkRows(self)
        ]


class TopkRows(Sequence[TopkRow]):
    """Top-k logprobs read as a list: each row is `[(token id, logprob), …]`, best first, or None.

    A row is made when it is read. A long answer with k = 20 has so many cells that making them all
    costs more than everything else the client does for it; `list(rows)` makes them all.
    """

    __slots__ = ("_topk",)

    def __init__(self, topk: TopkLogprobs) -> None:
        self._topk = topk

    def __len__(self) -> int:
        return self._topk.length if self._topk.k else 0

    @overload
    def __getitem__(self, index: int) -> TopkRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TopkRow]: ...
    def __getitem__(self, index: int | slice) -> TopkRow | list[TopkRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} positions, not {index}")
        start = (index % len(self)) * self._topk.k
        stop = start + self._topk.k
        ids, logprobs = self._topk.id_numbers, self._topk.logprob_numbers
        return _row(tuple(ids.slice(start, stop).view()), tuple(logprobs.slice(start, stop).view()))

    def __iter__(self) -> Iterator[TopkRow]:
        if not len(self):
            return iter(())
        k = self._topk.k
        ids, logprobs = rows(self._topk.id_numbers, k), rows(self._topk.logprob_numbers, k)
        if self._are_all_full():
            return map(list, map(zip, ids, logprobs))
        return map(_row, ids, logprobs)

    def _are_all_full(self) -> bool:
        """Whether no row begins or ends with an unused cell; nearly always."""
        logprobs, k = self._topk.logprob_numbers.view(), self._topk.k
        return EMPTY_LOGPROB not in logprobs[::k] and EMPTY_LOGPROB not in logprobs[k - 1 :: k]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TopkRows):
            return self._topk == other._topk
        if isinstance(other, list):
            return len(self) == len(other) and all(map(_is_same_row, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # compares equal to lists, which have no hash

    def __repr__(self) -> str:
        return f"TopkRows({len(self)} positions, k={self._topk.k})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TopkRows, (self._topk,)


def _row(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> TopkRow:
    if EMPTY_LOGPROB not in (logprobs[0], logprobs[-1]):  # nearly always: the row is full
        return list(zip(ids, logprobs, strict=True))
    used = len(ids)
    while used and ids[used - 1] == 0 and logprobs[used - 1] == EMPTY_LOGPROB:
        used -= 1
    if not used or (ids[0] == 0 and logprobs[0] == EMPTY_LOGPROB):
        return None
    return list(zip(ids[:used], logprobs[:used], strict=True))


def _is_same_row(mine: TopkRow, other: object) -> bool:
    return mine == other


class SampledSequence(Frozen):
    """One sampled sequence: its tokens, why it stopped, and logprobs if they were asked for.

    Numbers stay in memory as they arrived; `tokens`, `logprobs` and `topk_logprobs` are the Python
    forms, made on first use, and the names ending in `_np` the numpy ones.
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
        set_once(self, "_tokens", pack(() if given is None else given, "int32", "tokens")[0])
        given = logprobs if logprobs_np is None else logprobs_np
        set_once(self, "_logprobs", _optional(given, "float32", "logprobs"))
        set_once(self, "_topk", topk_logprobs_np)
        set_once(self, "_made", {})

    @property
    def tokens(self) -> list[int]:
        """The token ids; the same list each time."""
        return _made_once(self, "tokens", self._tokens.tolist)

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token, or None; the same list each time."""
        if self._logprobs is None:
            return None
        return _made_once(self, "logprobs", self._logprobs.tolist)

    @property
    def topk_logprobs(self) -> TopkRows | None:
        """The most likely tokens at each position, read like a list of rows, or None."""
        return None if self._topk is None else TopkRows(self._topk)

    @property
    def tokens_np(self) -> np.ndarray[Any, Any]:
        """The token ids as a numpy int32 array."""
        return _made_once(self, "tokens_np", self._tokens.numpy)

    @property
    def logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The log-probabilities as a numpy float32 array, or None."""
        if self._logprobs is None:
            return None
        return _made_once(self, "logprobs_np", self._logprobs.numpy)

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        """The most likely tokens at each position as matrices, or None."""
        return self._topk

    @property
    def token_numbers(self) -> Numbers:
        """The token ids in memory."""
        return self._tokens

    @property
    def logprob_numbers(self) -> Numbers | None:
        """The log-probabilities in memory, or None."""
        return self._logprobs

    def with_sequence_id(self, sequence_id: str) -> SampledSequence:
        """The same sequence under the id that its submission was answered with."""
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
        """The JSON form of SDK 0.24 and older, which knows no ids."""
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
    """Tokens drawn at each prompt position instead of the one that stands there."""

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
    """The sequences of one sample request, and what was asked about its prompt.

    Prompt logprobs have one entry per position; the first, and those not computed, are None in the
    list and NaN in the numpy form.
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
        held = _optional(prompt_logprobs_np, "float32", "prompt_logprobs")
        set_once(self, "_prompt_logprobs", held)
        set_once(self, "_topk_prompt", topk_prompt_logprobs_np)
        set_once(self, "_made", {})

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The log-probability of each prompt token after those before it; one list always."""
        if self._prompt_logprobs is None:
            return None
        return _made_once(self, "prompt_logprobs", self._list_prompt_logprobs)

    def _list_prompt_logprobs(self) -> list[float | None]:
        assert self._prompt_logprobs is not None
        return [None if math.isnan(x) else x for x in self._prompt_logprobs.tolist()]

    @property
    def topk_prompt_logprobs(self) -> TopkRows | None:
        """The most likely tokens at each prompt position, read like a list of rows, or None."""
        return None if self._topk_prompt is None else TopkRows(self._topk_prompt)

    @property
    def prompt_logprobs_np(self) -> np.ndarray[Any, Any] | None:
        """The prompt's log-probabilities as a numpy float32 array, NaN where there is none."""
        if self._prompt_logprobs is None:
            return None
        return _made_once(self, "prompt_logprobs_np", self._prompt_logprobs.numpy)

    @property
    def topk_prompt_logprobs_np(self) -> TopkLogprobs | None:
        """The most likely tokens at each prompt position as matrices, or None."""
        return self._topk_prompt

    @property
    def prompt_logprob_numbers(self) -> Numbers | None:
        """The prompt's log-probabilities in memory, or None."""
        return self._prompt_logprobs

    def with_sequence_ids(self, sequence_ids: Sequence[str]) -> SampleResponse:
        """The same answer with the ids of its submission, which are in the sequences' order.

        Raises:
            ValueError: There are more or fewer ids than sequences.
        """
        if len(sequence_ids) != len(self.sequences):
            raise ValidationError(
                f"{len(self.sequences)} sequences came with {len(sequence_ids)} sequence ids"
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
        """The JSON form of SDK 0.24 and older."""
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
            prompt_logprobs=_checked_list(plain.get("prompt_logprobs"), "prompt_logprobs"),
            topk_prompt_logprobs_np=_topk_from_plain(plain.get("topk_prompt_logprobs")),
        )


class CreateSamplingSessionResponse(Record):
    """A sampler is ready."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionResponse(Record):
    """The number under which a clone's samples are counted."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Record):
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


def _made_once(
    owner: TopkLogprobs | SampledSequence | SampleResponse, name: str, make: Callable[[], MadeT]
) -> MadeT:
    made: dict[str, MadeT] = owner._made
    if name not in made:
        made[name] = make()
    return made[name]


def _optional(values: Any, kind: Kind, what: str) -> Numbers | None:
    return None if values is None else pack(values, kind, what)[0]


def _checked_list(value: Any, what: str) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"Expected {what} to be a list")
    return value


def _topk_from_plain(plain: Any) -> TopkLogprobs | None:
    """Rows of `[id, logprob]` pairs, some None and some short, as matrices."""
    listed = _checked_list(plain, "topk_prompt_logprobs")
    if listed is None:
        return None
    given = [_checked_list(row, "a row of topk_prompt_logprobs") or () for row in listed]
    k = max(map(len, given), default=0)
    if k == 0:
        return None
    if k * len(given) > _MOST_PADDING * (len(given) + sum(map(len, given))):
        raise ValueError("Expected the rows of topk_prompt_logprobs to be of like length")
    if any(not isinstance(cell, list) or len(cell) != 2 for row in given for cell in row):
        raise ValueError("Expected topk_prompt_logprobs to hold pairs of a token id and a logprob")
    ids = _padded(given, 0, k, "int32", unused=0)
    logprobs = _padded(given, 1, k, "float32", unused=EMPTY_LOGPROB)
    return TopkLogprobs(ids, logprobs, shape=(len(given), k))


_MOST_PADDING = 24
"""How many cells one row or cell that came may be padded to; a matrix of one long row and many
empty ones would take the square of what was sent."""


def _padded(
    given: Sequence[Sequence[Any]], place: int, k: int, kind: Kind, *, unused: float
) -> Numbers:
    """The ids or the logprobs of all rows as one matrix, each row filled up to `k`."""
    empty_cell = bytes(pack([unused], kind)[0].memory)
    matrix = bytearray(empty_cell) * (k * len(given))
    for index, row in enumerate(given):
        held, shape = pack([cell[place] for cell in row], kind, "topk_prompt_logprobs")
        if shape != [len(row)]:
            raise ValueError("Expected a token id and a logprob to be one number each")
        start = index * k * len(empty_cell)
        matrix[start : start + len(held.memory)] = held.memory
    return Numbers(memoryview(matrix).toreadonly(), kind)
