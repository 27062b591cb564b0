"""Second tries: what is tried again, after how long, and for how long in all.

A failure is worth another try if it may pass: 408, 409, 429, 500 and above, a lost connection, a
timeout. What the server said of the delay counts before our own backoff, within the bounds of
`RetryBudget.wait_s`, which every second try in the client is paced by. One budget covers a call
from its first try; when it is used up the last error is raised and says how often and how long it
was tried.

A server that was never reached is given up on within seconds: the address is wrong, or nothing runs
there. One that was reached before is waited for, since it may be restarting.

Knows nothing of HTTP beyond statuses. Clock, sleep and chance are parameters.
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
from tinsmith.client.waits import ANSWERS, Waits, say, saying
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    CertificateError,
    ValidationError,
)
from tinsmith.wire.failures import is_retried
from tinsmith.wire.retry_after import DEFAULT_CAP_S

T = TypeVar("T")

_log = logging.getLogger(__name__)

TOLD_AFTER_S = 10.0
"""A wait that makes the whole last longer than this is told in the log, and again so often: by
one line for all calls that fail alike."""
BILLING_PAUSE_S = 5.0
BILLING_TOLD_EVERY_S = 60.0
PACED_S = 0.5
"""A server that asks for no less keeps a pace itself: its word holds, however often it says so."""
FIRST_FLOOR_S = 0.005
"""The least delay after a first failure whose server asks for less; doubled for each further
one."""


def _chance() -> float:
    """From 0 to 1. `random` would take every client a fifth of a megabyte for this."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a call is."""

    total_s: float = 300.0
    """How long after its first try a call may still be tried again."""
    first_contact_s: float = 5.0
    """The same, while the server has never been reached."""
    billing_s: float = 3600.0
    """How long 402 is taken for a pause. Left as it is, the service's own figure counts."""
    delay_base_s: float = 0.5
    """The delay before the second try, doubled for each further one."""
    delay_max_s: float = 10.0
    """The longest such delay."""
    jitter: float = 0.25
    """Each delay is varied by up to this part of it, so that many clients do not come back at
    once."""
    retry_after_max_s: float = DEFAULT_CAP_S
    """The longest delay that the server may ask for (`Retry-After`); a longer one is cut to
    this."""

    def __post_init__(self) -> None:
        numbers = (
            *(self.total_s, self.first_contact_s, self.billing_s),
            *(self.delay_base_s, self.retry_after_max_s),
        )
        # NaN, which is neither more nor less than anything, is refused too.
        are_times = all(number >= 0 for number in numbers) and self.delay_max_s > 0
        if not are_times or not 0 <= self.jitter < 1:
            raise ValidationError(f"a retry budget needs times of 0 or more: {self}")

    def delay_s(self, attempt: int, chance: Callable[[], float] = _chance) -> float:
        """The delay after the given attempt, counted from 0, where the server named none."""
        return self._doubled_s(self.delay_base_s, attempt, chance)

    def wait_s(
        self,
        failures: int,
        asked_s: float | None,
        chance: Callable[[], float] = _chance,
    ) -> float:
        """The delay before another try.

        What the server asks for holds, within two bounds: it is cut to `retry_after_max_s`; and
        short ones (0, a date that has passed) hold for the first failures alone, since a server
        that says so at once would be asked thousands of times in a second.

        Args:
            failures: How many there were in a row before this one.
            asked_s: What the server asked for; None for our own delay.
            chance: Varies it.
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
        """The delay before the next try after an error that may pass; None if time is up.

        Args:
            error: The latest.
            failures: How many came in a row before it.
            failing_s: How long they have lasted.
            total_s: How long they may; this budget's if None.
            chance: Varies the delay.
        """
        if isinstance(error, BillingError):
            return BILLING_PAUSE_S if failing_s < self.billing_s else None
        delay_s = self.wait_s(failures, getattr(error, "retry_after_s", None), chance)
        most_s = self.total_s if total_s is None else total_s
        return delay_s if failing_s + delay_s <= most_s else None

    def asked_s(self, delay_ms: float | None) -> float | None:
        """The seconds of a delay that a server asked for in milliseconds, cut to what may be."""
        if delay_ms is None:
            return None
        # Cut before it is divided: an int has no bound.
        return min(max(delay_ms, 0), self.retry_after_max_s * 1000) / 1000


DEFAULT_BUDGET = RetryBudget()
NO_RETRIES = RetryBudget(total_s=0.0, first_contact_s=0.0, billing_s=0.0)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed if it is made again."""
    if isinstance(error, APIStatusError):
        word = _server_s_word(error)
        if word is not None:
            return word
        return is_retried(error.status_code) or isinstance(error, BillingError)
    return isinstance(error, APIConnectionError) and not isinstance(error, CertificateError)


