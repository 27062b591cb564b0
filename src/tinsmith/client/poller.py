"""Awaits one result of the service with long polls.

Pending answers carry the state of the queue. It is passed to the limiter, so that a paused queue
delays new samples, and to the client's observer. A large result is announced with its size, and
fetched when there is room for it.

However fast the server answers "not yet" or fails, polls are spaced out. Failures in a row are
retried within the retry budget: that of the sampling client, or the session's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinsmith.client import events
from tinsmith.client.limits import Budget
from tinsmith.client.retry import Retrier, may_pass
from tinsmith.client.session import Session
from tinsmith.client.transports.base import ExchangeReply
from tinsmith.client.waits import StateTeller, in_words, say
from tinsmith.errors import (
    APIError,
    APIStatusError,
    BadRequestError,
    BillingError,
    DecodeError,
    UnreadableResultError,
    refused_result,
)
from tinsmith.types.requests import FutureRetrieveRequest
from tinsmith.wire import exchange, json_format
from tinsmith.wire.content import is_protobuf
from tinsmith.wire.endpoint_types import Endpoint, Format, FutureResult
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.failures import error_from_failed, is_retried

_log = logging.getLogger(__name__)

SHORTEST_POLL_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Polls that are answered immediately are spaced out, from the first of these up to the second."""
LOGGED_AFTER_S = 10.0
LOGGED_EVERY_S = 60.0
MOST_BAD_REQUESTS = 3
REQUEST_TIMEOUT = 408


