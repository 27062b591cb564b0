"""The requests of the API. A request has all its fields, whether they go into path, query or body.

`wire/endpoints.py` defines where each field goes. Constructing a request with an unknown field is
an error; a server ignores unknown fields that it receives.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Self

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.types.checkpoints import CheckpointSearchCursor, CheckpointType
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

# Configuration and credentials


class ClientConfigRequest(Request):
    """Get the flags of `ClientConfigResponse`."""

    sdk_version: str


class AuthTokenRequest(Request):
    """Exchange the credential for a short-lived one."""


class EmptyRequest(Request):
    """A request without fields."""


class TelemetrySendRequest(Request):
    """Send telemetry events."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None  # not sent before SDK 0.24


# Sessions


class CreateSessionRequest(Request):
    """Create a session."""

    tags: list[str]
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Request):
    """Keep a session alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSessionRequest(Request):
    """End a session and report how it went; only the first reason counts."""

    session_id: str
    reason: ClientSessionFinishReason
    detail: str | UnsetType | None = None


class GetSessionRequest(Request):
    """Get the training runs and samplers of a session."""

    session_id: str
    access_scope: AccessScope = "owned"


class ListSessionsRequest(Request):
    """Get a page of session ids."""

    limit: int = 20
    offset: int = 0
    access_scope: AccessScope = "owned"


class AssignSessionProjectRequest(Request):
    """Assign a session to a project."""

    session_id: str
    project_id: str


class ExportSessionTraceRequest(Request):
    """Export a session's trace; repeated until it is ready."""

    session_id: str


class SessionSearchRequest(Request):
    """Search sessions; fields that are not set do not restrict the search."""

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
    """Create a model with a new adapter."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(Request):
    """Unload a model's adapter."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class GetInfoRequest(Request):
    """Get the base model, adapter and optimizer of a model."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class WeightsInfoRequest(Request):
    """Get the base model and adapter of a checkpoint."""

    tinker_path: str


class ForwardBackwardRequest(Frozen):
    """Run a forward pass and, unless `forward_only`, accumulate gradients."""

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
        # A missing number and 0 are equal on the wire.
        return self.forward_backward_input, self.model_id, self.seq_id or 0, self.forward_only

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ForwardBackwardRequest):
            return NotImplemented
        return self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]  # its tensors may share mutable memory

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
        """The JSON format of SDK 0.24 and older, which has two endpoints."""
        key = "forward_input" if self.forward_only else "forward_backward_input"
        plain = {key: self.forward_backward_input._to_plain(write_array), "model_id": self.model_id}
        return plain if self.seq_id is None else {**plain, "seq_id": self.seq_id}

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        if not isinstance(plain, dict) or not isinstance(plain.get("model_id"), str):
            raise ValueError("Expected an object with a model_id")
        seq_id = plain.get("seq_id")
        if seq_id is not None and type(seq_id) is not int:
            raise ValueError("Expected seq_id to be an integer")
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
    # Not by the constructor of `ForwardRequest`, which has other arguments.
    request = cls.__new__(cls)
    ForwardBackwardRequest.__init__(request, given, model_id, seq_id, forward_only=forward_only)
    return request


class ForwardRequest(ForwardBackwardRequest):
    """Run a forward pass without gradients."""

    __slots__ = ()

    def __init__(
        self, forward_input: ForwardBackwardInput, model_id: str, seq_id: int | None = None
    ) -> None:
        super().__init__(forward_input, model_id, seq_id, forward_only=True)

    @property
    def forward_input(self) -> ForwardBackwardInput:
        """The data and the loss function."""
        return self.forward_backward_input


class OptimStepRequest(FrozenModel):
    """Apply the accumulated gradients.

    The settings may be passed as `optim_params`, `adam_params` or `optimizer_params`. Those of Adam
    are sent as `adam_params`, those of other optimizers as `optimizer_params`.
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
                remedy="pass AdamParams or the parameters of another optimizer",
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
        body = msgspec.convert(plain, _OptimStepBody)
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
    """Upload a loss for use in this session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


# Saving and loading


class SaveWeightsRequest(Request):
    """Save the training state under the name `path`."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Request):
    """Save sampler weights under the name `path`, or into a new sampler if it is None."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(Request):
    """Export weights for other programs, encrypted if there are recipients."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(Request):
    """Load a checkpoint into the model `model_id`, or into a new one of `session_id`."""

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


class ExternalWeightsUploadStartRequest(Request):
    """Start the upload of an adapter that was trained elsewhere."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None
    user_metadata: dict[str, str] | None = None
    """Stored with the checkpoint; an extension of tinsmith."""


class ExternalWeightsUploadFinishRequest(Request):
    """Make a checkpoint of the files that were uploaded."""

    upload_id: str


class CheckpointSearchRequest(Request):
    """Search checkpoints; fields that are not set do not restrict the search."""

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: list[str] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: CheckpointSearchCursor | None = None


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
    """Create a sampler for a base model or a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    """Get the number of a clone of a sampling client."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class GetSamplerRequest(Request):
    """Get the model that a sampler samples from."""

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
    """Get a result, or only its size if it is large."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionFuturesTarget(Request):
    """The samples of one sampler and one clone of its client."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Request):
    """Get the samples that finished since `prev_cursor`, and acknowledge received results."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class FutureCancelRequest(Request):
    """Cancel a sample."""

    request_id: str


# Runs and checkpoints


class ListTrainingRunsRequest(Request):
    """Get a page of training runs."""

    limit: int = 20
    offset: int = 0
    access_scope: AccessScope = "owned"
    project_id: str | None = None


class GetTrainingRunRequest(Request):
    """Get a training run."""

    training_run_id: str
    access_scope: AccessScope = "owned"


class ListCheckpointsRequest(Request):
    """Get all checkpoints of a run."""

    training_run_id: str


class ListUserCheckpointsRequest(Request):
    """Get a page of the caller's checkpoints."""

    limit: int = 100
    offset: int = 0


class CheckpointRequest(Request):
    """Delete, publish, unpublish or download a checkpoint."""

    training_run_id: str
    checkpoint_id: str


class SetCheckpointTtlRequest(Request):
    """Set when a checkpoint expires; None means never."""

    training_run_id: str
    checkpoint_id: str
    ttl_seconds: int | UnsetType | None = UNSET


# Usage


class GetBillingUsageRequest(Request):
    """Get the usage by the hour."""

    starting_on: datetime.datetime
    ending_before: datetime.datetime


class GetCurrentCheckpointStorageUsageRequest(Request):
    """Get the current checkpoint storage."""

    project_id: str | None = None


class GetAuditLogRequest(Request):
    """Get the audit log, of one day if given."""

    event_type: AuditEventType = "all"
    day: datetime.date | None = None
