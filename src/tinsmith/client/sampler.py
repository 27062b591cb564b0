"""One sampler as the background loop sees it: numbers, submissions, results, and what is given up.

`SamplingClient` is its face. A sample is submitted when the limiter lets it, keeping its number
over refusals; its result is fetched by a poll of its own or by the session's; if the server lost
it meanwhile it is submitted anew, under a new number.

Holds a lease of the session, so that a client that is dropped while its samples are under way does
not end them.
"""

from __future__ import annotations

import asyncio
import time

from tinsmith.client.budgets import Budget
from tinsmith.client.poller import Poll, room_for
from tinsmith.client.queue_state import StateTeller
from tinsmith.client.sample_cancels import SampleCancels
from tinsmith.client.sampler_handle import NUMBERS_PER_CLONE, random_clone_id
from tinsmith.client.session import Session, SessionLease
from tinsmith.client.session_poller import SessionPoller
from tinsmith.errors import APIStatusError, RateLimitError
from tinsmith.types import requests as r
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.sampling import JoinSamplingSessionResponse, SampleResponse
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, to_http

GONE = 410
SMALL_PROMPT_BYTES = 131_072
SMALL_PAUSE_S, LARGE_PAUSE_S = 1.0, 5.0
"""How long a 429 that names no delay pauses samples: by the size of the prompt."""
MOST_RESUBMISSIONS = 3
MOST_SUBMISSIONS = 400
"""How many samples may be on their way to the service at once; waiting for results is free."""
_BYTES_PER_TOKEN = 10


class Sampler:
    """Samples from one sampling session under one clone's numbers. For the background loop."""

    def __init__(
        self,
        lease: SessionLease,
        sampling_session_id: str,
        clone_id: int | None = 0,
        observer: StateTeller | None = None,
    ) -> None:
        self._lease = lease
        self.sampling_session_id = sampling_session_id
        self._clone_id = clone_id
        self._observer = observer
        self._joining: asyncio.Task[int] | None = None
        self._poller: SessionPoller | None = None
        self._cancels = SampleCancels(lease.session)
        flags = lease.session.flags
        self._slots = Budget(MOST_SUBMISSIONS)
        self._sending = Budget(flags.sample_dispatch_bytes_semaphore_size)
        self._room = Budget(flags.inflight_response_bytes_semaphore_size)

    @property
    def session(self) -> Session:
        """The session that it belongs to."""
        return self._lease.session

    async def sample(self, request: r.SampleRequest) -> SampleResponse:
        """Submit a sample and fetch its result; anew if the server lost it meanwhile.

        Args:
            request: What to draw. If it has a number already, it is submitted under that first.
        """
        for attempt in range(MOST_RESUBMISSIONS + 1):
            number = request.seq_id if attempt == 0 else None
            if number is None:
                number = await self.next_seq_id()
            submitted, submit_s = await self._submit(request, number)
            try:
                response = await self._fetch(submitted, submit_s)
                return response.with_sequence_ids(submitted.sample_sequence_ids or [])
            except APIStatusError as error:
                if error.status_code != GONE or attempt == MOST_RESUBMISSIONS:
                    raise
        raise AssertionError("the loop above returns or raises")

    # Numbers

    async def next_seq_id(self) -> int:
        """A number that no other sample of this sampler has."""
        clone_id = await self._joined()
        count = self.session.next_number(f"{self.sampling_session_id} {clone_id}")
        return clone_id * NUMBERS_PER_CLONE + count

    async def _joined(self) -> int:
        """Our clone's number: 0 for the original, else one that no other process has."""
        if self._clone_id is not None:
            return self._clone_id
        if self._joining is None:
            self._joining = asyncio.create_task(self._join())
        self._clone_id = await asyncio.shield(self._joining)
        return self._clone_id

    async def _join(self) -> int:
        session = self.session
        await session.session_id()
        if not session.flags.sample_join_sampling_session:
            return random_clone_id()
        joined: JoinSamplingSessionResponse = await session.call(
            "join_sampling_session",
            r.JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
        )
        return joined.client_counter

    # Out

    async def _submit(
        self, request: r.SampleRequest, number: int
    ) -> tuple[UntypedAPIFuture, float]:
        """Send a sample when the limiter lets it, keeping its number over refusals."""
        session = self.session
        sent = to_http(ENDPOINTS["asample"], request.model_copy(update={"seq_id": number}))
        while True:
            await session.limiter.wait()
            began = time.monotonic()
            try:
                submitted = await self._send(sent)
            except RateLimitError as error:
                self.pause_after(error, request.prompt)
            else:
                return submitted, time.monotonic() - began

    async def _send(self, sent: HttpRequest) -> UntypedAPIFuture:
        # Slots and bytes are held while sending alone, not while waiting for leave or for a result.
        size = sum(map(len, sent.parts))
        async with self._slots.taken(), self._sending.taken(size):
            submitted: UntypedAPIFuture = await self.session.call_with(ENDPOINTS["asample"], sent)
        return submitted

    def pause_after(self, error: RateLimitError, prompt: ModelInput) -> None:
        """Hold back the samples of this key after a 429."""
        self.session.limiter.rate_limited(_pause_s(error, prompt), str(error))

    # Back

    async def _fetch(self, submitted: UntypedAPIFuture, submit_s: float) -> SampleResponse:
        session, request_id = self.session, submitted.request_id
        try:
            poller = self._session_poller()
            ended = None if poller is None else await poller.wait(request_id)
            size = getattr(ended, "response_payload_uncompressed_size", None)
            poll = Poll(
                session,
                request_id,
                "Sample",
                submit_s=submit_s,
                room=self._room,
                is_size_known=size is not None,
                observer=self._observer,
            )
            async with room_for(self._room if size else None, size or 0):
                response: SampleResponse = await poll.result()
        except asyncio.CancelledError:
            self.cancel_on_server(request_id)
            raise
        self.report_retrieved(request_id)
        return response

    def _session_poller(self) -> SessionPoller | None:
        session = self.session
        if self._poller is None and session.flags.sample_use_retrieve_futures:
            self._poller = SessionPoller(session, self.sampling_session_id, self._clone_id or 0)
        return self._poller

    def report_retrieved(self, request_id: str) -> None:
        """Tell the service that a result has arrived, where it wants to know."""
        if self._poller is not None:
            self._poller.report_retrieved(request_id)

    def cancel_on_server(self, request_id: str, *, is_offered: bool = False) -> None:
        """Tell the service that a sample is not wanted any more; see `SampleCancels.add`."""
        self._cancels.add(request_id, is_offered=is_offered)


def _pause_s(error: RateLimitError, prompt: ModelInput) -> float:
    if error.retry_after_s is not None:
        return error.retry_after_s
    tokens = sum(chunk.length for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk))
    is_small = tokens * _BYTES_PER_TOKEN <= SMALL_PROMPT_BYTES
    return SMALL_PAUSE_S if is_small else LARGE_PAUSE_S
