"""The table of all endpoints of the API.

Client and server use it for the method, path, types and format of each call, for its retries,
connection pool and timeout, and to recognize repeated submissions.

Fields of a request that occur in the path go there, those in `header_fields` into headers, and the
rest into the query of a GET or DELETE, or the body of a POST or PUT.
"""

from __future__ import annotations

from typing import Any

from tinsmith import types as t
from tinsmith.types import extensions as x
from tinsmith.types import requests as r
from tinsmith.wire.endpoint_types import (
    API_PREFIX,
    Answer,
    Endpoint,
    Format,
    FutureResult,
    Pool,
    RetryClass,
)

FUTURE_RESULTS: dict[str, FutureResult] = {
    "CreateModel": FutureResult(t.CreateModelResponse),
    "UnloadModel": FutureResult(t.UnloadModelResponse),
    "ForwardBackward": FutureResult(t.ForwardBackwardOutput, Format.PROTOBUF),
    "Forward": FutureResult(t.ForwardBackwardOutput, Format.PROTOBUF),
    "OptimStep": FutureResult(t.OptimStepResponse),
    "SaveWeights": FutureResult(t.SaveWeightsResponse),
    "LoadWeights": FutureResult(t.LoadWeightsResponse),
    "SaveWeightsForSampler": FutureResult(t.SaveWeightsForSamplerResponseInternal),
    "SaveWeightsExternal": FutureResult(t.SaveWeightsExternalResponseInternal),
    "CreateCustomLoss": FutureResult(t.CreateCustomLossResponse),
    "Sample": FutureResult(t.SampleResponse, Format.PROTOBUF),
}


def _direct(name: str, request: Any, response: Any, *, path: str = "", **rest: Any) -> Endpoint:
    settings: dict[str, Any] = {"method": "POST", "path": API_PREFIX + (path or f"/{name}"), **rest}
    return Endpoint(name=name, request=request, response=response, **settings)


def _submit(
    name: str, request: Any, result: str, identity: tuple[str, ...], **rest: Any
) -> Endpoint:
    settings: dict[str, Any] = {"pool": Pool.TRAIN, "path": f"{API_PREFIX}/{name}", **rest}
    return Endpoint(
        name=name,
        method="POST",
        request=request,
        response=t.UntypedAPIFuture,
        answer=Answer.FUTURE,
        result=result,
        identity=identity,
        **settings,
    )


def _manage(
    method: str, name: str, path: str, request: Any, response: Any = None, **rest: Any
) -> Endpoint:
    return Endpoint(
        name=name,
        method=method,
        path=API_PREFIX + path,
        request=request,
        response=response,
        answer=Answer.DIRECT if response is not None else Answer.NOTHING,
        is_management=True,
        **rest,
    )


def _operate(method: str, name: str, path: str, request: Any, response: Any) -> Endpoint:
    return Endpoint(
        name=name,
        method=method,
        path=f"{API_PREFIX}/tinsmith/fleet{path}",
        request=request,
        response=response,
        is_extension=True,
        is_for_operators=True,
    )


_MODEL = ("model_id", "seq_id")
_BACKPRESSURE = {"X-Tinker-Sampling-Backpressure": "1"}
_RUN = "/training_runs/{training_run_id}"
_CHECKPOINT = _RUN + "/checkpoints/{checkpoint_id:path}"

_START = [
    _direct("client_config", r.ClientConfigRequest, x.ServiceFlags, path="/client/config"),
    _direct(
        "client_dynamic_config",
        r.ClientConfigRequest,
        t.ClientDynamicConfigResponse,
        retry=RetryClass.OWN,
        pool=Pool.SESSION,
        timeout_s=10.0,
        path="/client/dynamic_config",
    ),
    _direct(
        "auth_token",
        r.AuthTokenRequest,
        t.AuthTokenResponse,
        retry=RetryClass.EXCHANGE,
        pool=Pool.SESSION,
        path="/auth/token",
    ),
    _direct("healthz", r.EmptyRequest, t.HealthResponse, method="GET"),
    _direct(
        "get_server_capabilities", r.EmptyRequest, t.GetServerCapabilitiesResponse, method="GET"
    ),
    _direct(
        "get_api_key",
        r.EmptyRequest,
        t.ApiKeyResponse,
        path="/auth/apikey/me",
        method="GET",
        timeout_s=30.0,
    ),
    _direct(
        "delete_api_key",
        r.EmptyRequest,
        None,
        path="/auth/apikey/me",
        method="DELETE",
        answer=Answer.NOTHING,
        timeout_s=30.0,
    ),
    _direct(
        "telemetry",
        r.TelemetrySendRequest,
        t.TelemetryResponse,
        retry=RetryClass.OWN,
        pool=Pool.TELEMETRY,
        timeout_s=5.0,
    ),
]

