"""Answers for the loopback server: a service without a model, whose numbers can be told ahead.

Training gives each target token `t` the logprob `-t / 8`; sampling repeats the prompt's tokens
plus one. Nothing is learned and nothing is kept beyond one process.
"""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

import numpy as np

from tinsmith import types as t
from tinsmith.errors import NotFoundError, RequestErrorCategory
from tinsmith.wire.endpoint_types import Answer, Endpoint

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
LARGE_RESULT_BYTES = 12345


def _segment(claims: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()


JWT = ".".join(
    [
        _segment({"alg": "none"}),
        _segment({"sub": "user-1", "org_id": "org-1", "email": "me@x", "exp": 4_000_000_000}),
        "unsigned",
    ]
)
"""Clients read its claims and never check its signature."""


class SmallService:
    """One session's worth of state: what was asked, and the results that wait to be fetched."""

    def __init__(
        self,
        flags: t.ClientConfigResponse | None = None,
        dynamic: t.ClientDynamicConfigResponse | None = None,
    ) -> None:
        self._flags = flags or t.ClientConfigResponse()
        self._dynamic = dynamic or t.ClientDynamicConfigResponse()
        self._results: dict[str, Any] = {}
        self._finished: list[t.FutureCompletion] = []
        self._polls: dict[str, int] = {}

    def __call__(self, endpoint: Endpoint, request: Any) -> Any:
        answer = getattr(self, f"on_{endpoint.name}")(request)
        return self._submitted(endpoint, request, answer) if _is_work(endpoint) else answer

    def _submitted(self, endpoint: Endpoint, request: Any, result: Any) -> t.UntypedAPIFuture:
        request_id = f"req-{len(self._results)}"
        self._results[request_id] = result
        if endpoint.name != "asample":
            return t.UntypedAPIFuture(request_id=request_id)
        self._finished.append(t.FutureFinished(request_id=request_id))
        names = [f"{request_id}-s{index}" for index in range(request.num_samples)]
        return t.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=names)

    # Futures

    def on_retrieve_future(self, request: Any) -> Any:
        """A step is pending once, a sample shows its size first, the rest is there at once."""
        if request.request_id not in self._results:
            raise NotFoundError(f"no request {request.request_id}")
        result = self._results[request.request_id]
        polls = self._polls[request.request_id] = self._polls.get(request.request_id, 0) + 1
        if isinstance(result, t.OptimStepResponse) and polls == 1:
            return t.TryAgainResponse(
                request_id=request.request_id,
                queue_state="paused_capacity",
                queue_state_reason="warming up",
            )
        if isinstance(result, t.SampleResponse) and request.allow_metadata_only:
            return t.MetadataOnlyResponse(response_payload_size=LARGE_RESULT_BYTES)
        return result

    def on_retrieve_futures(self, request: Any) -> Any:
        news = self._finished[request.prev_cursor :]
        return t.FuturesRetrieveResponse(completions=news, cursor=len(self._finished))

    def on_cancel_future(self, _: Any) -> None:
        """Nothing to do: it is done already."""

    # Start and sessions

    def on_client_config(self, _: Any) -> Any:
        return self._flags

    def on_client_dynamic_config(self, _: Any) -> Any:
        return self._dynamic

    def on_auth_token(self, _: Any) -> Any:
        return t.AuthTokenResponse(jwt=JWT)

    def on_get_server_capabilities(self, _: Any) -> Any:
        model = t.SupportedModel(model_name="small/model", max_context_length=4096, trainable=True)
        return t.GetServerCapabilitiesResponse(supported_models=[model])

    def on_create_session(self, _: Any) -> Any:
        return t.CreateSessionResponse(session_id="sess-1", info_message="welcome")

    def on_session_heartbeat(self, _: Any) -> Any:
        return t.SessionHeartbeatResponse()

    def on_finish_session(self, _: Any) -> None:
        """Noted by the recorder."""

    def on_get_session(self, _: Any) -> Any:
        return t.GetSessionResponse(
            training_run_ids=["sess-1:train:0"], sampler_ids=[], user_metadata={"a": "b"}
        )

    def on_list_sessions(self, _: Any) -> Any:
        return t.ListSessionsResponse(sessions=["sess-1"])

    def on_search_sessions(self, _: Any) -> Any:
        reason = t.SessionFailedRequestReason(request_id="req-1", request_type="OptimStep")
        statuses: list[t.SessionStatus | None] = [
            None,
            t.SessionActive(),
            t.SessionCancelled(detail="by hand"),
            t.ClientSessionFinished(reason=t.ClientSessionFinishInterrupted()),
            t.SessionFailed(category="user", reason=reason, message="too long"),
        ]
        found = [
            t.SessionSummary(
                session_id=f"sess-{index}",
                created_at=NOW,
                owner="me",
                project_id="p",
                checkpoints_count=index,
                status=status,
            )
            for index, status in enumerate(statuses)
        ]
        cursor = t.SessionSearchCursor(last_created_at=NOW, last_session_id="sess-4")
        return t.SessionSearchResponse(sessions=found, next_cursor=cursor)

    def on_assign_session_project(self, _: Any) -> None:
        """Noted by the recorder."""

    def on_export_session_trace(self, _: Any) -> Any:
        return t.TraceExportResponse(status="ready", url="https://example.invalid/trace")

    # Training

    def on_create_model(self, request: Any) -> Any:
        return t.CreateModelResponse(model_id=f"{request.session_id}:train:{request.model_seq_id}")

    def on_forward_backward(self, request: Any) -> Any:
        outputs = [_logprobs(datum) for datum in request.forward_backward_input.data]
        total = -sum(float(output["logprobs"].to_numpy().sum()) for output in outputs)
        metrics = {"loss:sum": total, "rows:max": float(len(outputs)), "nan:mean": float("nan")}
        return t.ForwardBackwardOutput("ArrayRecord", outputs, metrics)

    on_forward = on_forward_backward  # the route of SDK 0.24 and older

    def on_optim_step(self, request: Any) -> Any:
        if request.optim_params.learning_rate < 0:
            return t.RequestFailedResponse(
                error="learning_rate must not be negative", category=RequestErrorCategory.User
            )
        return t.OptimStepResponse(metrics={"grad_norm": request.optim_params.learning_rate})

    def on_create_custom_loss(self, request: Any) -> Any:
        return t.CreateCustomLossResponse(loss_id=f"loss-{request.custom_loss_seq_id}")

    def on_get_info(self, request: Any) -> Any:
        return t.GetInfoResponse(
            model_id=request.model_id,
            model_data=t.ModelData(model_name="small/model"),
            is_lora=True,
            lora_rank=8,
        )

    # Saving and loading

    def on_save_weights(self, request: Any) -> Any:
        return t.SaveWeightsResponse(path=f"tinker://{request.model_id}/weights/{request.path}")

    def on_save_weights_for_sampler(self, request: Any) -> Any:
        if request.path is None:
            number = request.sampling_session_seq_id
            return t.SaveWeightsForSamplerResponseInternal(sampling_session_id=f"s:sample:{number}")
        path = f"tinker://{request.model_id}/sampler_weights/{request.path}"
        return t.SaveWeightsForSamplerResponseInternal(path=path)

    def on_save_weights_external(self, request: Any) -> Any:
        path = f"tinker://{request.model_id}/external_weights/{request.path}"
        return t.SaveWeightsExternalResponseInternal(path=path, size_bytes=99)

    def on_load_weights(self, request: Any) -> Any:
        return t.LoadWeightsResponse(path=request.path, model_id=request.model_id)

    def on_get_weights_info_by_tinker_path(self, _: Any) -> Any:
        return t.WeightsInfoResponse(base_model="small/model", is_lora=True, lora_rank=8)

    def on_copy_weights(self, request: Any) -> Any:
        return t.CopyWeightsResponse(tinker_path=request.source_path.replace("sess-1", "copy-1"))

    # Sampling

    def on_create_sampling_session(self, request: Any) -> Any:
        number = request.sampling_session_seq_id
        return t.CreateSamplingSessionResponse(sampling_session_id=f"s:sample:{number}")

    def on_join_sampling_session(self, _: Any) -> Any:
        return t.JoinSamplingSessionResponse(client_counter=7)

    def on_get_sampler(self, request: Any) -> Any:
        return t.GetSamplerResponse(sampler_id=request.sampler_id, base_model="small/model")

    def on_asample(self, request: Any) -> Any:
        """The prompt's text tokens, each plus one, cut at `max_tokens`."""
        prompt = [
            token
            for chunk in request.prompt.chunks
            if isinstance(chunk, t.EncodedTextChunk)
            for token in chunk.tokens
        ]
        tokens = [token + 1 for token in prompt][: request.sampling_params.max_tokens]
        rows = len(tokens)
        sequence = t.SampledSequence(
            "length",
            tokens=tokens,
            logprobs=[-token / 4 for token in tokens],
            topk_logprobs_np=_topk(rows, request.topk_sample_logprobs),
        )
        asked = request.target_prompt_logprobs
        k = request.prompt_alt_tokens_k
        return t.SampleResponse(
            [sequence] * request.num_samples,
            prompt_logprobs=_prompt_logprobs(request, prompt),
            topk_prompt_logprobs_np=_topk(len(prompt), request.topk_prompt_logprobs),
            target_prompt_logprobs=None if asked is None else _as_floats(asked),
            prompt_cache_hit_tokens=2,
            prompt_alt_tokens=_alt_tokens(len(prompt) - 1, k) if k else None,
        )

    # Management

    def on_list_training_runs(self, request: Any) -> Any:
        return t.TrainingRunsResponse(
            training_runs=[_a_run("sess-1:train:0")],
            cursor=t.Cursor(offset=request.offset, limit=request.limit, total_count=1),
        )

    def on_get_training_run(self, request: Any) -> Any:
        if request.training_run_id == "nobody:train:0":
            raise NotFoundError("no such run")
        return _a_run(request.training_run_id)

    def on_list_checkpoints(self, request: Any) -> Any:
        return t.CheckpointsListResponse(checkpoints=[_a_checkpoint(request.training_run_id)])

    on_list_model_checkpoints = on_list_checkpoints  # the route of SDK 0.3

    def on_list_user_checkpoints(self, request: Any) -> Any:
        return t.CheckpointsListResponse(
            checkpoints=[_a_checkpoint("sess-1:train:0")],
            cursor=t.Cursor(offset=request.offset, limit=request.limit, total_count=1),
        )

    def on_get_external_weights_urls(self, _: Any) -> Any:
        urls = {"adapter_config.json": "https://example.invalid/a"}
        return t.ExternalWeightsUrlsResponse(urls=urls, expires=NOW)

    def on_delete_checkpoint(self, _: Any) -> None:
        """Noted by the recorder, as are the next three."""

    on_publish_checkpoint = on_delete_checkpoint
    on_unpublish_checkpoint = on_delete_checkpoint
    on_set_checkpoint_ttl = on_delete_checkpoint

    def on_get_audit_log(self, _: Any) -> Any:
        entry = t.AuditLogEntry(timestamp=NOW, event="saved", event_details={"size": None})
        return t.AuditLogResponse(entries=[entry])

    def on_get_billing_usage(self, _: Any) -> Any:
        kinds: list[t.BillingEventInfo] = [
            t.TrainingBillingEvent(token_count=1),
            t.SamplingPrefillBillingEvent(cached=True, token_count=2),
            t.SamplingSampleBillingEvent(token_count=3),
            t.CheckpointBillingEvent(count=4),
            t.StorageBillingEvent(gigabyte_hours=0.5),
        ]
        events = [
            t.BillingUsageEvent(bucket_start=NOW, bucket_end=NOW, event_info=k) for k in kinds
        ]
        sessions = {"sess-1": t.BillingUsageSession(user_metadata={"a": "b"})}
        return t.BillingUsageResponse(data=events, sessions=sessions)

    def on_get_current_checkpoint_storage_usage(self, _: Any) -> Any:
        item = t.CurrentCheckpointStorageUsageItem(
            checkpoint_count=1, size_bytes=2, size_gigabytes=2e-9
        )
        return t.CurrentCheckpointStorageUsageResponse(data=[item])

    def on_telemetry(self, _: Any) -> Any:
        return t.TelemetryResponse(status="accepted")


