"""Those who wait for the end of a command: long polls for one result or for a sampler's news.

A poll is held until its command is settled or `long_poll_s` has passed. Results can be read again
until a poller says that it has them, or until they expire. Only a finished payload is protobuf;
all other answers are JSON, whatever the client accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tinsmith.errors import BadRequestError
from tinsmith.testing.commands import Command, Commands, Result
from tinsmith.testing.holds import Hold
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.sampling import Samplers
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.futures import (
    FuturesRetrieveResponse,
    MetadataOnlyResponse,
    TryAgainResponse,
)
from tinsmith.types.requests import (
    FutureCancelRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
)
from tinsmith.wire.content import accepts_protobuf
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.exchange import HttpReply, to_reply
from tinsmith.wire.failures import failed_from_error


class Polls:
    """Answers polls for the commands of one service."""

    def __init__(self, settings: ServiceSettings, commands: Commands, samplers: Samplers) -> None:
        self._settings = settings
        self._commands = commands
        self._samplers = samplers

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "retrieve_future": self.retrieve,
            "retrieve_futures": self.retrieve_many,
            "cancel_future": self.cancel,
        }

    async def retrieve(self, received: ReceivedRequest) -> Result | HttpReply:
        """The result as soon as there is one, or word that there is none yet."""
        request: FutureRetrieveRequest = received.request
        command = self._commands.known(request.request_id)
        if not await self._wait_settled(command):
            return _not_yet(command)
        self._commands.check_lifetime(command)
        assert command.outcome is not None
        if command.is_failed:
            return command.outcome
        if request.allow_metadata_only and command.payload_bytes > self._settings.inline_bytes:
            return MetadataOnlyResponse(response_payload_size=command.payload_bytes)
        written = command.result.format
        if written is Format.PROTOBUF and not accepts_protobuf(received.headers.get("accept")):
            return command.outcome  # SDKs up to 0.18 ask for JSON
        return HttpReply(200, {"Content-Type": written.value}, command.payload)

    async def retrieve_many(self, received: ReceivedRequest) -> FuturesRetrieveResponse:
        """Which samples ended, as soon as one has."""
        request: FuturesRetrieveRequest = received.request
        target = request.target
        self._samplers.check_known(target.sampling_session_id)
        self._commands.forget(request.retrieved_request_ids)
        feed = self._commands.feed(target.sampling_session_id, target.cloned_sampler_id)
        timeout_s = self._settings.long_poll_s
        if request.timeout is not None:
            timeout_s = min(timeout_s, request.timeout)
        found = await feed.wait_after(request.prev_cursor, timeout_s)
        return FuturesRetrieveResponse(
            completions=list(found.values()), cursor=max(found, default=request.prev_cursor)
        )

    def cancel(self, received: ReceivedRequest) -> None:
        """End a command as failed, if it has not ended."""
        request: FutureCancelRequest = received.request
        command = self._commands.known(request.request_id)
        error = BadRequestError(f"{command.request_id} was cancelled by its client")
        self._commands.settle(command, failed_from_error(error))

    async def _wait_settled(self, command: Command) -> bool:
        if command.settled.is_set():
            return True
        held_s = None if command.hold is None else command.hold.poll_after_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.long_poll_s if held_s is None else held_s):
                await command.settled.wait()
        return command.settled.is_set()


def _not_yet(command: Command) -> HttpReply:
    hold = command.hold or Hold()
    told = TryAgainResponse(
        request_id=command.request_id,
        queue_state=hold.queue_state,
        queue_state_reason=hold.reason,
        retry_after_ms=hold.retry_after_ms,
    )
    hold.note_poll()
    reply = to_reply(told)
    return HttpReply(hold.poll_status, reply.headers, reply.parts)
