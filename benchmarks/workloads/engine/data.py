"""Token ids to train on and to sample from; the same for everybody.

Each turn takes other numbers, so that nobody finds the keys of its last turn in a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

RANK = 32
ADAPTERS = 8
_FIRST_ID = 10
"""Those below it mean something."""


class Sequence(NamedTuple):
    """Tokens to train on. All but the first are targets; those from `first` on count."""

    tokens: list[int]
    first: int = 1

    @property
    def positions(self) -> int:
        """How many tokens go through the model."""
        return len(self.tokens) - 1


def _ids(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(_FIRST_ID, vocabulary) for _ in range(count)]


def _even(chance: random.Random, vocabulary: int) -> list[Sequence]:
    return [Sequence(_ids(chance, 129, vocabulary)) for _ in range(8)]


def _ragged(chance: random.Random, vocabulary: int) -> list[Sequence]:
    lengths = [16] * 30 + [512] * 2
    chance.shuffle(lengths)
    return [Sequence(_ids(chance, length + 1, vocabulary)) for length in lengths]


def _group(chance: random.Random, vocabulary: int) -> list[Sequence]:
    prompt = _ids(chance, 512, vocabulary)
    return [Sequence(prompt + _ids(chance, 33, vocabulary), first=512) for _ in range(16)]


def _small(chance: random.Random, vocabulary: int) -> list[Sequence]:
    return [Sequence(_ids(chance, 17, vocabulary))]


def _tiny(chance: random.Random, vocabulary: int) -> list[Sequence]:
    return [Sequence(_ids(chance, 33, vocabulary)) for _ in range(4)]


_BATCHES: dict[str, Callable[[random.Random, int], list[Sequence]]] = {
    "even": _even,
    "ragged": _ragged,
    "group": _group,
    "small": _small,
    "tiny": _tiny,
}


def training_batch(kind: str, vocabulary: int, turn: int = 0) -> list[Sequence]:
    """even: 8 × 128. ragged: 30 × 16 and 2 × 512. group: 512 that 16 share, and 32 for each.

    small is what each of several adapters gets: 1 × 16; tiny is 4 × 32.
    """
    return _BATCHES[kind](random.Random(turn), vocabulary)


def prompts(count: int, length: int, vocabulary: int, turn: int = 0) -> list[list[int]]:
    """Prompts that have nothing in common."""
    chance = random.Random(1000 + turn)
    return [_ids(chance, length, vocabulary) for _ in range(count)]
