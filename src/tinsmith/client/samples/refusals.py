"""Samples that are refused with 429: how long to pause, and when to give up.

A busy server refuses some samples and accepts others; refused ones are retried for as long as it
accepts any or returns results. If it refuses all of them and makes no progress, samples fail after
the sampler's `patience_s`. The age of a sample counts too: a new one does not fail for what
happened before it was made.

A server may always refuse one sample, such as one above a quota, and accept all others. As each
refusal pauses all samples, that one must not be the first to leave after every pause: the others
would never be sent, and would fail with it. So a sample that is refused again lets others leave
first: those in its queue (`others_first`) and those of other senders with its key (`late_s`).
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
    """Handles the 429s of one sampler. For the background loop."""

    def __init__(self, limiter: Limiter, retrier: Retrier, *, patience_s: float) -> None:
        """Create one.

        Args:
            limiter: The key's.
            retrier: Its budget bounds the pauses.
            patience_s: How long a sample is retried while all are refused.
        """
        self._limiter = limiter
        self._retrier = retrier
        self._patience_s = patience_s

    def pause(self, error: APIStatusError, prompt: ModelInput, sent_at: float) -> None:
        """Pause the samples of the key after a sample sent at that time was refused."""
        asked_s, why = error.retry_after_s, str(error)
        if asked_s is None:
            self._limiter.rate_limited(_usual_pause_s(prompt), why, sent_at=sent_at)
        else:
            budget = self._retrier.budget
            self._limiter.rate_limited(asked_s, why, sent_at=sent_at, budget=budget)

    def is_hopeless(self, waited_s: float = math.inf) -> bool:
        """Whether a sample that has waited for so long should fail instead of being retried.

        Without a time, whether any sample may have to. The pause itself does not count: however
        long it is, a server that just accepted another sample may accept this one after it.
        """
        return min(self._limiter.refused_s(), waited_s) >= self._patience_s

    def others_first(self, refusals: int) -> int:
        """How many queued samples leave before one that was refused so often.

        None after its first refusal, then 1, 3, 7, …: samples that are refused about equally often,
        as by a server that is full, more or less keep their order.
        """
        return (1 << min(max(0, refusals - 1), _MOST_DOUBLINGS)) - 1

    def late_s(self, refusals: int) -> float:
        """How long after a pause a sample that was refused so often leaves at the earliest."""
        return RAMP_STEP_S if refusals > 1 else 0.0

    def tell_effort(self, error: APIStatusError, attempts: int, waited_s: float) -> None:
        """Note in a sample's error how often and how long it was retried."""
        error.add_note(
            f"sample: gave up after {attempts} attempt(s) and {waited_s:.1f} s; while all samples "
            f"are refused they are retried for {self._patience_s:g} s"
        )


def _usual_pause_s(prompt: ModelInput) -> float:
    is_small = sum(map(_counted_bytes, prompt.chunks)) <= SMALL_PROMPT_BYTES
    return SMALL_PAUSE_S if is_small else LARGE_PAUSE_S


def _counted_bytes(chunk: ModelInputChunk) -> int:
    """The size of a chunk of a prompt, as the API counts it."""
    match chunk:
        case ImageChunk():
            return len(chunk.data)
        case DmelChunk():
            return len(chunk.dmel)
        case ImageAssetPointerChunk():
            return len(chunk.location)
    return chunk.length * _BYTES_PER_TOKEN
