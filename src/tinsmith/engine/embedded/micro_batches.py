"""Splits works into *micro-batches*, and packs micro-batches of several works into batches.

How a work is split depends on the work alone. Micro-batches of several works and adapters then
share packed batches, which does not affect results: rows see only their own sequence, and sums over
rows (the gradients of an adapter) are computed micro-batch by micro-batch, in order.

Sequences of a work with the same prefix, such as samples of one prompt, form a *group*: the shared
rows come once, followed by each sequence's own rows. There is one level of sharing; the one that
saves the most rows is chosen.

    group of three:   [ shared prompt ][ tail 1 ][ tail 2 ][ tail 3 ]

Knows nothing of tensors, losses or adapters.
"""

# N position of a sequence, K target of a position, T row of a micro-batch, R row that is looked up,
# C position of all sequences of a micro-batch

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
"""Minimum length of a shared prefix; for shorter ones sharing costs more than it saves."""


class RowBudget(NamedTuple):
    """Maximum rows of a packed batch."""

    rows: int
    """With all activations saved for the backward."""
    recompute_rows: int
    """With activations recomputed in the backward."""


class TrainingExample(NamedTuple):
    """A datum as arrays."""

    place: int
    """Its index in the work."""
    tokens_N: Array
    targets_NK: Array
    cells_NK: Array
    """The index of each target among all targets of the work."""


