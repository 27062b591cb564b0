"""Every request of the API, as one value that holds all it says: path, query and body alike.

`wire/endpoints.py` says which of the fields go where. A caller that misspells a field is told at
once; a server that reads one with fields it does not know ignores them.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Self

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.types.events import TelemetryEvent
from tinsmith.types.inputs import ModelInput
from tinsmith.types.record import (
    UNSET,
    ArrayWriter,
    Frozen,
    FrozenModel,
    Request,
    UnsetType,
    set_once,
    to_plain,
)
from tinsmith.types.runs import (
    AccessScope,
    ClientSessionFinishReason,
    OwnSearchOwner,
    SearchOwner,
    SessionSearchCursor,
    SessionStatusQuery,
)
from tinsmith.types.sampling import SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import (
    AdamOptimizerConfig,
    AdamParams,
    CustomLossGraph,
    CustomLossInput,
    ForwardBackwardInput,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
    OptimParamsBase,
)
from tinsmith.types.usage import AuditEventType

# Start-up, credentials


class ClientConfigRequest(Request):
    """Ask for the flags of `ClientConfigResponse`."""

    sdk_version: str


class AuthTokenRequest(Request):
    """Exchange the credential for a short-lived one."""


class EmptyRequest(Request):
    """Nothing is said beyond the route itself."""


class TelemetrySendRequest(Request):
    """Report events."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None  # not sent before SDK 0.24


# Sessions


class CreateSessionRequest(Request):
    """Open a session."""

    tags: list[str]
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Request):
    """Say that the session's client still runs."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSessionRequest(Request):
    """End a session and say how it went; the first reason given stays."""

    session_id: str
    reason: ClientSessionFinishReason
    detail: str | UnsetType | None = None


class GetSessionRequest(Request):
    """Ask what a session holds."""

    session_id: str
    access_scope: AccessScope = "owned"


class ListSessionsRequest(Request):
    """Ask for a page of session ids."""

    limit: int = 20
    offset: int = 0
    access_scope: AccessScope = "owned"


class AssignSessionProjectRequest(Request):
    """Put a session into a project."""

    session_id: str
    project_id: str


class ExportSessionTraceRequest(Request):
    """Ask for a session's trace; asked again until it is ready."""

    session_id: str


class SessionSearchRequest(Request):
    """Find sessions; a field left out does not narrow the search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[SessionStatusQuery], msgspec.Meta(min_length=1)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


# Models and training


class CreateModelRequest(Request):
    """Make a model with a fresh adapter."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(Request):
    """Let go of a model's adapter."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class GetInfoRequest(Request):
    """Ask what a model is."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class WeightsInfoRequest(Request):
    """Ask what a checkpoint was trained from."""

    tinker_path: str