class Poll:
    """The polling for one result."""

    def __init__(
        self,
        session: Session,
        request_id: str,
        kind: str,
        *,
        submit_s: float = 0.0,
        room: Budget | None = None,
        is_size_known: bool = False,
        observer: StateTeller | None = None,
        retrier: Retrier | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._request_id = request_id
        self._kind = kind
        self._result: FutureResult = FUTURE_RESULTS[kind]
        self._submit_s = submit_s
        self._room = room
        self._takes_size_alone = room is not None and not is_size_known
        self._observer = observer
        self._retrier = session.retrier if retrier is None else retrier
        self._clock = clock
        self._sleep = sleep
        self._iteration = 0
        self._quick_answers = 0
        self._bad_requests = 0
        self._failing_since: float | None = None
        self._failures = 0
        self._began = clock()
        self._logged_at = self._began + LOGGED_AFTER_S - LOGGED_EVERY_S

    async def result(self) -> Any:
        """Poll until there is a result.

        Raises:
            RequestFailedError: The server could not run the command.
            APIStatusError: The server refused to return the result; 410 if it has expired.
            APIConnectionError: The server could not be reached for too long.
        """
        try:
            with self._session.work.under_way():
                result = await self._ask_until_settled()
        except BaseException as error:
            if events.listeners:
                self._tell_settled(type(error).__name__)
            raise
        if events.listeners:
            self._tell_settled(None)
        return result

    def _tell_settled(self, error: str | None) -> None:
        events.tell(
            events.ResultSettled(
                kind=self._kind,
                request_id=self._request_id,
                waited_s=self._clock() - self._began,
                polls=self._iteration,
                error=error,
            )
        )

    async def _ask_until_settled(self) -> Any:
        say("")
        while True:
            asked_at = self._clock()
            try:
                reply = await self._ask()
            except APIError as error:
                await self._after_error(error, asked_at)
                continue
            self._failing_since, self._failures, self._bad_requests = None, 0, 0
            answer = self._read(reply)
            if isinstance(answer, _Pending):
                await self._after_pending(answer, asked_at)
            elif isinstance(answer, _Size):
                return await self._fetch(answer.size_bytes)
            else:
                self._session.limiter.queue_active(asked_at)
                return answer

    async def _fetch(self, size_bytes: int) -> Any:
        """Fetch a large result once there is room for it."""
        self._takes_size_alone = False
        async with room_for(self._room, size_bytes):
            return await self._ask_until_settled()

    async def _ask(self) -> ExchangeReply:
        endpoint, sent, headers = self._request()
        return await self._session.send(endpoint, sent, headers=headers)

    def _request(self) -> tuple[Endpoint, HttpRequest, dict[str, str]]:
        endpoint = ENDPOINTS["retrieve_future"]
        request = FutureRetrieveRequest(
            request_id=self._request_id, allow_metadata_only=self._takes_size_alone
        )
        sent = exchange.to_http(endpoint, request, accept=self._result.format)
        sent.once["X-Tinker-Request-Iteration"] = str(self._iteration)
        if self._iteration == 0:
            sent.once["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{self._submit_s:.6f}"
        self._iteration += 1
        return endpoint, sent, {"X-Tinker-Request-Type": self._kind}

    # Answers

    def _read(self, reply: ExchangeReply) -> Any:
        try:
            if is_protobuf(reply.headers.get("content-type")):
                return exchange.decode_body(reply.body, self._result.type, Format.PROTOBUF)
            plain = json_format.decode_any(reply.body)
            if not isinstance(plain, dict):
                raise DecodeError("not an object")
            return self._read_plain(plain, reply)
        except DecodeError as exc:
            raise UnreadableResultError(
                reply,
                bytes(reply.body[:1000]),
                message=f"the result of {self._what()} cannot be read: {exc}",
                request_id=self._request_id,
            ) from exc

    def _read_plain(self, plain: dict[str, Any], reply: ExchangeReply) -> Any:
        if plain.get("type") == "try_again":
            return _Pending(plain)
        if plain.get("status") == "complete_metadata" and self._takes_size_alone:
            return _Size(plain)
        if "error" in plain:
            raise error_from_failed(plain, self._request_id)
        return exchange.decode_body(reply.body, self._result.type, Format.JSON)

    async def _after_pending(self, pending: _Pending, asked_at: float) -> None:
        limiter = self._session.limiter
        if pending.is_paused:
            asked_s = self._retrier.budget.asked_s(pending.retry_after_ms)
            limiter.queue_paused(asked_s, pending.reason)
        elif pending.queue_state == "active":
            limiter.queue_active(asked_at)
        if self._observer is not None and pending.is_stated:
            self._observer.tell(pending.queue_state, pending.reason)
        is_unobserved = pending.is_paused and self._observer is None
        say(in_words(pending.queue_state, pending.reason), is_stalled=is_unobserved)
        self._tell(pending)
        await self._keep_distance(self._clock() - asked_at)

    async def _keep_distance(self, answered_in_s: float) -> None:
        """Pause after an immediate answer, longer each time; a held poll needs no pause."""
        if answered_in_s >= LONGEST_PAUSE_S:
            self._quick_answers = 0
            return
        pause_s = min(SHORTEST_POLL_S * 2.0**self._quick_answers, LONGEST_PAUSE_S)
        self._quick_answers = min(self._quick_answers + 1, 16)
        await self._sleep(pause_s)

    def _tell(self, pending: _Pending) -> None:
        now = self._clock()
        if now - self._logged_at < LOGGED_EVERY_S:
            return
        self._logged_at = now
        waited_s = now - self._began
        if events.listeners:
            events.tell(
                events.ResultAwaited(
                    kind=self._kind,
                    request_id=self._request_id,
                    waited_s=waited_s,
                    queue_state=pending.queue_state,
                    reason=pending.reason,
                )
            )
        if pending.is_paused and self._observer is None:  # else the observer logs it
            _log.warning(
                "%s: waited %.0f s; queue %s%s",
                self._what(),
                waited_s,
                pending.queue_state,
                f": {pending.reason}" if pending.reason else "",
            )

    # Failures

    async def _after_error(self, error: APIError, asked_at: float) -> None:
        """Wait before the next poll, or raise if that will not help."""
        pending = _pending_of(error)
        if pending is not None:
            self._failing_since, self._failures, self._bad_requests = None, 0, 0
            await self._after_pending(pending, asked_at)
            return
        if self._failing_since is None:
            self._failing_since = asked_at
        failing_s = self._clock() - self._failing_since
        delay_s = self._delay_after(error, failing_s)
        if delay_s is None:
            error.request_id = error.request_id or self._request_id
            error.add_note(
                f"{self._what()}: gave up after {self._failures + 1} failed poll(s) "
                f"and {failing_s:.1f} s"
            )
            if isinstance(error, APIStatusError):
                raise refused_result(error) from error
            raise error
        self._failures += 1
        level = self._retrier.level_for(error, "retrieve_future", failing_s + delay_s)
        _log.log(level, "%s: %s; polling again in %.1f s", self._what(), error, delay_s)
        if events.listeners:
            events.tell(
                events.RetryPlanned(
                    endpoint="retrieve_future",
                    attempt=self._failures - 1,
                    delay_s=delay_s,
                    reason=events.named(error),
                )
            )
        await self._sleep(delay_s)

    def _delay_after(self, error: APIError, failing_s: float) -> float | None:
        if not self._is_passing(error):
            return None
        return self._retrier.budget.next_delay_s(error, self._failures, failing_s)

    def _is_passing(self, error: APIError) -> bool:
        if isinstance(error, BadRequestError):
            self._bad_requests += 1
            return self._bad_requests <= MOST_BAD_REQUESTS
        if isinstance(error, APIStatusError) and not isinstance(error, BillingError):
            # 409 is permanent here: a result has no state that could still change.
            return is_retried(error.status_code) and error.status_code != 409
        return may_pass(error)

    def _what(self) -> str:
        return f"{self._kind} {self._request_id}"


class _Pending:
    """The command has not finished."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.is_stated = bool(plain.get("queue_state") or plain.get("queue_state_reason"))
        self.queue_state = str(plain.get("queue_state", "active"))
        self.reason = str(plain.get("queue_state_reason") or "")
        delay_ms = plain.get("retry_after_ms")
        self.retry_after_ms = delay_ms if isinstance(delay_ms, int | float) else None

    @property
    def is_paused(self) -> bool:
        return self.queue_state in ("paused_capacity", "paused_rate_limit")


class _Size:
    """The command has finished, and its result has this many bytes."""

    def __init__(self, plain: dict[str, Any]) -> None:
        size = plain.get("response_payload_size")
        self.size_bytes = size if isinstance(size, int) and size > 0 else 1


def _pending_of(error: APIError) -> _Pending | None:
    """The pending answer in the body of a 408."""
    if isinstance(error, APIStatusError) and error.status_code == REQUEST_TIMEOUT:
        return _Pending(error.body if isinstance(error.body, dict) else {})
    return None


def room_for(
    room: Budget | None, size_bytes: int
) -> contextlib.AbstractAsyncContextManager[None, bool | None]:
    """Reserve room for a result during the block; without a budget there always is."""
    return contextlib.nullcontext() if room is None else room.taken(size_bytes)
