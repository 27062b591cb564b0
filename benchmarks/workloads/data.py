"""The numbers that every contestant is given: the same for all, from a fixed seed.

As lists they are what a tokenizer and a user's own code give; as arrays they have numpy's dtype for
whole numbers, int64, and float32 for the others.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, TypeAlias

VOCABULARY = 150_000
Values: TypeAlias = Any
"""A list of numbers or a numpy array."""


class Example(NamedTuple):
    """One training example."""

    tokens: Values
    targets: Values
    weights: Values


def examples(tokens: int, count: int) -> list[Example]:
    """Training examples as lists. Each has number objects of its own, as a user's would."""
    first = _first_example(tokens)
    return [
        Example(
            [(token + shift) % VOCABULARY for token in first.tokens],
            [(token + shift) % VOCABULARY for token in first.targets],
            [weight / (shift + 1) for weight in first.weights],
        )
        for shift in range(count)
    ]


def array_examples(tokens: int, count: int) -> list[Example]:
    """The same as numpy arrays."""
    import numpy

    ids, targets, weights = map(numpy.array, _first_example(tokens))
    return [
        Example(
            (ids + shift) % VOCABULARY,
            (targets + shift) % VOCABULARY,
            (weights / (shift + 1)).astype(numpy.float32),
        )
        for shift in range(count)
    ]


def _first_example(tokens: int) -> Example:
    rng = random.Random(7)
    return Example(_ids(rng, tokens), _ids(rng, tokens), [rng.random() for _ in range(tokens)])


def mixed_examples(tokens: int, count: int) -> list[Example]:
    """Tokens as lists, as tokenizers give them; the rest as arrays."""
    arrays = array_examples(tokens, count)
    lists = examples(tokens, count)
    return [array._replace(tokens=plain.tokens) for array, plain in zip(arrays, lists, strict=True)]


def prompt(tokens: int) -> list[int]:
    """A prompt as a list."""
    return _ids(random.Random(8), tokens)


def answer(tokens: int) -> tuple[list[int], list[float]]:
    """Sampled tokens and their logprobs."""
    rng = random.Random(9)
    return _ids(rng, tokens), _logprobs(rng, tokens)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _logprobs(rng: random.Random, count: int) -> list[float]:
    return [-5 * rng.random() for _ in range(count)]