def _server_s_word(error: APIStatusError) -> bool | None:
    """What the server itself says of another try, if it does."""
    headers = getattr(error.response, "headers", None) or {}
    said = str(headers.get("x-should-retry", "")).lower()
    return {"true": True, "false": False}.get(said)


class _Contact:
    """Whether a server was ever reached."""

    was_made = False


class Retrier:
    """Tries calls to one server again, and remembers whether it was ever reached."""

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
        self._unanswered = Waits(ANSWERS)
        self._told_at: dict[str, float] = {}

    def with_budget(self, budget: RetryBudget) -> Retrier:
        """Another for the same server, of which both know whether it was ever reached."""
        made = Retrier(budget, clock=self._clock, sleep=self._sleep, chance=self._chance)
        made._contact = self._contact
        return made

    def pause_for_billing(self, most_s: float) -> None:
        """Take 402 for a pause for so long, unless the user chose a time."""
        if self.budget.billing_s == DEFAULT_BUDGET.billing_s:
            self.budget = msgspec.structs.replace(self.budget, billing_s=max(0.0, most_s))

    async def call(
        self,
        attempt: Callable[[int], Awaitable[T]],
        what: str,
        *,
        began: float | None = None,
        final: tuple[type[APIError], ...] = (),
        asleep: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        is_watched: bool = True,
    ) -> T:
        """Make a call until it succeeds, fails for good, or its budget is used up.

        Args:
            attempt: Makes the call once; it is given the number of the attempt, from 0.
            what: What the call is, for errors and the log.
            began: When its first try was sent, by the retrier's clock; now if None.
            final: Errors that are raised at once although they may pass.
            asleep: Entered between two tries, to give back what the call holds while it waits.
            is_watched: Whether it is told if nobody answers for long; False if others tell it.

        Raises:
            APIError: The last attempt's, with the number of attempts and the time in its notes.
        """
        began = self._clock() if began is None else began
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
                    if number > 1 or not is_final:  # else somebody else deals with it, and tells
                        allowed = "" if is_final or not may_pass(error) else self._allowed(error)
                        _tell_effort(error, what, number, self._clock() - began, allowed)
                    raise
                self._log_wait(error, what, number, delay_s, self._clock() - began)
                with asleep():
                    await self._sleep(delay_s)
            else:
                self._contact.was_made = True
                return result

    def level_for(self, error: APIError, what: str, lasts_s: float) -> int:
        """How a failure that is tried again is told, if with the coming wait it lasts so long.

        Many calls fail for one cause: of those of a kind, the first word of `what`, one tells.
        """
        is_billing = isinstance(error, BillingError)  # a pause of an hour, asked every few seconds
        kind = "402" if is_billing else what.partition(" ")[0]
        every_s = BILLING_TOLD_EVERY_S if is_billing else TOLD_AFTER_S
        now = self._clock()
        is_early = not is_billing and lasts_s <= TOLD_AFTER_S
        if is_early or now - self._told_at.get(kind, float("-inf")) < every_s:
            return logging.DEBUG
        self._told_at[kind] = now
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

    def reached(self) -> None:
        """Note that the service answered a call that was made beside this."""
        self._contact.was_made = True

    def _next_delay_s(self, error: APIError, number: int, elapsed_s: float) -> float | None:
        """How long to wait before the next attempt; None if there should be none."""
        if not may_pass(error):
            return None
        total_s = getattr(self.budget, self._limit(error))
        return self.budget.next_delay_s(
            error, number, elapsed_s, total_s=total_s, chance=self._chance
        )

    def _limit(self, error: APIError) -> Literal["total_s", "first_contact_s", "billing_s"]:
        """Which limit of the budget holds after an error."""
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
        say(f"retrying {what}, which failed with {events.named(error)}")
        _log.log(
            self.level_for(error, what, elapsed_s + delay_s),
            "%s: attempt %d failed after %.1f s (%s); next in %.1f s",
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


def _tell_effort(error: APIError, what: str, attempts: int, elapsed_s: float, allowed: str) -> None:
    error.add_note(f"{what}: given up after {attempts} attempt(s) and {elapsed_s:.1f} s{allowed}")
