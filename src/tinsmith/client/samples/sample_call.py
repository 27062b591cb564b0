"""One sample in flight, from the user's call to its settled future.

`samples/sender.py` submits it; `samples/result_feed.py` or a poll of its own brings its result. It
is settled once; later results and errors are ignored.

`lack_of` says whether a result is what was asked for. A service that is too old for an option
ignores it and draws the sample nevertheless: the user then gets an error instead of a result that
looks right, as from the official SDK.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tinsmith.client import events
from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.samples.request_texts import EarlyText, RequestTexts, early_text
from tinsmith.errors import (
    APIResponseValidationError,
    APITimeoutError,
    DecodeError,
    IncompleteResultError,
)
from tinsmith.types.buffers import Numbers
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
"""The size of a request without its prompt, in bytes."""
_TOKEN_BYTES = 7
"""The size of a token id in JSON, at most for vocabularies below a million."""


class SampleCall:
    """A sample that a user waits for. For the background loop, except the constructor."""

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
        """Keeps the session alive while the sample is in flight."""
        self.request = request
        self.future = future
        self.timeout_s = timeout_s
        self.seq_id = seq_id
        self.written: PackedText | None = None
        self._early: EarlyText | None = None
        self.size = _ABOUT_BYTES + sum(map(_about_bytes, request.prompt.chunks))
        """The size of the request in bytes; an upper estimate until it is encoded."""
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
        """The task that fetches its result, if it has one of its own."""
        self.is_over = False
        self.is_drawn = False
        """Whether it is over because its result arrived."""
        self.is_given_up = False
        """Whether it is over because it was cancelled or timed out."""
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[SampleCall], object] | None = None

    def begin(
        self, loop: asyncio.AbstractEventLoop, on_end: Callable[[SampleCall], object]
    ) -> None:
        """Start the timeout; `on_end` is called when the sample is over."""
        self._on_end = on_end
        self.began = loop.time()
        if self.timeout_s is not None:
            self._timer = loop.call_later(self.timeout_s, self._expire)

    # The encoded request. It is encoded when it is sent and dropped when it is accepted: thousands
    # that are queued or wait for their results would take gigabytes.

    def write_early(self) -> None:
        """Encode the prompt early if that is cheap, for `write`. On the caller's thread."""
        self._early = early_text(self.request.prompt)

    def write(self, texts: RequestTexts, *, packs: bool) -> None:
        """Encode the request with its sequence id.

        Args:
            texts: The cache of encoded prompts and settings.
            packs: Whether token ids may be sent as raw memory.

        Raises:
            ValidationError: It contains something that cannot be sent.
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
        """Whether it was encoded with token ids as raw memory."""
        return self.written is not None and bool(self.written.arrays)

    # The end

    def named(self, response: SampleResponse) -> SampleResponse:
        """The response with the ids of its sequences, if the service sent any."""
        return response.with_sequence_ids(self.sequence_ids) if self.sequence_ids else response

    def settle_with(self, payload: bytes) -> None:
        """Decode and set its result."""
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
        """Set its result."""
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
        """Set its error."""
        if not self.is_over:
            self._end(error)
            self.future.fail(error)

    def give_up(self) -> None:
        """Cancel it."""
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
        return len(chunk.location)  # only the service may know how many tokens it has
    return chunk.length * _TOKEN_BYTES


def fail_all(calls: Sequence[SampleCall], error: BaseException) -> None:
    """Fail samples that cannot be drawn for one reason."""
    for call in calls:
        call.fail(error)


def lack_of(
    request: SampleRequest, response: SampleResponse, request_id: str | None
) -> IncompleteResultError | None:
    """The error for a result that ignores an option of its request; None if it is complete."""
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        return _ignored("prompt_alt_tokens_k", "has no prompt_alt_tokens", request_id)
    last_n, logprobs = request.prompt_logprobs_last_n, response.prompt_logprob_numbers
    if last_n is not None and logprobs is not None:
        before = logprobs.slice(0, max(0, len(logprobs) - last_n))
        if not _are_all_nan(before):
            what = f"has prompt logprobs before the last {last_n}"
            return _ignored("prompt_logprobs_last_n", what, request_id)
    return None


def _ignored(option: str, what: str, request_id: str | None) -> IncompleteResultError:
    return IncompleteResultError(
        message=f"the result of {request_id} {what}",
        request_id=request_id,
        remedy=f"the service may be too old for {option}",
    )


def _are_all_nan(numbers: Numbers) -> bool:
    values = numbers.view()
    if not values:
        return True
    # Nearly always they have the same bits; to test each one of a long prompt takes a millisecond.
    first = bytes(numbers.memory[: values.itemsize])
    return math.isnan(values[0]) and (
        first * len(values) == numbers.memory or all(map(math.isnan, values))
    )
