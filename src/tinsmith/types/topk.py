"""The k most likely tokens at each position: stored as two matrices, read as rows of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import Kind, Numbers, finite, pack, rows
from tinsmith.types.record import ArrayWriter, Frozen, checked_list, made_once, set_once

if TYPE_CHECKING:
    import numpy as np

EMPTY_LOGPROB = -99999.0
"""The log-probability, with token id 0, in unused cells of a top-k matrix."""

TopkRow: TypeAlias = list[tuple[int, float]] | None


class TopkLogprobs(Frozen):
    """The k most likely tokens at each position, as two matrices of `length` rows and `k` columns.

    The matrices may be numpy arrays or nested lists. Unused cells have the id 0 and the
    log-probability -99999.0.
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
                    f"token_ids and logprobs must be matrices of the same shape, "
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
        """Create it from buffers, without checking their kind and size."""
        topk = object.__new__(cls)
        set_once(topk, "_ids", ids)
        set_once(topk, "_logprobs", logprobs)
        set_once(topk, "_shape", shape)
        set_once(topk, "_made", {})
        return topk

    @property
    def length(self) -> int:
        """The number of positions."""
        return self._shape[0]

    @property
    def k(self) -> int:
        """The number of tokens per position."""
        return self._shape[1]

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        """The ids as a numpy int32 matrix of shape (length, k); the same every time."""
        return made_once(self, "token_ids", lambda: self._ids.numpy().reshape(self._shape))

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        """The log-probabilities as a numpy float32 matrix (length, k); the same every time."""
        return made_once(self, "logprobs", lambda: self._logprobs.numpy().reshape(self._shape))

    @property
    def id_numbers(self) -> Numbers:
        """The ids as a buffer, row by row."""
        return self._ids

    @property
    def logprob_numbers(self) -> Numbers:
        """The log-probabilities as a buffer, row by row."""
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
    """Top-k logprobs as a sequence of rows `[(token id, logprob), …]`, best first, or None.

    Rows are created when they are read. For a long response with k = 20, creating all of them takes
    longer than everything else the client does for it; `list(rows)` does so.
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
            raise IndexError(f"index {index} is out of range for {len(self)} positions")
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
        """Whether no row starts or ends with an unused cell, which is the common case."""
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
    if EMPTY_LOGPROB not in (logprobs[0], logprobs[-1]):  # the common case: a full row
        return list(zip(ids, logprobs, strict=True))
    used = len(ids)
    while used and ids[used - 1] == 0 and logprobs[used - 1] == EMPTY_LOGPROB:
        used -= 1
    if not used or (ids[0] == 0 and logprobs[0] == EMPTY_LOGPROB):
        return None
    return list(zip(ids[:used], logprobs[:used], strict=True))


def _is_same_row(mine: TopkRow, other: object) -> bool:
    return mine == other


def topk_from_plain(plain: Any) -> TopkLogprobs | None:
    """Convert rows of `[id, logprob]` pairs, of which some may be None or short."""
    listed = checked_list(plain, "topk_prompt_logprobs")
    if listed is None:
        return None
    given = [checked_list(row, "a row of topk_prompt_logprobs") or () for row in listed]
    k = max(map(len, given), default=0)
    if k == 0:
        return None
    if k * len(given) > _MAX_PADDING * (len(given) + sum(map(len, given))):
        raise ValueError("Expected the rows of topk_prompt_logprobs to be of similar length")
    if any(not isinstance(cell, list) or len(cell) != 2 for row in given for cell in row):
        raise ValueError("Expected topk_prompt_logprobs to be pairs of a token id and a logprob")
    ids = _padded(given, 0, k, "int32", unused=0)
    logprobs = _padded(given, 1, k, "float32", unused=EMPTY_LOGPROB)
    return TopkLogprobs(ids, logprobs, shape=(len(given), k))


_MAX_PADDING = 24
"""The largest ratio of padded to received cells; one long row and many empty ones would otherwise
take memory quadratic in the size of the message."""


def _padded(
    given: Sequence[Sequence[Any]], place: int, k: int, kind: Kind, *, unused: float
) -> Numbers:
    """The ids or the logprobs of all rows as one matrix, with rows padded to `k`."""
    empty_cell = bytes(pack([unused], kind)[0].memory)
    matrix = bytearray(empty_cell) * (k * len(given))
    for index, row in enumerate(given):
        held, shape = pack([cell[place] for cell in row], kind, "topk_prompt_logprobs")
        if shape != [len(row)]:
            raise ValueError("Expected a token id and a logprob to be one number each")
        start = index * k * len(empty_cell)
        matrix[start : start + len(held.memory)] = held.memory
    return Numbers(memoryview(matrix).toreadonly(), kind)
