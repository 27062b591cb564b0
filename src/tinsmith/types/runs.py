"""Types of training runs and sessions: details, status and search."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal, TypeAlias

import msgspec

from tinsmith.types.checkpoints import Checkpoint, Cursor
from tinsmith.types.record import Record, Request, Tagged
from tinsmith.types.training import AdamOptimizerConfig, OptimizerConfig

AwareDatetime: TypeAlias = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
AccessScope: TypeAlias = Literal["owned", "accessible"]


def short_run_id(run_id: str) -> str:
    """The short form of a run's id: eight characters of its session, and the run's number."""
    session, colon, rest = run_id.removeprefix("session-").partition(":")
    return f"{session[:8]}{colon}{rest}"


def is_short_for(given: str, run_id: str) -> bool:
    """Whether `given` is a short form of the id; the run's number may be omitted."""
    session, _, rest = run_id.removeprefix("session-").partition(":")
    start, colon, named = given.removeprefix("session-").partition(":")
    return bool(start) and session.startswith(start) and (not colon or rest == named)


class TrainingRun(Record):
    """A training run and its newest checkpoints.

    Only tinsmith services report the last three fields, which may be a few seconds old.
    """

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime.datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    """The name of its session."""
    steps: int | None = None
    """Optimizer steps taken."""
    loss_per_token: float | None = None
    """The loss per token of the last `forward_backward`."""


class TrainingRunsResponse(Record):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class WeightsInfoResponse(Record):
    """The base model and adapter of a checkpoint, enough to create a matching model."""

    base_model: str
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CreateSessionResponse(Record):
    """The session was created; the messages are logged at their level."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatResponse(Record):
    """The session is alive."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(Record):
    """The training runs and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Record):
    """A page of session ids; the hosted service sends no cursor."""

    sessions: list[str]
    cursor: Cursor | None = None


class TraceExportResponse(Record):
    """The state of the export of a session's trace."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# How a session ended, as reported by its client


class ClientSessionFinishSuccess(Tagged, tag="success"):
    """The program succeeded."""


class ClientSessionFinishErrored(Tagged, tag="errored"):
    """The program failed."""


class ClientSessionFinishInterrupted(Tagged, tag="interrupted"):
    """The program was interrupted."""


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


# The status of a session


class SessionActive(Tagged, tag="active"):
    """The session is active."""


class SessionCancelled(Tagged, tag="cancelled"):
    """The session was cancelled."""

    detail: str | None = None


class ClientSessionFinished(Tagged, tag="client_finished"):
    """The client ended the session."""

    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Tagged, tag="request"):
    """A request failed."""

    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Tagged, tag="training_run"):
    """A training run failed."""

    training_run_id: str


class SessionFailedSamplingSessionReason(Tagged, tag="sampling_session"):
    """A sampler failed."""

    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Tagged, tag="failed"):
    """The session failed; `reason` says what failed."""

    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


# Search


class OwnSearchOwner(Tagged, Request, tag="own"):
    """Sessions of the caller."""


class AccessibleSearchOwner(Tagged, Request, tag="accessible"):
    """Sessions that are visible to the caller."""


class UserSearchOwner(Tagged, Request, tag="user"):
    """Sessions of up to ten named owners."""

    owner_urns: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10)]


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Tagged, Request, tag="active"):
    """Active sessions."""


class CancelledSessionStatusQuery(Tagged, Request, tag="cancelled"):
    """Cancelled sessions."""


class FailedSessionStatusQuery(Tagged, Request, tag="failed"):
    """Sessions that failed."""


class ClientFinishedSessionStatusQuery(Tagged, Request, tag="client_finished"):
    """Sessions that their client ended, with one of `reasons` if given."""

    reasons: Annotated[list[ClientSessionFinishReasonType], msgspec.Meta(min_length=1)] | None = (
        None
    )


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Request):
    """The start of the next page. The time must have a UTC offset."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSummary(Record):
    """A session in search results."""

    session_id: str
    created_at: datetime.datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Record):
    """A page of sessions, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
