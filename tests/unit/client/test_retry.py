"""Retries: what is retried, when, and when not."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import pytest

from tinsmith.client.limits import Limiter
from tinsmith.client.retry import DEFAULT_BUDGET, NO_RETRIES, Retrier, RetryBudget, may_pass
from tinsmith.client.samples.retry_config import RetryConfig
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    ValidationError,
)
from tinsmith.wire.failures import error_from_reply


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now += delay_s


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def a_retrier(time: FakeTime, budget: RetryBudget = DEFAULT_BUDGET) -> Retrier:
    return Retrier(budget, clock=time.clock, sleep=time.sleep, chance=lambda: 0.5)


def failing(*errors: APIError) -> Callable[[int], Awaitable[str]]:
    async def attempt(number: int) -> str:
        if number < len(errors):
            raise errors[number]
        return "done"

    return attempt


def forever(error: Callable[[], APIError]) -> Callable[[int], Awaitable[str]]:
    async def attempt(_: int) -> str:
        raise error()

    return attempt


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_s6_transient_failures_are_retried(time: FakeTime, status: int) -> None:
    error = error_from_reply(status, {}, b"")

    result = asyncio.run(a_retrier(time).call(failing(error, error), "asample"))

    assert result == "done"
    assert len(time.slept) == 2


@pytest.mark.parametrize("error", [APIConnectionError(), APITimeoutError()])
def test_s6_lost_connections_are_retried(time: FakeTime, error: APIError) -> None:
    assert asyncio.run(a_retrier(time).call(failing(error), "asample")) == "done"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 413, 422])
def test_s6_other_status_errors_are_raised_on_the_first_attempt(
    time: FakeTime, status: int
) -> None:
    error = error_from_reply(status, {}, b'{"detail": "no"}')

    with pytest.raises(APIStatusError) as caught:
        asyncio.run(a_retrier(time).call(failing(error), "asample"))

    assert caught.value is error
    assert time.slept == []


@pytest.mark.parametrize("error", [ValidationError("bad"), TypeError("bug"), KeyError("bug")])
def test_s6_programming_errors_are_raised_immediately(time: FakeTime, error: Exception) -> None:
    async def attempt(_: int) -> str:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(a_retrier(time).call(attempt, "asample"))

    assert time.slept == []


def test_s6_the_last_error_names_the_attempts_and_the_elapsed_time(time: FakeTime) -> None:
    budget = RetryBudget(total_s=20.0)

    with pytest.raises(InternalServerError) as caught:
        asyncio.run(a_retrier(time, budget).call(forever(a_500), "optim_step"))

    note = caught.value.__notes__[0]
    assert "optim_step" in note
    assert f"{len(time.slept) + 1} attempt(s)" in note
    assert time.now <= 20.0


def test_the_server_s_delay_takes_precedence_over_our_own(time: FakeTime) -> None:
    error = error_from_reply(429, {"retry-after-ms": "7250"}, b"")

    asyncio.run(a_retrier(time).call(failing(error), "asample"))

    assert time.slept == [7.25]


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after": "0"},
        {"retry-after-ms": "0"},
        {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"},
    ],
)
def test_retries_back_off_if_the_server_asks_for_no_delay(
    time: FakeTime, headers: dict[str, str]
) -> None:
    error = error_from_reply(503, headers, b"")

    asyncio.run(a_retrier(time).call(failing(*[error] * 14), "optim_step"))

    assert time.slept[:4] == [0.005, 0.01, 0.02, 0.04]
    assert time.slept[-3:] == [10.0, 10.0, 10.0]


def test_short_server_delays_apply_to_the_first_failures_and_long_ones_always() -> None:
    budget = RetryBudget()

    short = [budget.wait_s(failures, 0.03, lambda: 0.5) for failures in range(5)]
    long = [budget.wait_s(failures, 0.5, lambda: 0.5) for failures in (0, 10, 1000)]

    assert short == [0.03, 0.03, 0.03, 0.04, 0.08]
    assert long == [0.5, 0.5, 0.5]


def test_s31_the_longest_delay_a_server_may_request_is_configurable(
    time: FakeTime,
) -> None:
    error = error_from_reply(503, {"retry-after": "90"}, b"")
    budgets = [RetryBudget(), RetryBudget(retry_after_max_s=120.0)]
    budgets.append(RetryBudget(retry_after_max_s=5.0))

    for budget in budgets:
        asyncio.run(a_retrier(time, budget).call(failing(error), "optim_step"))

    assert time.slept == [60.0, 90.0, 5.0]
    assert [budget.asked_s(10**400) for budget in budgets] == [60.0, 120.0, 5.0]
    assert budgets[0].asked_s(250) == 0.25
    assert budgets[0].asked_s(None) is None


def test_the_server_may_forbid_a_retry(time: FakeTime) -> None:
    error = error_from_reply(409, {"x-should-retry": "false"}, b'{"detail": "taken"}')

    with pytest.raises(APIStatusError):
        asyncio.run(a_retrier(time).call(failing(error), "save_weights"))

    assert time.slept == []


def test_the_server_may_request_a_retry(time: FakeTime) -> None:
    error = error_from_reply(422, {"x-should-retry": "true"}, b'{"detail": "not yet"}')

    assert asyncio.run(a_retrier(time).call(failing(error), "save_weights")) == "done"
    assert len(time.slept) == 1


def test_our_own_delays_grow_up_to_a_limit_with_jitter() -> None:
    budget = RetryBudget()

    delays = [budget.delay_s(attempt, lambda: 0.5) for attempt in range(8)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert budget.delay_s(0, lambda: 0.0) == 0.375
    assert budget.delay_s(10_000, lambda: 0.5) == 10.0


def test_a_server_that_was_never_reached_fails_within_seconds(time: FakeTime) -> None:
    with pytest.raises(APIConnectionError):
        asyncio.run(a_retrier(time).call(forever(APIConnectionError), "client_config"))

    assert time.now <= RetryBudget().first_contact_s


def test_a_server_that_was_reached_before_is_retried_for_longer(time: FakeTime) -> None:
    retrier = a_retrier(time)
    asyncio.run(retrier.call(failing(), "client_config"))

    with pytest.raises(APIConnectionError):
        asyncio.run(retrier.call(forever(APIConnectionError), "optim_step"))

    assert 250.0 < time.now <= 300.0


def test_a_402_is_retried_until_its_window_ends(time: FakeTime) -> None:
    budget = RetryBudget(billing_s=60.0)

    with pytest.raises(BillingError):
        asyncio.run(a_retrier(time, budget).call(forever(a_billing_error), "optim_step"))

    assert time.slept == [5.0] * 12


def test_the_service_sets_how_long_a_402_is_retried_unless_the_user_does(time: FakeTime) -> None:
    asked, chosen = a_retrier(time), a_retrier(time, RetryBudget(billing_s=20.0))
    asked.pause_for_billing(10.0)
    chosen.pause_for_billing(10.0)

    for retrier in (asked, chosen):
        with pytest.raises(BillingError):
            asyncio.run(retrier.call(forever(a_billing_error), "optim_step"))

    assert time.slept == [5.0] * (2 + 4)


def test_a_402_is_logged_immediately_and_then_every_minute(
    time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    budget = RetryBudget(billing_s=150.0)

    with pytest.raises(BillingError):
        asyncio.run(a_retrier(time, budget).call(forever(a_billing_error), "optim_step"))

    assert len(caplog.messages) == 3
    assert "no funds" in caplog.messages[0]


def test_without_a_budget_nothing_is_retried(time: FakeTime) -> None:
    with pytest.raises(RateLimitError):
        asyncio.run(a_retrier(time, NO_RETRIES).call(forever(a_429), "session_heartbeat"))

    assert time.slept == []


def test_a_long_wait_is_logged(time: FakeTime, caplog: pytest.LogCaptureFixture) -> None:
    error = error_from_reply(503, {"retry-after": "30"}, b"")

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        asyncio.run(a_retrier(time).call(failing(error), "forward_backward 4"))

    assert "forward_backward 4" in caplog.text
    assert "30.0 s" in caplog.text


def test_many_short_waits_are_logged_every_ten_seconds(
    time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that is starting asks to be asked again every second; that is not worth a line."""
    error = error_from_reply(503, {"retry-after": "1"}, b"")

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        asyncio.run(a_retrier(time).call(failing(*[error] * 45), "forward_backward 4"))

    assert len(caplog.records) == 4


