"""What of a pass is computed together: *pieces* of one work, and packs of pieces.

A work is cut into pieces by itself alone. Pieces of several works and adapters then share packs,
and which do so does not change their numbers: rows of a pack see only their own sequence, and sums
over rows (the gradients of an adapter) are formed piece by piece, in the order of the pieces.

Sequences of a work that begin alike, as the samples of one prompt do, are one *group*: the rows of
what they share come once, and each sequence's own rows follow them. One level of sharing is looked
for; that which saves most rows is taken.

    group of three:   [ shared prompt ][ tail 1 ][ tail 2 ][ tail 3 ]

Knows nothing of tensors, losses or adapters.
"""

# N position of a sequence, K target of a position, T row of a piece, R row that is looked up,
# C position of all sequences of a piece

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tinsmith.errors import ValidationError
from tinsmith.types.inputs import Datum, EncodedTextChunk

Array: TypeAlias = "np.ndarray[Any, Any]"
Owner = TypeVar("Owner", bound=Hashable)

LEAST_SHARED = 32
"""A shorter common beginning is computed for each sequence: sharing costs more than it saves."""


class Budget(NamedTuple):
    """How many rows may be computed together."""

    rows: int
    """With everything kept that the way back needs."""
    saving_rows: int
    """With little kept and computed again on the way back."""


class Example(NamedTuple):
    """A datum, read."""

    place: int
    """Its place in the work."""
    tokens_N: Array
    targets_NK: Array
    cells_NK: Array
    """The number of each target among all those of the work."""


