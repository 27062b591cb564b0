"""What travels in tinsmith's extensions of the protocol; `docs/extensions.md` is their contract.

None of these is sent to a service that has not offered them in its flags.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tinsmith.types.record import Record, Request
from tinsmith.types.requests import SamplingSessionFuturesTarget
from tinsmith.types.sampling import StopReason
from tinsmith.types.service import ClientConfigResponse

DEFAULT_BATCH_BYTES = 4 * 1024 * 1024
DEFAULT_ANSWER_BYTES = 4 * 1024 * 1024
MOST_REPORTED = 10_000
"""How many ids a poll may report."""
MOST_FETCHED = 1000
"""How many results may be asked for at once."""
STREAMED_RESULT_BYTES = 1024 * 1024
"""A larger result is not part of a stream."""


class ServiceFlags(ClientConfigResponse):
    """The flags of `client/config`, and those by which a service offers the extensions."""

    tinsmith_batch_items: int = 0
    tinsmith_batch_bytes: int = DEFAULT_BATCH_BYTES
    tinsmith_inline_bytes: int = 0
    tinsmith_stream: bool = False
    tinsmith_packed_prompts: bool = False
    tinsmith_import_bytes: int = 0
    tinsmith_parallel_chunks: bool = False


# Many samples in one request


class SampleManyRequest(Request):
    """Sample from many prompts. Each item is read by itself, so that one bad one spoils no other.

    Made from bodies of `SampleRequest`s that are already written; see `client/samples/sender.py`.
    """

    samples: list[dict[str, Any]]


class SampleManyItem(Record):
    """What became of one sample: accepted under `request_id`, or refused with a `status`."""

    request_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    status: int | None = None
    detail: str | None = None
    retry_after_ms: float | None = None


class SampleManyResponse(Record):
    """One item for each sample, in order."""

    items: list[SampleManyItem]


# Results in the poll


class ResultsRetrieveRequest(Request):
    """As `FuturesRetrieveRequest`, with small results in the answer."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []
    inline_bytes: int
    answer_bytes: int = DEFAULT_ANSWER_BYTES
    linger_ms: float = 0.0


class ResultFinished(Record, tag_field="state", tag="finished"):
    """A sample is done; its payload is here, unless it is too large or no longer kept."""

    request_id: str
    response_payload_uncompressed_size: int | None = None
    payload: bytes | None = None


class ResultFailed(Record, tag_field="state", tag="failed"):
    """A sample failed; why is fetched like a result if it is not said here."""

    request_id: str
    error: str | None = None
    category: str | None = None


class ResultPending(Record, tag_field="state", tag="pending"):
    """A sample is not done."""

    request_id: str


class ResultGone(Record, tag_field="state", tag="gone"):
    """A sample's result is no longer kept."""

    request_id: str


class ResultUnknown(Record, tag_field="state", tag="unknown"):
    """No sample has this id."""

    request_id: str


ResultCompletion: TypeAlias = ResultFinished | ResultFailed
FetchedResult: TypeAlias = (
    ResultFinished | ResultFailed | ResultPending | ResultGone | ResultUnknown
)


class ResultsRetrieveResponse(Record):
    """What ended since the last poll, with small results, and where to go on."""

    completions: list[ResultCompletion]
    cursor: int
    queue_state: str | None = None
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class ResultsFetchRequest(Request):
    """Ask for many results at once, without waiting."""

    request_ids: list[str]
    answer_bytes: int = DEFAULT_ANSWER_BYTES


class ResultsFetchResponse(Record):
    """The results, in the order of the ids, as far as the answer had room."""

    results: list[FetchedResult]


# Tokens as they are drawn


class StreamOpened(Record):
    """The first event of a stream: what the sample and its sequences are called."""

    request_id: str
    sample_sequence_ids: list[str]


class StreamedTokens(Record):
    """New tokens of one sequence, of which `offset` came before."""

    index: int
    offset: int
    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason | None = None


class StreamedQueueState(Record):
    """Whether the sample is being held back, and why."""

    queue_state: str
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class StreamedResult(Record):
    """The end of a stream: the whole result, or how large it is."""

    payload: bytes | None = None
    response_payload_uncompressed_size: int | None = None