_SESSIONS = [
    _direct(
        "create_session",
        r.CreateSessionRequest,
        t.CreateSessionResponse,
        retry=RetryClass.EXCHANGE,
        pool=Pool.SESSION,
    ),
    _direct(
        "session_heartbeat",
        r.SessionHeartbeatRequest,
        t.SessionHeartbeatResponse,
        retry=RetryClass.OWN,
        pool=Pool.SESSION,
        timeout_s=10.0,
    ),
    _direct(
        "finish_session",
        r.FinishSessionRequest,
        None,
        path="/sessions/{session_id}/finish",
        answer=Answer.NOTHING,
        pool=Pool.SESSION,
    ),
    _manage("GET", "list_sessions", "/sessions", r.ListSessionsRequest, t.ListSessionsResponse),
    _manage(
        "POST",
        "search_sessions",
        "/sessions/search",
        r.SessionSearchRequest,
        t.SessionSearchResponse,
    ),
    _manage(
        "GET", "get_session", "/sessions/{session_id}", r.GetSessionRequest, t.GetSessionResponse
    ),
    _manage(
        "PUT",
        "assign_session_project",
        "/sessions/{session_id}/project",
        r.AssignSessionProjectRequest,
    ),
    _manage(
        "GET",
        "export_session_trace",
        "/sessions/{session_id}/trace_export",
        r.ExportSessionTraceRequest,
        t.TraceExportResponse,
    ),
]

_TRAINING = [
    _submit(
        "create_model",
        r.CreateModelRequest,
        "CreateModel",
        ("session_id", "model_seq_id"),
        retry=RetryClass.EXCHANGE,
    ),
    _submit("unload_model", r.UnloadModelRequest, "UnloadModel", ("model_id",), until="0.25"),
    _submit(
        "forward_backward",
        r.ForwardBackwardRequest,
        "ForwardBackward",
        _MODEL,
        request_format=Format.PROTOBUF,
    ),
    _submit("forward", r.ForwardBackwardRequest, "Forward", _MODEL, until="0.24"),
    _submit("optim_step", r.OptimStepRequest, "OptimStep", _MODEL),
    _submit("save_weights", r.SaveWeightsRequest, "SaveWeights", _MODEL, retry=RetryClass.CALL),
    _submit(
        "save_weights_for_sampler",
        r.SaveWeightsForSamplerRequest,
        "SaveWeightsForSampler",
        _MODEL,
        retry=RetryClass.CALL,
    ),
    _submit(
        "save_weights_external",
        r.SaveWeightsExternalRequest,
        "SaveWeightsExternal",
        _MODEL,
        retry=RetryClass.CALL,
    ),
    _submit(
        "load_weights",
        r.LoadWeightsRequest,
        "LoadWeights",
        ("model_id", "seq_id", "session_id", "model_seq_id"),
    ),
    _submit(
        "create_custom_loss",
        r.CreateCustomLossRequest,
        "CreateCustomLoss",
        ("session_id", "custom_loss_seq_id"),
    ),
    _direct("get_info", r.GetInfoRequest, t.GetInfoResponse),
    _manage(
        "POST",
        "get_weights_info_by_tinker_path",
        "/weights_info",
        r.WeightsInfoRequest,
        t.WeightsInfoResponse,
    ),
]

_SAMPLING = [
    _direct(
        "create_sampling_session",
        r.CreateSamplingSessionRequest,
        t.CreateSamplingSessionResponse,
        retry=RetryClass.EXCHANGE,
        pool=Pool.SESSION,
        identity=("session_id", "sampling_session_seq_id"),
    ),
    _direct(
        "join_sampling_session",
        r.JoinSamplingSessionRequest,
        t.JoinSamplingSessionResponse,
        pool=Pool.SESSION,
    ),
    _manage(
        "GET", "get_sampler", "/samplers/{sampler_id}", r.GetSamplerRequest, t.GetSamplerResponse
    ),
    _submit(
        "asample",
        r.SampleRequest,
        "Sample",
        ("sampling_session_id", "seq_id"),
        retry=RetryClass.CALL,
        pool=Pool.SAMPLE,
        headers=_BACKPRESSURE,
    ),
]

_FUTURES = [
    _direct(
        "retrieve_future",
        r.FutureRetrieveRequest,
        None,
        answer=Answer.RESULT,
        retry=RetryClass.OWN,
        pool=Pool.RETRIEVE,
        timeout_s=45.0,
    ),
    _direct(
        "retrieve_futures",
        r.FuturesRetrieveRequest,
        t.FuturesRetrieveResponse,
        retry=RetryClass.OWN,
        pool=Pool.RETRIEVE,
        timeout_s=45.0,
    ),
    _direct(
        "cancel_future",
        r.FutureCancelRequest,
        None,
        answer=Answer.NOTHING,
        retry=RetryClass.CALL,
        pool=Pool.RETRIEVE,
        timeout_s=30.0,
    ),
]

