"""Samples that are refused with 429: how long those of their key pause, and when one is given up.

A server that is busy refuses some samples and takes others; those wait for as long as it takes any,
or sends results. One that refuses all of them, and nothing moves, is given up on when the patience
of the sampler is used up. A sample's own time counts too: one that is new is not given up for what
happened before it was made.

A server may refuse one sample for ever, such as one above a quota, and take all others. Since each
refusal pauses all, such a one must not be the first to leave after every pause: the others would
never be sent, and be given up with it. So one that is refused again lets others go first, those of
its line (`others_first`) and those of other senders of the key (`late_s`).
"""

from __future__ import annotations

import math

from tinsmith.client.limits import RAMP_STEP_S, Limiter
from tinsmith.client.retry import Retrier
from tinsmith.errors import APIStatusError
from tinsmith.types.inputs import (
    DmelChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

SMALL_PROMPT_BYTES = 131_072
SMALL_PAUSE_S, LARGE_PAUSE_S = 1.0, 5.0
"""How long a 429 that names no delay pauses samples: by the size of the prompt."""
_BYTES_PER_TOKEN = 10
_MOST_DOUBLINGS = 20


class Refusals:
    """What 429s mean for the samples of one sampler. For the background loop."""

    def __init__(self, limiter: Limiter, retrier: Retrier, *, patience_s: float) -> None:
        """Make one.

        Args:
            limiter: That of their key.
            retrier: Its budget bounds the pauses.
            patience_s: How long a sample is sent again while all are refused.
        """
        self._limiter = limiter
        self._retrier = retrier
        self._patience_s = patience_s

    def pause(self, error: APIStatusError, prompt: ModelInput, sent_at: float) -> None:
        """Hold back the samples of the key, as one that was sent then was refused."""
        asked_s, why = error.retry_after_s, str(error)
        if asked_s is None:
            self._limiter.rate_limited(_usual_pause_s(prompt), why, sent_at=sent_at)
        else:
            budget = self._retrier.budget
            self._limiter.rate_limited(asked_s, why, sent_at=sent_at, budget=budget)

    def is_hopeless(self, waited_s: float = math.inf) -> bool:
        """Whether a sample that has waited for so long is not worth sending after the pause.

        Without a time, whether that may be so of any. The pause itself does not count: however long
        it is, a server that took another sample just now may take this one after it.
        """
        return min(self._limiter.refused_s(), waited_s) >= self._patience_s

    def others_first(self, refusals: int) -> int:
        """How many that wait in line go before a sample that was refused so often.

        None after its first refusal, then 1, 3, 7, …: where all are refused about as often, as by a
        server that is full, they keep their order, more or less.
        """
        return (1 << min(max(0, refusals - 1), _MOST_DOUBLINGS)) - 1

    def late_s(self, refusals: int) -> float:
        """How long after a pause a sample leaves at the soonest that was refused so often."""
        return RAMP_STEP_S if refusals > 1 else 0.0

    def tell_effort(self, error: APIStatusError, attempts: int, waited_s: float) -> None:
        """Note in the error that ends a sample how often and how long it was tried."""
        error.add_note(
            f"sample: given up after {attempts} attempt(s) and {waited_s:.1f} s; while all samples "
            f"are refused they are tried again for {self._patience_s:g} s"
        )


def _usual_pause_s(prompt: ModelInput) -> float:
    is_small = sum(map(_counted_bytes, prompt.chunks)) <= SMALL_PROMPT_BYTES
    return SMALL_PAUSE_S if is_small else LARGE_PAUSE_S


def _counted_bytes(chunk: ModelInputChunk) -> int:
    """What the API counts a part of a prompt for."""
    match chunk:
        case ImageChunk():
            return len(chunk.data)
        case DmelChunk():
            return len(chunk.dmel)
        case ImageAssetPointerChunk():
            return len(chunk.location)
    return chunk.length * _BYTES_PER_TOKEN
