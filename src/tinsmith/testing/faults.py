"""What shall go wrong, as data: rules that tests add and the service asks for each request.

Three kinds of rule. An `ExchangeFault` strikes one HTTP exchange: a status, a delay, a reply that
is lost, broken off or withheld. A `CommandFault` strikes work that was accepted: it fails, is held
back, ends out of turn, or its result is gone. A `StreamFault` strikes the tokens of a stream.

A rule strikes the requests to its endpoints (`on`) for which `when` holds: the `nth` of them
alone, or the first `times`, or with `times=None` all of them. The first exchange rule that strikes
is used; all command rules that strike are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from tinsmith.errors import RequestErrorCategory, ValidationError
from tinsmith.testing.holds import Hold, Reversal
from tinsmith.testing.received import ReceivedRequest, check_endpoint
from tinsmith.types.futures import QueueStateName, RequestFailedResponse

Predicate: TypeAlias = Callable[[ReceivedRequest], bool]
Names: TypeAlias = str | tuple[str, ...] | None


class Rule(msgspec.Struct, kw_only=True, eq=False):
    """Which requests are struck; `on` None means any endpoint."""

    on: Names = None
    times: int | None = 1
    nth: int | None = None
    when: Predicate | None = None
    hold: Hold | None = None
    """What keeps back the reply, or the work, of those that are struck."""
    matched: int = 0
    struck: int = 0

    def __post_init__(self) -> None:
        for name in self.names:
            check_endpoint(name)
        if self.nth is not None and self.nth < 1:
            raise ValidationError(f"nth counts from 1, not {self.nth}")

    @property
    def names(self) -> tuple[str, ...]:
        """The endpoints it is for; none means any."""
        if self.on is None:
            return ()
        return (self.on,) if isinstance(self.on, str) else self.on

    def is_due(self, received: ReceivedRequest) -> bool:
        """Whether this request is to be struck; counts it if the rule is for it."""
        if self.names and received.endpoint not in self.names:
            return False
        if self.when is not None and not self.when(received):
            return False
        self.matched += 1
        return self.nth in (None, self.matched) and self.struck != self.times


class ExchangeFault(Rule):
    """What happens to one HTTP exchange.

    With a `status`, `empty_400` or `reset` the work is not done, unless `after_work`. In all other
    cases it is done at once, and only its reply is late, withheld, lost or cut.
    """

    status: int | None = None
    """Answered instead, with `headers` and `body`."""
    headers: dict[str, str] = {}
    body: dict[str, Any] | None = None
    """By default `{"detail": …}`."""
    after_work: bool = False
    empty_400: bool = False
    """A 400 without a body, as a proxy gives; clients take it for a broken connection."""
    reset: bool = False
    """The connection is reset."""
    lose_reply: bool = False
    """The connection is closed without a byte."""
    half_reply: bool = False
    """The reply breaks off in the middle."""
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [self.status is not None, self.empty_400, self.reset, self.lose_reply]
        if sum([*ends, self.half_reply]) > 1:
            raise ValidationError(
                "a fault can have only one outcome",
                remedy="pass one of status, empty_400, reset, lose_reply and half_reply",
            )
        if not (any(ends) or self.half_reply or self.delay_s or self.hold):
            raise ValidationError(
                "a fault must have an effect", remedy="pass one, such as status=500"
            )

    @property
    def does_work(self) -> bool:
        """Whether what was asked for is done all the same."""
        return self.after_work or not (self.status is not None or self.empty_400 or self.reset)


class CommandFault(Rule):
    """What happens to work that was accepted."""

    failure: RequestFailedResponse | None = None
    reversal: Reversal | None = None
    delay_s: float = 0.0
    expires: bool = False


class StreamFault(Rule):
    """What happens to a stream of tokens once so many were sent over this connection."""

    after_tokens: int = 0
    cut: bool = False
    """The connection is closed in the middle of an event."""


RuleT = TypeVar("RuleT", bound=Rule)


class Faults:
    """The rules of one service. May be changed at any time, from any thread."""

    def __init__(self) -> None:
        self._exchange: list[ExchangeFault] = []
        self._command: list[CommandFault] = []
        self._stream: list[StreamFault] = []
        self._lock = threading.Lock()

    def add(self, on: Names = None, **fields: Any) -> ExchangeFault:
        """Make exchanges go wrong; the fields are those of `Rule` and `ExchangeFault`.

        For example `add(on="asample", times=2, status=429, headers={"retry-after-ms": "300"})`.
        """
        return self._added(self._exchange, ExchangeFault(on=on, **fields))

    def hold(self, on: Names = None, *, times: int | None = None, **fields: Any) -> Hold:
        """Do the work and withhold the replies until the handle is released."""
        hold = Hold()
        self.add(on, times=times, hold=hold, **fields)
        return hold

    def hold_commands(self, on: Names = None, *, times: int | None = None, **match: Any) -> Hold:
        """Accept work and do not begin it until the handle is released; polls wait."""
        return self.pause(on, queue_state="active", times=times, **match)

    def pause(
        self,
        on: Names = None,
        *,
        queue_state: QueueStateName = "paused_capacity",
        reason: str | None = None,
        retry_after_ms: float | None = None,
        polls: int | None = None,
        poll_after_s: float | None = None,
        poll_status: int = 408,
        times: int | None = None,
        **match: Any,
    ) -> Hold:
        """Hold back accepted work, and tell those who poll for it that it is paused, and why.

        Args:
            on: Whose work; None for all that comes from now on.
            queue_state: What polls are told.
            reason: Told with it.
            retry_after_ms: Told with it.
            polls: After so many polls were told, the pause ends by itself.
            poll_after_s: How long such a poll is held; by default as long as any.
            poll_status: 408, or 200 as some servers answer.
            times: How many commands are held back; all by default.
            match: `nth` and `when` of `Rule`.
        """
        hold = Hold(
            queue_state=queue_state,
            reason=reason,
            retry_after_ms=retry_after_ms,
            polls=polls,
            poll_after_s=poll_after_s,
            poll_status=poll_status,
        )
        self._added(self._command, CommandFault(on=on, times=times, hold=hold, **match))
        return hold

    def fail_command(
        self,
        on: Names = None,
        *,
        category: str = "server",
        error: str = "the command failed, as the test asked",
        **match: Any,
    ) -> CommandFault:
        """Accept work and answer its polls with an error of this category."""
        failure = RequestFailedResponse(error=error, category=RequestErrorCategory(category))
        return self._added(self._command, CommandFault(on=on, failure=failure, **match))

    def delay_commands(
        self, on: Names = None, *, delay_s: float, times: int | None = None, **match: Any
    ) -> CommandFault:
        """Let accepted work take so long."""
        fault = CommandFault(on=on, delay_s=delay_s, times=times, **match)
        return self._added(self._command, fault)

    def reorder_completions(
        self, on: Names = None, *, count: int = 2, apart_s: float = 0.0, **match: Any
    ) -> CommandFault:
        """Let the next `count` commands finish last first, `apart_s` between them."""
        reversal = Reversal(count, apart_s=apart_s)
        fault = CommandFault(on=on, times=count, reversal=reversal, **match)
        return self._added(self._command, fault)

    def expire_results(self, on: Names = None, **match: Any) -> CommandFault:
        """Do the work and lose its result: polls are answered with 410."""
        return self._added(self._command, CommandFault(on=on, expires=True, **match))

    def cut_stream(self, *, after_tokens: int, **match: Any) -> StreamFault:
        """Cut connections of `asample_stream` once so many tokens went over them."""
        fault = StreamFault(on="asample_stream", after_tokens=after_tokens, cut=True, **match)
        return self._added(self._stream, fault)

    def hold_stream(self, *, after_tokens: int, **match: Any) -> Hold:
        """Keep back what comes after so many tokens of a stream."""
        hold = Hold()
        fault = StreamFault(on="asample_stream", after_tokens=after_tokens, hold=hold, **match)
        self._added(self._stream, fault)
        return hold

    def clear(self) -> None:
        """Remove all rules, and release everything that they hold back."""
        with self._lock:
            rules = (*self._exchange, *self._command, *self._stream)
            holds = [rule.hold for rule in rules if rule.hold]
            self._stream.clear()
            self._exchange.clear()
            self._command.clear()
        for hold in holds:
            hold.release()

    def of_exchange(self, received: ReceivedRequest) -> ExchangeFault | None:
        """For the service: what shall go wrong with this exchange."""
        return next(iter(self._strike(self._exchange, received, most=1)), None)

    def of_command(self, received: ReceivedRequest) -> list[CommandFault]:
        """For the service: what shall go wrong with this work."""
        return self._strike(self._command, received)

    def of_stream(self, received: ReceivedRequest) -> list[StreamFault]:
        """For the service: what shall go wrong with this stream."""
        return self._strike(self._stream, received)

    def _strike(
        self, rules: list[RuleT], received: ReceivedRequest, most: int | None = None
    ) -> list[RuleT]:
        """The first `most` rules that are due; each counts the request, also behind another."""
        with self._lock:
            due = [rule for rule in rules if rule.is_due(received)][:most]
            for rule in due:
                rule.struck += 1
        return due

    def _added(self, rules: list[RuleT], rule: RuleT) -> RuleT:
        with self._lock:
            rules.append(rule)
        return rule