_EXTENSIONS = [
    _direct(
        "asample_many",
        x.SampleManyRequest,
        x.SampleManyResponse,
        retry=RetryClass.CALL,
        pool=Pool.SAMPLE,
        headers=_BACKPRESSURE,
        is_extension=True,
        path="/tinsmith/asample_many",
    ),
    _direct(
        "retrieve_results",
        x.ResultsRetrieveRequest,
        x.ResultsRetrieveResponse,
        retry=RetryClass.OWN,
        pool=Pool.RETRIEVE,
        timeout_s=45.0,
        is_extension=True,
        path="/tinsmith/retrieve_results",
    ),
    _direct(
        "fetch_results",
        x.ResultsFetchRequest,
        x.ResultsFetchResponse,
        retry=RetryClass.OWN,
        pool=Pool.RETRIEVE,
        timeout_s=45.0,
        is_extension=True,
        path="/tinsmith/fetch_results",
    ),
    _direct(
        "asample_stream",
        r.SampleRequest,
        None,
        answer=Answer.EVENTS,
        result="Sample",
        identity=("sampling_session_id", "seq_id"),
        retry=RetryClass.OWN,
        pool=Pool.SAMPLE,
        headers=_BACKPRESSURE,
        is_extension=True,
        path="/tinsmith/asample_stream",
    ),
    _operate("GET", "list_replicas", "", r.EmptyRequest, x.FleetResponse),
    _operate("POST", "drain_replica", "/{name}/drain", x.ReplicaRequest, x.ReplicaStatus),
    _operate("POST", "resume_replica", "/{name}/resume", x.ReplicaRequest, x.ReplicaStatus),
]

_RUNS = [
    _manage(
        "GET",
        "list_training_runs",
        "/training_runs",
        r.ListTrainingRunsRequest,
        t.TrainingRunsResponse,
    ),
    _manage("GET", "get_training_run", _RUN, r.GetTrainingRunRequest, t.TrainingRun),
    _manage(
        "GET",
        "list_checkpoints",
        _RUN + "/checkpoints",
        r.ListCheckpointsRequest,
        t.CheckpointsListResponse,
    ),
    _manage(
        "GET",
        "list_model_checkpoints",
        "/models/{training_run_id}/checkpoints",
        r.ListCheckpointsRequest,
        t.CheckpointsListResponse,
        until="0.3",
    ),
    _manage(
        "GET",
        "list_user_checkpoints",
        "/checkpoints",
        r.ListUserCheckpointsRequest,
        t.CheckpointsListResponse,
    ),
    _manage(
        "POST",
        "search_checkpoints",
        "/checkpoints/search",
        r.CheckpointSearchRequest,
        t.CheckpointSearchResponse,
    ),
    _manage(
        "POST",
        "external_weights_upload_start",
        "/external_weights_upload_start",
        r.ExternalWeightsUploadStartRequest,
        t.ExternalWeightsUploadStartResponse,
    ),
    _manage(
        "POST",
        "external_weights_upload_finish",
        "/external_weights_upload_finish",
        r.ExternalWeightsUploadFinishRequest,
        t.ExternalWeightsUploadFinishResponse,
        timeout_s=600.0,
    ),
    _manage(
        "GET",
        "get_external_weights_urls",
        _CHECKPOINT + "/external_weights_urls",
        r.CheckpointRequest,
        t.ExternalWeightsUrlsResponse,
    ),
    _manage(
        "GET",
        "get_checkpoint_archive_url",
        _CHECKPOINT + "/archive",
        r.CheckpointRequest,
        t.CheckpointArchiveUrlResponse,
        until="0.35",
    ),
    _manage("POST", "publish_checkpoint", _CHECKPOINT + "/publish", r.CheckpointRequest),
    _manage("DELETE", "unpublish_checkpoint", _CHECKPOINT + "/publish", r.CheckpointRequest),
    _manage("PUT", "set_checkpoint_ttl", _CHECKPOINT + "/ttl", r.SetCheckpointTtlRequest),
    # After the endpoints with a suffix, which would otherwise match as part of the name.
    _manage("DELETE", "delete_checkpoint", _CHECKPOINT, r.CheckpointRequest),
    _manage(
        "POST",
        "copy_weights",
        "/copy_weights",
        r.CopyWeightsRequest,
        t.CopyWeightsResponse,
        header_fields={"weights_access_token": "X-Tinker-Weights-Access-Token"},
    ),
]

_USAGE = [
    _manage(
        "GET",
        "get_billing_usage",
        "/billing/usage/events",
        r.GetBillingUsageRequest,
        t.BillingUsageResponse,
    ),
    _manage(
        "GET",
        "get_current_checkpoint_storage_usage",
        "/billing/usage/checkpoints/current",
        r.GetCurrentCheckpointStorageUsageRequest,
        t.CurrentCheckpointStorageUsageResponse,
    ),
    _manage(
        "GET",
        "get_audit_log",
        "/audit",
        r.GetAuditLogRequest,
        t.AuditLogResponse,
        follows_redirects=True,
    ),
]

ENDPOINTS: dict[str, Endpoint] = {
    endpoint.name: endpoint
    for endpoint in [
        *_START,
        *_SESSIONS,
        *_TRAINING,
        *_SAMPLING,
        *_FUTURES,
        *_EXTENSIONS,
        *_RUNS,
        *_USAGE,
    ]
}
"""All endpoints by name, in the order in which a router must try them."""
