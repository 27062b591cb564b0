"""Training runs and sessions: what they are, how they ended, how they are found."""

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
    """A run's id as people read it: eight characters of its session, and which of its runs."""
    session, colon, rest = run_id.removeprefix("session-").partition(":")
    return f"{session[:8]}{colon}{rest}"


def is_short_for(given: str, run_id: str) -> bool:
    """Whether text is the beginning of a run's session, and names the run if the id does."""
    session, _, rest = run_id.removeprefix("session-").partition(":")
    start, colon, named = given.removeprefix("session-").partition(":")
    return bool(start) and session.startswith(start) and (not colon or rest == named)


class TrainingRun(Record):
    """A model in training and its newest checkpoints.

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
    """The loss per token of its last pass with gradients."""


class TrainingRunsResponse(Record):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class WeightsInfoResponse(Record):
    """What a checkpoint was trained from, enough to make a model that it fits."""

    base_model: str
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CreateSessionResponse(Record):
    """A session is open; messages are shown to the user at their level."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatResponse(Record):
    """The session is alive."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(Record):
    """What a session holds."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Record):
    """A page of session ids; the official service sends no cursor with it."""

    sessions: list[str]
    cursor: Cursor | None = None


class TraceExportResponse(Record):
    """How far the export of a session's trace is."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# How a session ended, as its client said


class ClientSessionFinishSuccess(Tagged, tag="success"):
    """The program ended well."""

    type = "success"


class ClientSessionFinishErrored(Tagged, tag="errored"):
    """The program ended with an error."""

    type = "errored"


class ClientSessionFinishInterrupted(Tagged, tag="interrupted"):
    """The program was stopped."""

    type = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


# What a session's state is


class SessionActive(Tagged, tag="active"):
    """It can be used."""

    type = "active"


class SessionCancelled(Tagged, tag="cancelled"):
    """It was ended from outside."""

    type = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Tagged, tag="client_finished"):
    """Its client ended it."""

    type = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Tagged, tag="request"):
    """A request failed."""

    type = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Tagged, tag="training_run"):
    """A training run failed."""

    type = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Tagged, tag="sampling_session"):
    """A sampler failed."""

    type = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Tagged, tag="failed"):
    """It failed, and what failed in it."""

    type = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


# Search


class OwnSearchOwner(Tagged, Request, tag="own"):
    """Sessions of the caller."""

    type = "own"


class AccessibleSearchOwner(Tagged, Request, tag="accessible"):
    """Sessions that the caller may see."""

    type = "accessible"


class UserSearchOwner(Tagged, Request, tag="user"):
    """Sessions of up to ten named owners."""

    type = "user"
    owner_urns: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10)]


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Tagged, Request, tag="active"):
    """Sessions that can be used."""

    type = "active"


class CancelledSessionStatusQuery(Tagged, Request, tag="cancelled"):
    """Sessions ended from outside."""

    type = "cancelled"


class FailedSessionStatusQuery(Tagged, Request, tag="failed"):
    """Sessions that failed."""

    type = "failed"


class ClientFinishedSessionStatusQuery(Tagged, Request, tag="client_finished"):
    """Sessions that their client ended, for one of `reasons` if given."""

    type = "client_finished"
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
    """Where the next page begins. The time must say its offset from UTC."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSummary(Record):
    """A session as search shows it."""

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
