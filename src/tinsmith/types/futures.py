"""Types of futures: accepted requests, their state and their failure."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from tinsmith.errors import RequestErrorCategory, shown
from tinsmith.types.record import Record
from tinsmith.types.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)

_MOST_SHOWN = 64 * 1024
"""The longest text of an error that is not a string."""

QueueStateName: TypeAlias = Literal["active", "paused_capacity", "paused_rate_limit"]


class UntypedAPIFuture(Record):
    """The request was accepted; its result is retrieved by `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgainResponse(Record):
    """The result is not ready; poll again. `queue_state` says whether the request is paused.

    An unknown state is kept as it is, since newer services may have others.
    """

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: str = "active"
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class MetadataOnlyResponse(Record):
    """The result is ready but large; retrieve it when there is enough memory."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RequestFailedResponse(Record):
    """The request failed."""

    error: str
    category: RequestErrorCategory

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RequestFailedResponse:
        """Parse a failure whose `error` is text or an object with a message.

        The category is case-insensitive and may be missing or unknown.
        """
        error, category = plain.get("error"), plain.get("category")
        if isinstance(error, dict):
            category = error.get("category", category)
            error = error.get("message", error.get("error", error.get("detail", error)))
        text = error if isinstance(error, str) else shown(error, most=_MOST_SHOWN)
        return cls(error=text, category=RequestErrorCategory.parse(category))


class FutureFinished(Record, tag_field="state", tag="finished"):
    """A sample is finished; its result has this size."""

    request_id: str
    response_payload_uncompressed_size: int | None = None

    @property
    def state(self) -> Literal["finished"]:
        """The state."""
        return "finished"


class FutureFailed(Record, tag_field="state", tag="failed"):
    """A sample failed; its error is retrieved like a result."""

    request_id: str

    @property
    def state(self) -> Literal["failed"]:
        """The state."""
        return "failed"


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class FuturesRetrieveResponse(Record):
    """The samples that finished since the last poll, and the cursor for the next one."""

    completions: list[FutureCompletion]
    cursor: int


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
