"""Work that was accepted and is awaited: its number, its state, its failure."""

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
"""How much is kept of an error that is not text."""

QueueStateName: TypeAlias = Literal["active", "paused_capacity", "paused_rate_limit"]


class UntypedAPIFuture(Record):
    """The work was accepted; its result is asked for under `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgainResponse(Record):
    """The work is not done; ask again. `queue_state` says whether it is being held back, and why.

    A state that is not known is kept as it came: a newer server may have more of them.
    """

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: str = "active"
    queue_state_reason: str | None = None
    retry_after_ms: float | None = None


class MetadataOnlyResponse(Record):
    """The work is done and its result is large; ask again for all of it when there is room."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RequestFailedResponse(Record):
    """The work failed."""

    error: str
    category: RequestErrorCategory

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RequestFailedResponse:
        """Read either shape of a failure: `error` as text, or as an object with a message.

        The category may be in any case, missing or unknown.
        """
        error, category = plain.get("error"), plain.get("category")
        if isinstance(error, dict):
            category = error.get("category", category)
            error = error.get("message", error.get("error", error.get("detail", error)))
        text = error if isinstance(error, str) else shown(error, most=_MOST_SHOWN)
        return cls(error=text, category=RequestErrorCategory.parse(category))


class FutureFinished(Record, tag_field="state", tag="finished"):
    """A sample is done; its payload takes this many bytes."""

    request_id: str
    response_payload_uncompressed_size: int | None = None

    @property
    def state(self) -> Literal["finished"]:
        """How it ended."""
        return "finished"


class FutureFailed(Record, tag_field="state", tag="failed"):
    """A sample failed; its error is fetched like a result."""

    request_id: str

    @property
    def state(self) -> Literal["failed"]:
        """How it ended."""
        return "failed"


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class FuturesRetrieveResponse(Record):
    """What ended since the last poll, and where to go on."""

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