class RowRange(NamedTuple):
    """Consecutive rows of one sequence in a micro-batch."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None
    """The rows of the shared prefix before them."""


class ExampleRows(NamedTuple):
    """The rows of an example in a micro-batch."""

    example: TrainingExample
    rows_N: Array


class TargetLookup(NamedTuple):
    """Rows of a micro-batch whose targets are looked up, each with equally many targets.

    Equal targets of a shared row are looked up once, so a row may serve several positions.
    """

    rows_R: Array
    targets_RK: Array
    row_of_C: Array
    """The R of each position of the examples, in ascending order."""
    cells_CK: Array
    """The indices of its targets among all targets of the work."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences of one work that are always computed together."""

    tokens_T: Array
    positions_T: Array
    ranges: tuple[RowRange, ...]
    parts: tuple[ExampleRows, ...]
    recomputes: bool
    """Whether it is too large to save all activations."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens_T)

    def lookups(self) -> list[TargetLookup]:
        """Its targets, one lookup for each number of targets per position."""
        by_width: dict[int, list[ExampleRows]] = {}
        for part in self.parts:
            by_width.setdefault(part.example.targets_NK.shape[1], []).append(part)
        return [_lookup(parts, self._is_shared) for _, parts in sorted(by_width.items())]

    @property
    def _is_shared(self) -> bool:
        return self.rows < sum(len(part.rows_N) for part in self.parts)


def read_tokens(data: Sequence[Datum], vocabulary: int, max_context: int) -> list[Array]:
    """The input tokens of a work's data.

    Raises:
        ValidationError: A datum is not text, too long, or has invalid token ids.
    """
    found: list[Array] = []
    for index, datum in enumerate(data):
        tokens_N = _tokens(datum, index)
        if len(tokens_N) > max_context:
            raise ValidationError(
                f"datum {index} has {len(tokens_N)} tokens; the model's context is {max_context}"
            )
        _check_ids(tokens_N, "token", index, vocabulary)
        found.append(tokens_N)
    return found


def make_examples(
    tokens: Sequence[Array], targets: Sequence[Array], vocabulary: int
) -> list[TrainingExample]:
    """The examples of a work, from its tokens and targets.

    Raises:
        ValidationError: A target is outside of the vocabulary.
    """
    examples: list[TrainingExample] = []
    cells = 0
    for index, (tokens_N, given) in enumerate(zip(tokens, targets, strict=True)):
        _check_ids(given, "target", index, vocabulary)
        targets_NK = given[:, None] if given.ndim == 1 else given
        cells_NK = np.arange(cells, cells + given.size).reshape(targets_NK.shape)
        examples.append(TrainingExample(index, tokens_N, targets_NK, cells_NK))
        cells += given.size
    return examples


def _check_ids(ids: Array, what: str, index: int, vocabulary: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise ValidationError(
            f"datum {index} has the {what} {wrong}; valid ids are 0 to {vocabulary - 1}"
        )


def _tokens(datum: Datum, index: int) -> Array:
    chunks = []
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise ValidationError(
                f"datum {index} has a chunk of type {chunk.type!r}; this model takes text only"
            )
        chunks.append(chunk.numbers.numpy().astype(np.int64))
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


# Micro-batches


def split_examples(examples: Sequence[TrainingExample], budget: RowBudget) -> list[MicroBatch]:
    """Split a work; depends on the examples and the budget alone."""
    micro_batches: list[MicroBatch] = []
    builder = _Builder()
    for shared, group in _groups(examples):
        for some in _split_group(shared, group, budget):
            rows = _rows(shared, some)
            if builder.rows and builder.rows + rows > budget.rows:
                micro_batches.append(builder.micro_batch(budget))
                builder = _Builder()
            builder.add(shared, some)
    if builder.parts:
        micro_batches.append(builder.micro_batch(budget))
    return micro_batches


def _rows(shared: int, group: Sequence[TrainingExample]) -> int:
    return shared + sum(len(one.tokens_N) - shared for one in group)


def _split_group(
    shared: int, group: Sequence[TrainingExample], budget: RowBudget
) -> Iterator[tuple[TrainingExample, ...]]:
    """A group in parts that keep to the budget, each with its own copy of the shared rows."""
    # With a long prefix, recomputing it per part costs more than recomputing activations.
    most = budget.rows if 4 * shared <= budget.rows else budget.recompute_rows
    some: list[TrainingExample] = []
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
class _Builder:
    """A micro-batch that is being filled."""

    rows: int = 0
    tokens: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    ranges: list[RowRange] = field(default_factory=list)
    parts: list[ExampleRows] = field(default_factory=list)

    def add(self, shared: int, group: Sequence[TrainingExample]) -> None:
        start = self._append(group[0].tokens_N[:shared], 0, None)
        prefix_N = np.arange(start, start + shared)
        prefix = (start, start + shared) if shared else None
        for one in group:
            first = self._append(one.tokens_N[shared:], shared, prefix)
            tail_N = np.arange(first, self.rows)
            self.parts.append(
                ExampleRows(one, np.concatenate((prefix_N, tail_N)) if shared else tail_N)
            )

    def _append(self, tokens: Array, position: int, prefix: tuple[int, int] | None) -> int:
        start = self.rows
        if len(tokens):
            self.rows += len(tokens)
            self.tokens.append(tokens)
            self.positions.append(np.arange(position, position + len(tokens)))
            self.ranges.append(RowRange(start, self.rows, prefix))
        return start

    def micro_batch(self, budget: RowBudget) -> MicroBatch:
        nothing = np.zeros(0, np.int64)
        return MicroBatch(
            tokens_T=np.concatenate([nothing, *self.tokens]),
            positions_T=np.concatenate([nothing, *self.positions]),
            ranges=tuple(self.ranges),
            parts=tuple(self.parts),
            recomputes=self.rows > budget.rows,
        )


def _lookup(parts: Sequence[ExampleRows], is_shared: bool) -> TargetLookup:
    rows_C = np.concatenate([part.rows_N for part in parts])
    targets_CK = np.concatenate([part.example.targets_NK for part in parts])
    cells_CK = np.concatenate([part.example.cells_NK for part in parts])
    if not is_shared:
        return TargetLookup(rows_C, targets_CK, np.arange(len(rows_C)), cells_CK)
    both_CK = np.concatenate((rows_C[:, None], targets_CK), axis=1)
    both_RK, row_of_C = np.unique(both_CK, axis=0, return_inverse=True)
    row_of_C = row_of_C.reshape(-1)
    order_C = np.argsort(row_of_C, kind="stable")
    return TargetLookup(both_RK[:, 0], both_RK[:, 1:], row_of_C[order_C], cells_CK[order_C])


# Shared prefixes


def _groups(examples: Sequence[TrainingExample]) -> list[tuple[int, list[TrainingExample]]]:
    """Groups of examples, each with the length of its shared prefix; 0 for single examples.

    In lexicographic order, examples with a common prefix are neighbours, and the prefix lengths
    form a tree: each node is a range of neighbours and their common prefix. Bottom up, a node
    becomes a group if that saves more rows than the groups below it.
    """
    if len(examples) < 2:
        return [(0, [one]) for one in examples]
    # Big-endian, so that bytes sort like the numbers.
    ordered = sorted(examples, key=lambda one: one.tokens_N.astype(">u4").tobytes())
    found = _shared_ranges([_common_prefix(a, b) for a, b in pairwise(ordered)])
    groups = [
        (shared, sorted(ordered[start:end], key=lambda one: one.place))
        for shared, start, end in found
    ]
    return sorted(groups, key=lambda group: group[1][0].place)


def _common_prefix(one: TrainingExample, other: TrainingExample) -> int:
    """The length of their common prefix."""
    length = min(len(one.tokens_N), len(other.tokens_N))
    differ = one.tokens_N[:length] != other.tokens_N[:length]
    return int(differ.argmax()) if differ.any() else length


_PrefixRange: TypeAlias = tuple[int, int, int]
"""Length of the prefix, start and end of the range of neighbours."""


@dataclass
class _Node:
    depth: int
    start: int
    saved: int = 0
    taken: list[_PrefixRange] = field(default_factory=list)

    def add(self, other: _Node) -> None:
        self.saved += other.saved
        self.taken += other.taken

    def close(self, end: int) -> _Node:
        """Make it a group if that saves more rows."""
        saved = (end - self.start - 1) * self.depth if self.depth >= LEAST_SHARED else 0
        if saved > self.saved:
            self.saved, self.taken = saved, [(self.depth, self.start, end)]
        return self


def _shared_ranges(common: Sequence[int]) -> list[_PrefixRange]:
    """The best groups, from the prefix lengths of neighbours; they cover all examples."""
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


# Packed batches


@dataclass(eq=False)
class PackedBatch(Generic[Owner]):
    """Micro-batches of several works that are computed together."""

    micro_batches: list[tuple[Owner, MicroBatch]] = field(default_factory=list)
    rows: int = 0

    @property
    def recomputes(self) -> bool:
        """Whether a micro-batch requires recomputation."""
        return any(micro_batch.recomputes for _, micro_batch in self.micro_batches)


def pack_micro_batches(
    works: Iterable[tuple[Owner, Sequence[MicroBatch]]], budget: RowBudget
) -> list[PackedBatch[Owner]]:
    """Pack micro-batches into batches; those of one work stay in order."""
    batches: list[PackedBatch[Owner]] = []
    for owner, micro_batches in works:
        first = 0
        for micro_batch in micro_batches:
            fitting = (
                place
                for place in range(first, len(batches))
                if batches[place].rows + micro_batch.rows <= budget.rows
            )
            first = next(fitting, len(batches))
            if first == len(batches):
                batches.append(PackedBatch())
            batches[first].micro_batches.append((owner, micro_batch))
            batches[first].rows += micro_batch.rows
    return batches