class ForwardBackwardRequest(Frozen):
    """Run a batch through the model, and unless `forward_only` add up the gradients."""

    __slots__ = ("forward_backward_input", "forward_only", "model_id", "seq_id")

    forward_backward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None
    forward_only: bool

    def __init__(
        self,
        forward_backward_input: ForwardBackwardInput,
        model_id: str,
        seq_id: int | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        set_once(self, "forward_backward_input", forward_backward_input)
        set_once(self, "model_id", model_id)
        set_once(self, "seq_id", seq_id)
        set_once(self, "forward_only", forward_only)

    def _parts(self) -> tuple[Any, ...]:
        # A missing number and 0 are the same on the wire.
        return self.forward_backward_input, self.model_id, self.seq_id or 0, self.forward_only

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ForwardBackwardRequest):
            return NotImplemented
        return self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]  # its tensors may share memory that changes

    def __repr__(self) -> str:
        name = "ForwardRequest" if self.forward_only else "ForwardBackwardRequest"
        return (
            f"{name}(model_id={self.model_id!r}, seq_id={self.seq_id}, "
            f"{self.forward_backward_input!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.forward_backward_input, self.model_id, self.seq_id, self.forward_only)
        return _rebuild_forward, (type(self), *parts)

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        """The JSON form of SDK 0.24 and older, where the two directions have a route each."""
        key = "forward_input" if self.forward_only else "forward_backward_input"
        plain = {key: self.forward_backward_input._to_plain(write_array), "model_id": self.model_id}
        return plain if self.seq_id is None else {**plain, "seq_id": self.seq_id}

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        if not isinstance(plain, dict) or not isinstance(plain.get("model_id"), str):
            raise ValueError("Expected an object with a model_id")
        seq_id = plain.get("seq_id")
        if seq_id is not None and type(seq_id) is not int:
            raise ValueError("Expected seq_id to be a whole number")
        forward_only = "forward_input" in plain
        body = plain.get("forward_input" if forward_only else "forward_backward_input")
        made = ForwardBackwardInput._from_plain(body)
        return cls(made, plain["model_id"], seq_id, forward_only=forward_only)


def _rebuild_forward(
    cls: type[ForwardBackwardRequest],
    given: ForwardBackwardInput,
    model_id: str,
    seq_id: int | None,
    forward_only: bool,
) -> ForwardBackwardRequest:
    # Past the constructor of `ForwardRequest`, which has other arguments.
    request = cls.__new__(cls)
    ForwardBackwardRequest.__init__(request, given, model_id, seq_id, forward_only=forward_only)
    return request


class ForwardRequest(ForwardBackwardRequest):
    """Run a batch through the model without gradients; `forward_input` is what is run."""

    __slots__ = ()

    def __init__(
        self, forward_input: ForwardBackwardInput, model_id: str, seq_id: int | None = None
    ) -> None:
        super().__init__(forward_input, model_id, seq_id, forward_only=True)

    @property
    def forward_input(self) -> ForwardBackwardInput:
        """What is run."""
        return self.forward_backward_input


class OptimStepRequest(FrozenModel):
    """Apply the gathered gradients.

    The settings may be given as `optim_params`, `adam_params` or `optimizer_params`; Adam's are
    written under the second name, those of other families under the third.
    """

    __slots__ = ("model_id", "optim_params", "seq_id")

    type: Literal["optim_step"] = "optim_step"
    model_id: str
    optim_params: OptimParams
    seq_id: int | None

    def __init__(
        self,
        *,
        model_id: str,
        optim_params: OptimParams | None = None,
        adam_params: AdamParams | None = None,
        optimizer_params: OptimParams | None = None,
        seq_id: int | None = None,
        type: Literal["optim_step"] = "optim_step",  # noqa: A002 - the API's own name
    ) -> None:
        given = [p for p in (optim_params, adam_params, optimizer_params) if p is not None]
        if len(given) != 1 or not isinstance(given[0], AdamParams | OptimParamsBase):
            raise ValidationError(
                "OptimStepRequest needs one of optim_params, adam_params and optimizer_params",
                remedy="give AdamParams or the parameters of another optimizer family",
            )
        if type != "optim_step":
            raise ValidationError(f"OptimStepRequest.type is always 'optim_step', not {type!r}")
        set_once(self, "model_id", model_id)
        set_once(self, "optim_params", given[0])
        set_once(self, "seq_id", seq_id)

    def _parts(self) -> tuple[Any, ...]:
        return self.model_id, self.optim_params, self.seq_id

    def _arguments(self) -> dict[str, Any]:
        return dict(zip(("model_id", "optim_params", "seq_id"), self._parts(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptimStepRequest):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return (
            f"OptimStepRequest(model_id={self.model_id!r}, seq_id={self.seq_id}, "
            f"optim_params={self.optim_params!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_step, self._parts()

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        plain: dict[str, Any] = {"model_id": self.model_id}
        if self.seq_id is not None:
            plain["seq_id"] = self.seq_id
        is_adam = isinstance(self.optim_params, AdamParams)
        params = to_plain(self.optim_params, write_array=write_array)
        return {
            **plain,
            "type": self.type,
            "adam_params" if is_adam else "optimizer_params": params,
        }

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        return cls._from_body(msgspec.convert(plain, _OptimStepBody))

    @classmethod
    def _from_body(cls, body: _OptimStepBody) -> Self:
        given = (body.optim_params, body.adam_params, body.optimizer_params)
        params = [_params_from_plain(plain) for plain in given if plain is not None]
        if len(params) != 1:
            raise ValidationError(
                "an optim_step takes one of optim_params, adam_params and optimizer_params"
            )
        return cls(model_id=body.model_id, seq_id=body.seq_id, optim_params=params[0])


def _params_from_plain(plain: dict[str, Any]) -> OptimParams:
    if plain.get("type") not in (None, "adamw"):
        return OptimParamsBase._from_plain(plain)
    fields = {name: plain[name] for name in AdamParams.__struct_fields__ if name in plain}
    return msgspec.convert(fields, AdamParams)


class _OptimStepBody(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    optim_params: dict[str, Any] | None = None


def _rebuild_step(model_id: str, params: OptimParams, seq_id: int | None) -> OptimStepRequest:
    return OptimStepRequest(model_id=model_id, optim_params=params, seq_id=seq_id)


class CreateCustomLossRequest(Request):
    """Upload a loss to be used in this session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


# Saving and loading


class SaveWeightsRequest(Request):
    """Save training state under the bare name `path`."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Request):
    """Save sampler weights under the name `path`, or without one into a sampler of their own."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(Request):
    """Save weights for other programs, encrypted if there are recipients."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(Request):
    """Load a checkpoint into a model, or make a model of it: by `model_id` or by `session_id`."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CopyWeightsRequest(Request):
    """Copy a checkpoint into a project."""

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


# Sampling


class CreateSamplingSessionRequest(Request):
    """Make a sampler of a base model or of a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    """Ask for a clone's number."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class GetSamplerRequest(Request):
    """Ask what a sampler samples from."""

    sampler_id: str


class SampleRequest(Request):
    """Sample from a prompt."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


# Futures


class FutureRetrieveRequest(Request):
    """Ask for a result, or for its size alone where it is large."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionFuturesTarget(Request):
    """The samples of one sampler and clone."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Request):
    """Ask what ended since `prev_cursor`, and say which results have arrived."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class FutureCancelRequest(Request):
    """Say that a sample's result is no longer wanted."""

    request_id: str


# Runs and checkpoints


class ListTrainingRunsRequest(Request):
    """Ask for a page of training runs."""

    limit: int = 20
    offset: int = 0
    access_scope: AccessScope = "owned"
    project_id: str | None = None


class GetTrainingRunRequest(Request):
    """Ask for one training run."""

    training_run_id: str
    access_scope: AccessScope = "owned"


class ListCheckpointsRequest(Request):
    """Ask for all checkpoints of a run."""

    training_run_id: str


class ListUserCheckpointsRequest(Request):
    """Ask for a page of the caller's checkpoints."""

    limit: int = 100
    offset: int = 0


class CheckpointRequest(Request):
    """Name a checkpoint: to delete, publish, unpublish or fetch it."""

    training_run_id: str
    checkpoint_id: str


class SetCheckpointTtlRequest(Request):
    """Set when a checkpoint expires; None means never."""

    training_run_id: str
    checkpoint_id: str
    ttl_seconds: int | UnsetType | None = UNSET


# Usage


class GetBillingUsageRequest(Request):
    """Ask for usage by hour."""

    starting_on: datetime.datetime
    ending_before: datetime.datetime


class GetCurrentCheckpointStorageUsageRequest(Request):
    """Ask what checkpoints take now."""

    project_id: str | None = None


class GetAuditLogRequest(Request):
    """Ask what was done, on one day if given."""

    event_type: AuditEventType = "all"
    day: datetime.date | None = None
