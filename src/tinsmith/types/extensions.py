"""Types of tinsmith's protocol extensions, which `docs/extensions.md` specifies.

They are used only with services that offer them in their flags, except those for operators.
"""

from __future__ import annotations

import datetime
from typing import Any, TypeAlias

from tinsmith.types.record import Record, Request
from tinsmith.types.requests import SamplingSessionFuturesTarget
from tinsmith.types.sampling import StopReason
from tinsmith.types.service import ClientConfigResponse

DEFAULT_BATCH_BYTES = 4 * 1024 * 1024
DEFAULT_ANSWER_BYTES = 4 * 1024 * 1024
MOST_REPORTED = 10_000
"""The largest number of ids that a poll may acknowledge."""
MOST_FETCHED = 1000
"""The largest number of results per request."""
STREAMED_RESULT_BYTES = 1024 * 1024
"""Larger results are not part of a stream."""


class ServiceFlags(ClientConfigResponse):
    """The flags of `client/config`, including those that offer the extensions."""

    tinsmith_batch_items: int = 0
    tinsmith_batch_bytes: int = DEFAULT_BATCH_BYTES
    tinsmith_inline_bytes: int = 0
    tinsmith_stream: bool = False
    tinsmith_packed_prompts: bool = False
    tinsmith_parallel_chunks: bool = False


# Many samples in one request


class SampleManyRequest(Request):
    """Sample from many prompts. Items are decoded separately, so an invalid one fails alone.

    It is assembled from encoded `SampleRequest`s.
    """

    samples: list[dict[str, Any]]


class SampleManyItem(Record):
    """One sample: accepted as `request_id`, or refused with a `status`."""

    request_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    status: int | None = None
    detail: str | None = None
    retry_after_ms: float | None = None


class SampleManyResponse(Record):
    """One item per sample, in order."""

    items: list[SampleManyItem]


# Results in polls


class ResultsRetrieveRequest(Request):
    """Like `FuturesRetrieveRequest`, with small results in the response."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []
    inline_bytes: int
    answer_bytes: int = DEFAULT_ANSWER_BYTES
    linger_ms: float = 0.0


class ResultFinished(Record, tag_field="state", tag="finished"):
    """A sample is finished; `payload` is its result unless it is too large or was deleted."""

    request_id: str
    response_payload_uncompressed_size: int | None = None
    payload: bytes | None = None


class ResultFailed(Record, tag_field="state", tag="failed"):
    """A sample failed; if `error` is missing, it is retrieved like a result."""

    request_id: str
    error: str | None = None
    category: str | None = None


class ResultPending(Record, tag_field="state", tag="pending"):
    """A sample is not finished."""

    request_id: str


class ResultGone(Record, tag_field="state", tag="gone"):
    """A sample's result was deleted."""

    request_id: str


class ResultUnknown(Record, tag_field="state", tag="unknown"):
    """No sample has this id."""

    request_id: str


ResultCompletion: TypeAlias = ResultFinished | ResultFailed
FetchedResult: TypeAlias = (
    ResultFinished | ResultFailed | ResultPending | ResultGone | ResultUnknown
)


class ResultsRetrieveResponse(Record):
    """The samples that finished since the last poll, and the cursor for the next one."""

    completions: list[ResultCompletion]
    cursor: int
    queue_state: str | None = None
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class ResultsFetchRequest(Request):
    """Retrieve many results at once, without waiting."""

    request_ids: list[str]
    answer_bytes: int = DEFAULT_ANSWER_BYTES


class ResultsFetchResponse(Record):
    """The results in the order of the ids, as many as fit into the response."""

    results: list[FetchedResult]


# Streams of tokens


class StreamOpened(Record):
    """The first event of a stream: the ids of the sample and its sequences."""

    request_id: str
    sample_sequence_ids: list[str]


class StreamedTokens(Record):
    """New tokens of one sequence, after the first `offset` tokens."""

    index: int
    offset: int
    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason | None = None


class StreamedQueueState(Record):
    """Whether the sample is paused, and why."""

    queue_state: str
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class StreamedResult(Record):
    """The end of a stream: the whole result, or its size."""

    payload: bytes | None = None
    response_payload_uncompressed_size: int | None = None


# Replicas of the engine, for operators


class ReplicaRequest(Request):
    """Drain a replica, or use it again."""

    name: str


class ReplicaStatus(Record):
    """A replica of the engine: what it holds, its load and its losses, as of `reported_at`."""

    name: str
    state: str
    """`running`, `starting`, `restarting`, `draining` or `drained`."""
    duty: str
    """`train`, `sample` or `both`."""
    device: str
    threads: int
    base_models: list[str]
    pid: int | None = None
    adapters: list[str]
    """The ids of the models that are trained on it."""
    most_adapters: int
    weights: int
    """How many sampler weights it holds."""
    samples: int
    """How many samples it is drawing."""
    load: float
    """The share of the last minute in which it was computing."""
    losses: int
    """How often it was lost."""
    last_loss: str | None = None
    restarts_in_s: float | None = None
    """When it is started again, if it waits for that."""
    reported_at: datetime.datetime
    wants_drained: bool
    """Whether an operator wants it emptied and closed."""
    problem: str | None = None
    """Why that cannot be done."""


class FleetResponse(Record):
    """All replicas, by name; none if the engine is not divided."""

    replicas: list[ReplicaStatus]
