"""Retries: which failures are retried, after what delay, and for how long in all.

Retried are 408, 409, 429, 500 and above, lost connections and timeouts. The server's `Retry-After`
overrides our own backoff, within the bounds of `RetryBudget.wait_s`, which paces every retry in the
client. One budget covers a call from its first attempt; when it is used up, the last error is
raised with a note of how often and how long the call was tried.

A server that has never been reached is given up on within seconds: the address is wrong, or nothing
runs there. One that was reached before may be restarting, and gets the whole budget.

Knows nothing of HTTP beyond statuses. Clock, sleep and randomness are parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from tinsmith.client import events
from tinsmith.client.waits import ANSWERS, WaitReporter, say, saying
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    CertificateError,
    ValidationError,
)
from tinsmith.wire.failures import DEFAULT_CAP_S, is_retried

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOGGED_AFTER_S = 10.0
"""Retries that take longer than this are logged, and again after each such time: one line for all
calls that fail alike."""
BILLING_PAUSE_S = 5.0
BILLING_LOGGED_EVERY_S = 60.0
PACED_S = 0.5
"""A delay of at least this, asked for by the server, is used as it is, however often it recurs."""
FIRST_FLOOR_S = 0.005
"""The shortest delay after a first failure; doubled for each further one."""


def _chance() -> float:
    """A random number from 0 to 1; importing `random` would take a fifth of a megabyte."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how often a call is retried."""

    total_s: float = 300.0
    """How long after its first attempt a call may still be retried."""
    first_contact_s: float = 5.0
    """The same, for a server that has never been reached."""
    billing_s: float = 3600.0
    """How long 402 is treated as a pause. With the default, the service's own value is used."""
    delay_base_s: float = 0.5
    """The delay before the first retry, doubled for each further one."""
    delay_max_s: float = 10.0
    """The longest such delay."""
    jitter: float = 0.25
    """Each delay is varied by up to this fraction, so that many clients do not retry at once."""
    retry_after_max_s: float = DEFAULT_CAP_S
    """The longest delay that the server may ask for (`Retry-After`); longer ones are capped."""

    def __post_init__(self) -> None:
        numbers = (
            *(self.total_s, self.first_contact_s, self.billing_s),
            *(self.delay_base_s, self.retry_after_max_s),
        )
        # These comparisons are false for NaN too.
        are_times = all(number >= 0 for number in numbers) and self.delay_max_s > 0
        if not are_times or not 0 <= self.jitter < 1:
            raise ValidationError(f"the times of a retry budget must be 0 or more: {self}")

    def delay_s(self, attempt: int, chance: Callable[[], float] = _chance) -> float:
        """The delay after an attempt, counted from 0, where the server asked for none."""
        return self._doubled_s(self.delay_base_s, attempt, chance)

    def wait_s(
        self,
        failures: int,
        asked_s: float | None,
        chance: Callable[[], float] = _chance,
    ) -> float:
        """The delay before a retry.

        The server's own delay is used within two bounds: it is capped at `retry_after_max_s`, and
        short ones (0, a date in the past) grow after the first failures, since a server that
        refuses at once would be asked thousands of times a second.

        Args:
            failures: How many there were in a row before this one.
            asked_s: What the server asked for; None for our own delay.
            chance: The source of randomness.
        """
        if asked_s is None:
            return self.delay_s(failures, chance)
        asked_s = min(asked_s, self.retry_after_max_s)
        if asked_s >= PACED_S:
            return asked_s
        return max(asked_s, self._doubled_s(FIRST_FLOOR_S, failures, chance))

    def _doubled_s(self, first_s: float, times: int, chance: Callable[[], float]) -> float:
        delay_s = min(first_s * 2.0 ** min(times, 32), self.delay_max_s)
        return delay_s * (1 + self.jitter * (2 * chance() - 1))

    def next_delay_s(
        self,
        error: APIError,
        failures: int,
        failing_s: float,
        *,
        total_s: float | None = None,
        chance: Callable[[], float] = _chance,
    ) -> float | None:
        """The delay before the retry of a temporary error; None if the budget is used up.

        Args:
            error: The latest one.
            failures: How many came in a row before it.
            failing_s: How long they have lasted.
            total_s: How long they may last; this budget's value if None.
            chance: The source of randomness.
        """
        if isinstance(error, BillingError):
            return BILLING_PAUSE_S if failing_s < self.billing_s else None
        delay_s = self.wait_s(failures, getattr(error, "retry_after_s", None), chance)
        most_s = self.total_s if total_s is None else total_s
        return delay_s if failing_s + delay_s <= most_s else None

    def asked_s(self, delay_ms: float | None) -> float | None:
        """A delay that a server asked for in milliseconds, in seconds and capped."""
        if delay_ms is None:
            return None
        # Capped before it is divided: an int has no bound.
        return min(max(delay_ms, 0), self.retry_after_max_s * 1000) / 1000


DEFAULT_BUDGET = RetryBudget()
NO_RETRIES = RetryBudget(total_s=0.0, first_contact_s=0.0, billing_s=0.0)


def may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary, so that a retry makes sense."""
    if isinstance(error, APIStatusError):
        should_retry = _should_retry(error)
        if should_retry is not None:
            return should_retry
        return is_retried(error.status_code) or isinstance(error, BillingError)
    return isinstance(error, APIConnectionError) and not isinstance(error, CertificateError)


def _should_retry(error: APIStatusError) -> bool | None:
    """The server's own `x-should-retry`, if it sent one."""
    headers = getattr(error.response, "headers", None) or {}
    said = str(headers.get("x-should-retry", "")).lower()
    return {"true": True, "false": False}.get(said)