def _is_work(endpoint: Endpoint) -> bool:
    return endpoint.answer is Answer.FUTURE


def _logprobs(datum: t.Datum) -> dict[str, t.TensorData]:
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    return {"logprobs": t.TensorData.from_numpy((targets / -8).astype("float32"))}


def _prompt_logprobs(request: Any, prompt: list[int]) -> list[float | None] | None:
    if not request.prompt_logprobs:
        return None
    known = request.prompt_logprobs_last_n or len(prompt) - 1
    return [
        -token / 2 if index and index >= len(prompt) - known else None
        for index, token in enumerate(prompt)
    ]


def _topk(rows: int, k: int) -> t.TopkLogprobs | None:
    """Rows that get shorter: the first is full, the last has its first cell alone."""
    if not k or not rows:
        return None
    ids, logprobs = np.zeros((rows, k), "int32"), np.full((rows, k), -99999.0, "float32")
    for row in range(rows):
        used = max(1, k - row)
        ids[row, :used], logprobs[row, :used] = np.arange(1, used + 1), -0.5
    return t.TopkLogprobs(ids, logprobs)


def _as_floats(asked: t.TensorData) -> t.TensorData:
    """The asked token ids over minus eight, in the layout in which they were asked."""
    return t.TensorData(
        [number / -8 for number in asked.data],
        "float32",
        asked.shape,
        asked.sparse_crow_indices,
        asked.sparse_col_indices,
    )


def _alt_tokens(rows: int, k: int) -> t.PromptAltTokens:
    ids = np.arange(rows * k, dtype="int64").reshape(rows, k)
    logprobs = t.TensorData.from_numpy((ids / -8).astype("float32"))
    return t.PromptAltTokens(t.TensorData.from_numpy(ids), logprobs)


def _a_checkpoint(run_id: str) -> t.Checkpoint:
    return t.Checkpoint(
        checkpoint_id="weights/c1",
        checkpoint_type="training",
        time=NOW,
        tinker_path=f"tinker://{run_id}/weights/c1",
        size_bytes=5,
        user_metadata={"k": "v"},
        expires_at=NOW,
    )


def _a_run(run_id: str) -> t.TrainingRun:
    return t.TrainingRun(
        training_run_id=run_id,
        base_model="small/model",
        model_owner="me",
        is_lora=True,
        lora_rank=8,
        last_request_time=NOW,
        last_checkpoint=_a_checkpoint(run_id),
    )