def test_one_of_many_calls_that_fail_alike_is_logged_every_ten_seconds(time: FakeTime) -> None:
    retrier = a_retrier(time)
    error = error_from_reply(503, {}, b"")

    def told() -> list[str]:
        calls = [*(f"forward_backward {number}" for number in range(100)), "optim_step 7"]
        return [one for one in calls if retrier.level_for(error, one, 30.0) == logging.WARNING]

    assert told() == ["forward_backward 0", "optim_step 7"]
    time.now += 9.0
    assert told() == []
    time.now += 1.0
    assert told() == ["forward_backward 0", "optim_step 7"]


def test_s7_after_a_429_the_limiter_is_set_before_the_retry_waits_and_sends(time: FakeTime) -> None:
    trace: list[str] = []
    limiter = Limiter(clock=time.clock, sleep=time.sleep)

    async def attempt(number: int) -> str:
        await limiter.wait()
        trace.append(f"leave at {time.now:g}")
        trace.append("send")
        if number == 0:
            error = error_from_reply(429, {"retry-after-ms": "2000"}, b"")
            trace.append("429")
            assert error.retry_after_s is not None
            limiter.rate_limited(error.retry_after_s)
            raise error
        return "done"

    asyncio.run(a_retrier(time).call(attempt, "asample"))

    assert trace == ["leave at 0", "send", "429", "leave at 2", "send"]


def test_a_budget_rejects_nonsensical_times() -> None:
    with pytest.raises(ValidationError):
        RetryBudget(total_s=-1.0)
    with pytest.raises(ValidationError):
        RetryBudget(jitter=1.0)
    with pytest.raises(ValidationError):
        RetryBudget(retry_after_max_s=-1.0)


@pytest.mark.parametrize("name", [*RetryBudget.__struct_fields__])
def test_a_budget_rejects_values_that_are_not_numbers(name: str) -> None:
    with pytest.raises(ValidationError, match="times of a retry budget"):
        RetryBudget(**{name: math.nan})


@pytest.mark.parametrize("name", ["progress_timeout", "retry_delay_base", "jitter_factor"])
def test_a_retry_config_rejects_values_that_are_not_numbers(name: str) -> None:
    with pytest.raises(ValidationError):
        RetryConfig(**{name: math.nan})  # type: ignore[arg-type]  # each is a float


def test_unknown_errors_are_not_treated_as_transient() -> None:
    assert not may_pass(RuntimeError())
    assert not may_pass(NotFoundError("gone"))


def a_500() -> APIError:
    return InternalServerError("broken")


def a_billing_error() -> APIError:
    return BillingError("no funds")


def a_429() -> APIError:
    return RateLimitError("full")
