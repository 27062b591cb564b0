"""One sample under way, from the user's call to its settled future.

It is passed from hand to hand: `samples/sender.py` submits it, `samples/result_feed.py` or a poll
of its own brings its result. Whoever has it settles it once; whoever finds it settled lets go of
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tinsmith.client import events
from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.samples.completeness import lack_of
from tinsmith.client.samples.request_texts import EarlyText, RequestTexts, early_text
from tinsmith.errors import APIResponseValidationError, APITimeoutError, DecodeError
from tinsmith.types.inputs import (
    DmelChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
)
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse
from tinsmith.wire import proto_samples
from tinsmith.wire.packed_format import PackedText

_ABOUT_BYTES = 512
"""What a request takes beside its prompt."""
_TOKEN_BYTES = 7
"""What a token id takes in JSON, at most for vocabularies below a million."""


class SampleCall:
    """A sample that a user waits for. For the background loop, but for the constructor."""

    __slots__ = (
        "_early",
        "_on_end",
        "_timer",
        "began",
        "failing_since",
        "failures",
        "future",
        "goes_alone",
        "is_drawn",
        "is_given_up",
        "is_over",
        "lease",
        "refusals",
        "request",
        "request_id",
        "resubmissions",
        "sent_at",
        "seq_id",
        "sequence_ids",
        "size",
        "submit_s",
        "task",
        "timeout_s",
        "written",
    )

    def __init__(
        self,
        lease: SessionLease,
        request: SampleRequest,
        future: APIFuture[SampleResponse],
        timeout_s: float | None,
        seq_id: int | None = None,
    ) -> None:
        self.lease = lease
        """Keeps the session while the sample is under way."""
        self.request = request
        self.future = future
        self.timeout_s = timeout_s
        self.seq_id = seq_id
        self.written: PackedText | None = None
        self._early: EarlyText | None = None
        self.size = _ABOUT_BYTES + sum(map(_about_bytes, request.prompt.chunks))
        """How many bytes the request takes; at most about so many while it was never written."""
        self.request_id: str | None = None
        self.sequence_ids: Sequence[str] = ()
        self.began = 0.0
        self.sent_at = 0.0
        self.submit_s = 0.0
        """How long its submission took."""
        self.goes_alone = False
        """Whether it must not share a request with others, and is sent as plain JSON."""
        self.resubmissions = 0
        self.failures = 0
        self.failing_since: float | None = None
        self.refusals = 0
        """How often it was refused with 429."""
        self.task: asyncio.Task[None] | None = None
        """What fetches its result, if it is fetched by itself."""
        self.is_over = False
        self.is_drawn = False
        """Whether it is over because its result came."""
        self.is_given_up = False
        """Whether it was over because nobody wanted it any more, or its time was up."""
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[SampleCall], object] | None = None

    def begin(
        self, loop: asyncio.AbstractEventLoop, on_end: Callable[[SampleCall], object]
    ) -> None:
        """Watch the clock from now on, and have `on_end` called when the sample is over."""
        self._on_end = on_end
        self.began = loop.time()
        if self.timeout_s is not None:
            self._timer = loop.call_later(self.timeout_s, self._expire)

    # The request as it is sent. It is written when it leaves and dropped when it has arrived:
    # thousands that wait for their turn or for their results would take gigabytes.

    def write_early(self) -> None:
        """Write the prompt already now if that is cheap, for `write`. On the caller's thread."""
        self._early = early_text(self.request.prompt)

    def write(self, texts: RequestTexts, *, packs: bool) -> None:
        """Write the request, under its number.

        Args:
            texts: Of what was written before.
            packs: Whether token ids may be sent as memory.

        Raises:
            ValidationError: It holds something that cannot be sent.
        """
        assert self.seq_id is not None
        if packs:
            made = texts.pack(self.request)
        else:
            made = PackedText(texts.encode(self.request, self._early), [])
        self._early = None
        first, *rest = made.text
        numbered = [b'{"seq_id":%d,' % self.seq_id, memoryview(first)[1:], *rest]
        self.written = PackedText(numbered, made.arrays)
        self.size = self.written.size

    @property
    def is_packed(self) -> bool:
        """Whether it was written with token ids as memory."""
        return self.written is not None and bool(self.written.arrays)

    # The end

    def named(self, response: SampleResponse) -> SampleResponse:
        """The answer with the ids of its sequences; services that do not trace tokens give none."""
        return response.with_sequence_ids(self.sequence_ids) if self.sequence_ids else response

    def settle_with(self, payload: bytes) -> None:
        """Its result came."""
        try:
            ids = self.sequence_ids
            self.settle(proto_samples.decode_sample_response(payload, sequence_ids=ids))
        except (DecodeError, ValueError) as exc:
            self.fail(
                APIResponseValidationError(
                    message=f"the result of {self.request_id} cannot be read: {exc}",
                    request_id=self.request_id,
                )
            )

    def settle(self, response: SampleResponse) -> None:
        """Its result is here."""
        if self.is_over:
            return
        self.is_drawn = True
        lack = lack_of(self.request, response, self.request_id)
        if lack is not None:
            self.fail(lack)
            return
        self._end(None)
        self.future.settle(response)

    def fail(self, error: BaseException) -> None:
        """There will be no result."""
        if not self.is_over:
            self._end(error)
            self.future.fail(error)

    def give_up(self) -> None:
        """Its user does not want it any more."""
        if not self.is_over:
            self.is_given_up = True
            self._end(asyncio.CancelledError())
            self.future.cancel()

    def ask_to_give_up(self) -> None:
        """As `give_up`, from any thread."""
        background().call_soon(self.give_up)

    def _expire(self) -> None:
        self.is_given_up = not self.is_over
        self.fail(APITimeoutError(f"{self.future.what}: not done within {self.timeout_s:g} s"))

    def _end(self, error: BaseException | None) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._on_end is not None:
            self._on_end(self)
        if events.listeners and self.request_id is not None and self.task is None:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        waited_s = asyncio.get_running_loop().time() - self.sent_at
        events.tell(
            events.ResultSettled(
                kind="Sample",
                request_id=self.request_id or "",
                waited_s=waited_s,
                polls=0,
                error=None if error is None else type(error).__name__,
            )
        )


def _about_bytes(chunk: ModelInputChunk) -> int:
    if isinstance(chunk, ImageChunk):
        return len(chunk.data) * 4 // 3
    if isinstance(chunk, DmelChunk):
        return len(chunk.dmel) * 4 // 3
    if isinstance(chunk, ImageAssetPointerChunk):
        return len(chunk.location)  # how many tokens it has the service alone may know
    return chunk.length * _TOKEN_BYTES
