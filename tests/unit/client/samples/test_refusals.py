"""When a sample that is refused with 429 is given up."""

from __future__ import annotations

import pytest

from tinsmith.client.limits import RAMP_STEP_S, Limiter
from tinsmith.client.retry import Retrier, RetryBudget
from tinsmith.client.samples.refusals import LARGE_PAUSE_S, SMALL_PAUSE_S, Refusals
from tinsmith.errors import RateLimitError
from tinsmith.types.inputs import (
    DmelChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

PROMPT = ModelInput.from_ints([1, 2, 3])
LONG_PROMPT = ModelInput.from_ints([1] * 20_000)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Refused:
    """Samples of a key whose clock is ours."""

    def __init__(self, **budget: float) -> None:
        self.clock = Clock()
        self.limiter = Limiter(clock=self.clock)
        retrier = Retrier(RetryBudget(**budget))
        self.refusals = Refusals(self.limiter, retrier, patience_s=10.0)

    def refuse(self, retry_after_s: float | None = 1.0, prompt: ModelInput = PROMPT) -> float:
        """Refuse one that was sent just now; gives how long all of them pause."""
        error = RateLimitError("full", retry_after_s=retry_after_s)
        self.refusals.pause(error, prompt, self.clock.now)
        return self.limiter.pause().until - self.clock.now

    def later(self, delay_s: float) -> None:
        self.clock.now += delay_s


def test_a_429_that_names_no_delay_pauses_by_the_size_of_the_prompt() -> None:
    assert Refused().refuse(None) == SMALL_PAUSE_S
    assert Refused().refuse(None, LONG_PROMPT) == LARGE_PAUSE_S
    assert Refused(retry_after_max_s=0.1).refuse(None) == SMALL_PAUSE_S  # nobody asked for it


@pytest.mark.parametrize(
    ("chunk", "pause_s"),
    [
        (ImageChunk(data=b"x" * 131_073, format="png"), LARGE_PAUSE_S),
        (ImageChunk(data=b"x" * 131_072, format="png"), SMALL_PAUSE_S),
        (DmelChunk(dmel=b"x" * 131_073), LARGE_PAUSE_S),
        (ImageAssetPointerChunk(format="png", location="x://y"), SMALL_PAUSE_S),
    ],
)
def test_images_and_audio_count_by_their_size_in_bytes(
    chunk: ModelInputChunk, pause_s: float
) -> None:
    assert Refused().refuse(None, ModelInput(chunks=[chunk])) == pause_s


def test_s31_a_delay_is_capped_by_the_retry_budget() -> None:
    assert Refused().refuse(1000.0) == 60.0
    assert Refused(retry_after_max_s=2.0).refuse(1000.0) == 2.0
    assert Refused(retry_after_max_s=500.0).refuse(400.0) == 400.0


def test_samples_fail_once_all_were_rejected_for_too_long() -> None:
    refused = Refused()
    refused.refuse()
    refused.later(9.0)
    refused.refuse()
    was_hopeless = refused.refusals.is_hopeless()
    refused.later(1.0)

    refused.refuse()

    assert not was_hopeless
    assert refused.refusals.is_hopeless()
    assert refused.refusals.is_hopeless(waited_s=11.0)
    assert not refused.refusals.is_hopeless(waited_s=9.0)  # it was made later


def test_an_accepted_or_completed_sample_resets_the_rejection_timeout() -> None:
    refused = Refused()
    for progress in (refused.limiter.sample_taken, refused.limiter.sample_drawn):
        refused.refuse()
        refused.later(9.0)

        progress()

        refused.later(9.0)
        refused.refuse()
        assert not refused.refusals.is_hopeless()


def test_a_long_pause_alone_fails_no_sample() -> None:
    refused = Refused()

    refused.refuse(50.0)

    assert not refused.refusals.is_hopeless()


def test_a_sample_rejected_repeatedly_yields_to_exponentially_more_others() -> None:
    refusals = Refused().refusals

    assert [refusals.others_first(count) for count in (0, 1, 2, 3, 4)] == [0, 0, 1, 3, 7]
    assert refusals.others_first(10_000) == refusals.others_first(1000) > 100_000
    assert refusals.late_s(0) == refusals.late_s(1) == 0.0
    assert refusals.late_s(2) == RAMP_STEP_S


def test_s6_the_error_names_the_attempts_and_the_time_of_a_sample() -> None:
    error = RateLimitError("full")

    Refused().refusals.tell_effort(error, attempts=4, waited_s=12.34)

    assert "4 attempt(s) and 12.3 s" in error.__notes__[0]
