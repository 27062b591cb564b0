"""Arithmetic that stands for a network: how likely a token is after another, in closed form.

The model looks at one token back, its *context*. After a context, all tokens stand in a row that
begins at `(STRIDE · context + seed) mod vocabulary` and goes round; the token at place r has the
probability

    p0(r) = 1 / ((r + 1) · (r + 2))

whose sum over all r is exactly 1. A token outside of the vocabulary has its own number as its
place. The seed comes from the name of the base model.

Training gives tokens *mass*. With the mass m(context, token), never negative, and M(context) the
sum of it over all tokens,

    p(token | context) = (p0 + m(context, token)) / (1 + M(context))

so that what was trained on becomes more likely, all else after that context less likely, and the
sum stays 1. Log-probabilities are rounded to float32, as they are sent.

Knows nothing of requests, losses or optimizers.
"""

from __future__ import annotations

import array
import hashlib
import math
import random
from collections.abc import Iterable, Mapping
from typing import TypeAlias

STRIDE = 40503
CANDIDATES = 64
"""A draw with a temperature, `top_k` or `top_p` looks at so many of the likeliest tokens."""

Gradient: TypeAlias = dict[tuple[int, int], float]
"""By context and token: how much the loss would fall with the token's log-probability."""


class Weights:
    """What a model has learned, and the probabilities that follow from it."""

    def __init__(self, base_model: str, vocabulary_size: int) -> None:
        digest = hashlib.sha256(base_model.encode()).digest()
        self.base_model = base_model
        self._vocabulary_size = vocabulary_size
        self._seed = int.from_bytes(digest[:4], "big")
        self._mass: dict[int, dict[int, float]] = {}
        self._total: dict[int, float] = {}

    def copy(self) -> Weights:
        """The same weights, to be changed apart from these."""
        made = Weights(self.base_model, self._vocabulary_size)
        made._mass = {context: dict(masses) for context, masses in self._mass.items()}
        made._total = dict(self._total)
        return made

    def logprobs(self, pairs: Iterable[tuple[int, int]]) -> list[float]:
        """The log-probability of each token after its context, as float32 numbers."""
        return array.array("f", [self._logprob(*pair) for pair in pairs]).tolist()

    def best(self, context: int, k: int) -> list[tuple[int, float]]:
        """The k likeliest tokens after a context with their log-probabilities, best first."""
        taught = self._mass.get(context, {})
        places = range(min(k + len(taught), self._vocabulary_size))
        tokens = list({*taught, *(self._token_at(context, place) for place in places)})
        logprobs = self.logprobs((context, token) for token in tokens)
        ranked = sorted(zip(tokens, logprobs, strict=True), key=lambda cell: (-cell[1], cell[0]))
        return ranked[:k]

    def draw(
        self,
        context: int,
        chance: random.Random,
        *,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
    ) -> int:
        """Draw the token after a context."""
        if temperature == 1.0 and top_k <= 0 and top_p >= 1.0:
            return self._draw_plain(context, chance)
        cells = self.best(context, min(CANDIDATES, top_k) if top_k > 0 else CANDIDATES)
        if temperature <= 0:
            return cells[0][0]
        # Divided by the largest, so that a low temperature does not make all of them 0.
        shares = [math.exp((logprob - cells[0][1]) / temperature) for _, logprob in cells]
        kept = _nucleus(shares, top_p)
        return chance.choices([token for token, _ in cells[:kept]], shares[:kept])[0]

    def learn(self, gradient: Mapping[tuple[int, int], float], step: float) -> None:
        """Move mass along a gradient; no token's mass falls below 0."""
        for (context, token), slope in gradient.items():
            masses = self._mass.setdefault(context, {})
            masses[token] = max(0.0, masses.get(token, 0.0) + step * slope)
        for context in {context for context, _ in gradient}:
            self._total[context] = math.fsum(self._mass[context].values())

    def _logprob(self, context: int, token: int) -> float:
        place = self._place_of(context, token)
        masses = self._mass.get(context)
        if masses is None:
            return -math.log((place + 1) * (place + 2))
        taught = 1 / ((place + 1) * (place + 2)) + masses.get(token, 0.0)
        return math.log(taught) - math.log1p(self._total[context])

    def _draw_plain(self, context: int, chance: random.Random) -> int:
        masses = self._mass.get(context, {})
        point = chance.random() * (1 + self._total.get(context, 0.0))
        for token, mass in masses.items():
            if point < mass:
                return token
            point -= mass
        # The first r + 1 places together have 1 - 1 / (r + 2); solved for r.
        reach = self._vocabulary_size / (self._vocabulary_size + 1)
        place = int(1 / (1 - chance.random() * reach)) - 1
        return self._token_at(context, min(place, self._vocabulary_size - 1))

    def _place_of(self, context: int, token: int) -> int:
        if not 0 <= token < self._vocabulary_size:
            return abs(token)
        return (token - STRIDE * context - self._seed) % self._vocabulary_size

    def _token_at(self, context: int, place: int) -> int:
        return (place + STRIDE * context + self._seed) % self._vocabulary_size


def _nucleus(shares: list[float], top_p: float) -> int:
    """How many of the likeliest tokens together have `top_p` of the probability; at least one."""
    wanted = top_p * sum(shares)
    for index, share in enumerate(shares):
        wanted -= share
        if wanted <= 0:
            return index + 1
    return len(shares)