class Range(NamedTuple):
    """Rows of a piece that follow each other in one sequence."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None
    """Rows that come before them in it and are shared."""


class Part(NamedTuple):
    """Where an example is in a piece."""

    example: Example
    rows_N: Array


class Lookup(NamedTuple):
    """Rows of a piece whose targets are looked up, each with the same number of targets.

    Equal targets of a shared row are looked up once, so a row may answer several positions.
    """

    rows_R: Array
    targets_RK: Array
    row_of_C: Array
    """For each position of the piece's examples, which R answers it; it never falls."""
    cells_CK: Array
    """The numbers of that position's targets among all those of the work."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Sequences of one work that are always computed together."""

    tokens_T: Array
    positions_T: Array
    ranges: tuple[Range, ...]
    parts: tuple[Part, ...]
    saves_memory: bool
    """Whether it is too large to keep everything for the way back."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.tokens_T)

    def lookups(self) -> list[Lookup]:
        """Its targets, one lookup for each number of targets that a position may have."""
        by_width: dict[int, list[Part]] = {}
        for part in self.parts:
            by_width.setdefault(part.example.targets_NK.shape[1], []).append(part)
        return [_lookup(parts, self._is_shared) for _, parts in sorted(by_width.items())]

    @property
    def _is_shared(self) -> bool:
        return self.rows < sum(len(part.rows_N) for part in self.parts)


def read_tokens(data: Sequence[Datum], vocabulary: int, max_context: int) -> list[Array]:
    """The input tokens of a work's data.

    Raises:
        ValidationError: A datum is not one that a text model can read.
    """
    found: list[Array] = []
    for index, datum in enumerate(data):
        tokens_N = _tokens(datum, index)
        if len(tokens_N) > max_context:
            raise ValidationError(
                f"datum {index} has {len(tokens_N)} tokens; the model reads at most {max_context}"
            )
        _check_ids(tokens_N, "token", index, vocabulary)
        found.append(tokens_N)
    return found


def make_examples(
    tokens: Sequence[Array], targets: Sequence[Array], vocabulary: int
) -> list[Example]:
    """The data of a work, from their tokens and their targets, of which each has one row or more.

    Raises:
        ValidationError: A target is not in the vocabulary.
    """
    examples: list[Example] = []
    cells = 0
    for index, (tokens_N, given) in enumerate(zip(tokens, targets, strict=True)):
        _check_ids(given, "target", index, vocabulary)
        targets_NK = given[:, None] if given.ndim == 1 else given
        cells_NK = np.arange(cells, cells + given.size).reshape(targets_NK.shape)
        examples.append(Example(index, tokens_N, targets_NK, cells_NK))
        cells += given.size
    return examples


def _check_ids(ids: Array, what: str, index: int, vocabulary: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise ValidationError(
            f"datum {index} has the {what} {wrong}; the model's tokens are 0 to {vocabulary - 1}"
        )


def _tokens(datum: Datum, index: int) -> Array:
    chunks = []
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise ValidationError(
                f"datum {index} has a chunk of type {chunk.type!r}; this model reads text alone"
            )
        chunks.append(chunk.numbers.numpy().astype(np.int64))
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


# Pieces


def cut(examples: Sequence[Example], budget: Budget) -> list[Piece]:
    """The pieces of a work. What they are follows from the examples and the budget alone."""
    pieces: list[Piece] = []
    draft = _Draft()
    for shared, group in _groups(examples):
        for some in _parted(shared, group, budget):
            rows = _rows(shared, some)
            if draft.rows and draft.rows + rows > budget.rows:
                pieces.append(draft.piece(budget))
                draft = _Draft()
            draft.add(shared, some)
    if draft.parts:
        pieces.append(draft.piece(budget))
    return pieces


def _rows(shared: int, group: Sequence[Example]) -> int:
    return shared + sum(len(one.tokens_N) - shared for one in group)


def _parted(shared: int, group: Sequence[Example], budget: Budget) -> Iterator[tuple[Example, ...]]:
    """A group in as many parts as it takes to keep to the budget, each with the shared rows."""
    # Where the shared rows are many, to compute them for each part costs more than to save memory.
    most = budget.rows if 4 * shared <= budget.rows else budget.saving_rows
    some: list[Example] = []
    rows = shared
    for one in group:
        tail = len(one.tokens_N) - shared
        if some and rows + tail > most:
            yield tuple(some)
            some, rows = [], shared
        some.append(one)
        rows += tail
    yield tuple(some)


@dataclass
class _Draft:
    """A piece that is being filled."""

    rows: int = 0
    tokens: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, shared: int, group: Sequence[Example]) -> None:
        start = self._append(group[0].tokens_N[:shared], 0, None)
        prefix_N = np.arange(start, start + shared)
        prefix = (start, start + shared) if shared else None
        for one in group:
            first = self._append(one.tokens_N[shared:], shared, prefix)
            tail_N = np.arange(first, self.rows)
            self.parts.append(Part(one, np.concatenate((prefix_N, tail_N)) if shared else tail_N))

    def _append(self, tokens: Array, position: int, prefix: tuple[int, int] | None) -> int:
        start = self.rows
        if len(tokens):
            self.rows += len(tokens)
            self.tokens.append(tokens)
            self.positions.append(np.arange(position, position + len(tokens)))
            self.ranges.append(Range(start, self.rows, prefix))
        return start

    def piece(self, budget: Budget) -> Piece:
        nothing = np.zeros(0, np.int64)
        return Piece(
            tokens_T=np.concatenate([nothing, *self.tokens]),
            positions_T=np.concatenate([nothing, *self.positions]),
            ranges=tuple(self.ranges),
            parts=tuple(self.parts),
            saves_memory=self.rows > budget.rows,
        )


def _lookup(parts: Sequence[Part], is_shared: bool) -> Lookup:
    rows_C = np.concatenate([part.rows_N for part in parts])
    targets_CK = np.concatenate([part.example.targets_NK for part in parts])
    cells_CK = np.concatenate([part.example.cells_NK for part in parts])
    if not is_shared:
        return Lookup(rows_C, targets_CK, np.arange(len(rows_C)), cells_CK)
    both_CK = np.concatenate((rows_C[:, None], targets_CK), axis=1)
    both_RK, row_of_C = np.unique(both_CK, axis=0, return_inverse=True)
    row_of_C = row_of_C.reshape(-1)
    order_C = np.argsort(row_of_C, kind="stable")
    return Lookup(both_RK[:, 0], both_RK[:, 1:], row_of_C[order_C], cells_CK[order_C])


# Groups


def _groups(examples: Sequence[Example]) -> list[tuple[int, list[Example]]]:
    """Which examples are computed with a shared beginning of how many tokens; 0 for those alone.

    In alphabetical order, examples that begin alike are neighbours, and how far they do so makes
    a tree: each node is a range of neighbours and what all of them share. From the leaves up, a
    node is taken whole if that saves more rows than what was taken below it.
    """
    if len(examples) < 2:
        return [(0, [one]) for one in examples]
    # Big-endian: bytes then sort as the numbers do.
    ordered = sorted(examples, key=lambda one: one.tokens_N.astype(">u4").tobytes())
    found = _shared_ranges([_common(a, b) for a, b in pairwise(ordered)])
    groups = [
        (shared, sorted(ordered[start:end], key=lambda one: one.place))
        for shared, start, end in found
    ]
    return sorted(groups, key=lambda group: group[1][0].place)


def _common(one: Example, other: Example) -> int:
    """How many tokens they begin with alike."""
    length = min(len(one.tokens_N), len(other.tokens_N))
    differ = one.tokens_N[:length] != other.tokens_N[:length]
    return int(differ.argmax()) if differ.any() else length


_Shared: TypeAlias = tuple[int, int, int]
"""So many tokens are shared by the neighbours from here to there."""


@dataclass
class _Node:
    depth: int
    start: int
    saved: int = 0
    taken: list[_Shared] = field(default_factory=list)

    def add(self, other: _Node) -> None:
        self.saved += other.saved
        self.taken += other.taken

    def close(self, end: int) -> _Node:
        """Take it whole if that is better."""
        saved = (end - self.start - 1) * self.depth if self.depth >= LEAST_SHARED else 0
        if saved > self.saved:
            self.saved, self.taken = saved, [(self.depth, self.start, end)]
        return self


def _shared_ranges(common: Sequence[int]) -> list[_Shared]:
    """The best ranges, from how far each neighbour goes with the next. They cover all."""
    open_nodes: list[_Node] = []
    last = _Node(0, 0, 0, [(0, 0, 1)])
    for place, depth in enumerate([*common, -1], start=1):
        while open_nodes and open_nodes[-1].depth > depth:
            node = open_nodes.pop()
            node.add(last)
            last = node.close(place)
        if depth < 0:
            break
        if not open_nodes or open_nodes[-1].depth < depth:
            open_nodes.append(_Node(depth, last.start))
        open_nodes[-1].add(last)
        last = _Node(0, place, 0, [(0, place, place + 1)])
    return last.taken


# Packs


@dataclass(eq=False)
class Pack(Generic[Owner]):
    """Pieces of several works that run in one pass."""

    pieces: list[tuple[Owner, Piece]] = field(default_factory=list)
    rows: int = 0

    @property
    def saves_memory(self) -> bool:
        """Whether it holds a piece that must."""
        return any(piece.saves_memory for _, piece in self.pieces)


def make_packs(works: Iterable[tuple[Owner, Sequence[Piece]]], budget: Budget) -> list[Pack[Owner]]:
    """Pieces of works in packs; those of one work stay in their order."""
    packs: list[Pack[Owner]] = []
    for owner, pieces in works:
        first = 0
        for piece in pieces:
            fitting = (
                place
                for place in range(first, len(packs))
                if packs[place].rows + piece.rows <= budget.rows
            )
            first = next(fitting, len(packs))
            if first == len(packs):
                packs.append(Pack())
            packs[first].pieces.append((owner, piece))
            packs[first].rows += piece.rows
    return packs