class _Contact:
    """Whether a server has ever been reached."""

    was_made = False


class Retrier:
    """Retries calls to one server, and remembers whether it has ever been reached."""

    def __init__(
        self,
        budget: RetryBudget = DEFAULT_BUDGET,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = _chance,
    ) -> None:
        self.budget = budget
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._contact = _Contact()
        self._unanswered = WaitReporter(ANSWERS)
        self._logged_at: dict[str, float] = {}

    def with_budget(self, budget: RetryBudget) -> Retrier:
        """A retrier with another budget for the same server."""
        made = Retrier(budget, clock=self._clock, sleep=self._sleep, chance=self._chance)
        made._contact = self._contact
        return made

    def pause_for_billing(self, most_s: float) -> None:
        """Treat 402 as a pause for so long, unless the user set a time."""
        if self.budget.billing_s == DEFAULT_BUDGET.billing_s:
            self.budget = msgspec.structs.replace(self.budget, billing_s=max(0.0, most_s))

    async def call(
        self,
        attempt: Callable[[int], Awaitable[T]],
        what: str,
        *,
        final: tuple[type[APIError], ...] = (),
        asleep: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        is_watched: bool = True,
    ) -> T:
        """Make a call until it succeeds, fails permanently, or its budget is used up.

        Args:
            attempt: Makes the call once; receives the number of the attempt, from 0.
            what: The call's name, for errors and the log.
            final: Errors that are never retried here.
            asleep: Entered between two attempts, to release what the call holds while it waits.
            is_watched: Whether a long wait for an answer is logged here.

        Raises:
            APIError: The last attempt's, with the number of attempts and the time in its notes.
        """
        began = self._clock()
        number = 0
        while True:
            try:
                result = await (
                    self._watched(attempt, number, what) if is_watched else attempt(number)
                )
            except APIError as error:
                self._contact.was_made |= not isinstance(error, APIConnectionError) or isinstance(
                    error, APITimeoutError
                )
                is_final = isinstance(error, final)
                elapsed_s = self._clock() - began
                delay_s = None if is_final else self._next_delay_s(error, number, elapsed_s)
                number += 1
                if delay_s is None:
                    if number > 1 or not is_final:  # else the caller handles it
                        allowed = "" if is_final or not may_pass(error) else self._allowed(error)
                        _note_effort(error, what, number, self._clock() - began, allowed)
                    raise
                self._log_wait(error, what, number, delay_s, self._clock() - began)
                with asleep():
                    await self._sleep(delay_s)
            else:
                self._contact.was_made = True
                return result

    def level_for(self, error: APIError, what: str, lasts_s: float) -> int:
        """The log level for a failure that will be retried, and then has lasted `lasts_s`.

        Many calls fail for one cause: of each kind, the first word of `what`, one is a warning.
        """
        is_billing = isinstance(error, BillingError)  # a long pause, retried every few seconds
        kind = "402" if is_billing else what.partition(" ")[0]
        every_s = BILLING_LOGGED_EVERY_S if is_billing else LOGGED_AFTER_S
        now = self._clock()
        is_early = not is_billing and lasts_s <= LOGGED_AFTER_S
        if is_early or now - self._logged_at.get(kind, float("-inf")) < every_s:
            return logging.DEBUG
        self._logged_at[kind] = now
        return logging.WARNING

    async def _watched(self, attempt: Callable[[int], Awaitable[T]], number: int, what: str) -> T:
        with saying(f"no answer to {what} yet", is_stalled=True) as is_told:
            if is_told:
                return await attempt(number)
            awaited = self._unanswered.begin(what)
            try:
                return await attempt(number)
            finally:
                self._unanswered.end(awaited)

    def _next_delay_s(self, error: APIError, number: int, elapsed_s: float) -> float | None:
        """The delay before the next attempt; None if there should be none."""
        if not may_pass(error):
            return None
        total_s = getattr(self.budget, self._limit(error))
        return self.budget.next_delay_s(
            error, number, elapsed_s, total_s=total_s, chance=self._chance
        )

    def _limit(self, error: APIError) -> Literal["total_s", "first_contact_s", "billing_s"]:
        """The limit of the budget that applies to an error."""
        if isinstance(error, BillingError):
            return "billing_s"
        return "total_s" if self._contact.was_made else "first_contact_s"

    def _allowed(self, error: APIError) -> str:
        limit = self._limit(error)
        return f"; the RetryBudget allows {limit}={getattr(self.budget, limit):g}"

    def _log_wait(
        self,
        error: APIError,
        what: str,
        number: int,
        delay_s: float,
        elapsed_s: float,
    ) -> None:
        say(f"retrying {what} after {events.named(error)}")
        _log.log(
            self.level_for(error, what, elapsed_s + delay_s),
            "%s: attempt %d failed after %.1f s (%s); retrying in %.1f s",
            what,
            number,
            elapsed_s,
            error,
            delay_s,
        )
        if events.listeners:
            events.tell(
                events.RetryPlanned(
                    endpoint=what, attempt=number - 1, delay_s=delay_s, reason=events.named(error)
                )
            )


def _note_effort(error: APIError, what: str, attempts: int, elapsed_s: float, allowed: str) -> None:
    error.add_note(f"{what}: gave up after {attempts} attempt(s) and {elapsed_s:.1f} s{allowed}")
