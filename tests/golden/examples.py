"""For each route the smallest request and one with every field set; and prompts of every kind.

`record_requests.py` writes what they look like on the wire into `requests.txt` and `prompts.txt`.
"""

from __future__ import annotations

import datetime
from typing import Any

from tinsmith import types as t
from tinsmith.types import extensions as x

HOUR = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
RUN = "sess-1:train:0"
NAMED: dict[str, Any] = {"training_run_id": RUN, "checkpoint_id": "weights/c1"}
EMPTY = t.EmptyRequest()

TEXT = t.EncodedTextChunk([1, -2147483648, 2147483647])
IMAGE = t.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
POINTER = t.ImageAssetPointerChunk(format="jpeg", location="gs://bücket/x", expected_tokens=3)
AUDIO = t.DmelChunk(dmel=b"\x00\x01\x02")

PROMPTS: dict[str, t.ModelInput] = {
    "empty": t.ModelInput.empty(),
    "text": t.ModelInput.from_ints([1, 2, 3]),
    "text-edges": t.ModelInput([TEXT]),
    "text-empty": t.ModelInput([t.EncodedTextChunk([])]),
    "text-appended": t.ModelInput.from_ints([1]).append_int(2),
    "image": t.ModelInput([IMAGE]),
    "image-bare": t.ModelInput([t.ImageChunk(data=b"", format="jpeg")]),
    "pointer": t.ModelInput([POINTER]),
    "pointer-bare": t.ModelInput([t.ImageAssetPointerChunk(format="png", location="x")]),
    "audio": t.ModelInput([AUDIO]),
    "mix": t.ModelInput([TEXT, IMAGE, AUDIO, POINTER, TEXT]),
}

_EVENT: dict[str, Any] = {
    "event_id": "e",
    "event_session_index": 1,
    "severity": "INFO",
    "timestamp": HOUR,
}
_DATUM = t.Datum(
    t.ModelInput([TEXT, IMAGE, AUDIO]),
    {
        "target_tokens": t.TensorData([1, 2], "int64", [2]),
        "weights": t.TensorData([0.5], "float32", [2, 3], [0, 0, 1], [2]),
    },
)
_SMALL_INPUT = t.ForwardBackwardInput([], "cross_entropy")
_FULL_INPUT = t.ForwardBackwardInput([_DATUM], "ppo", {"beta": 0.5, "loss_id": "x"})
_GRAPH = t.CustomLossGraph(
    nodes=[
        t.CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
        t.CustomLossNode(
            op="call_method",
            name="sum_1",
            target="sum",
            args=[{"ref": "logprobs"}, None],
            kwargs={"dim": None},
        ),
    ]
)

MINIMAL: dict[str, Any] = {
    "client_config": t.ClientConfigRequest(sdk_version="0.36.0"),
    "client_dynamic_config": t.ClientConfigRequest(sdk_version="0.36.0"),
    "auth_token": t.AuthTokenRequest(),
    "healthz": EMPTY,
    "get_server_capabilities": EMPTY,
    "get_api_key": EMPTY,
    "delete_api_key": EMPTY,
    "telemetry": t.TelemetrySendRequest(
        events=[], platform="p", sdk_version="v", session_id="s", process_uuid="u"
    ),
    "create_session": t.CreateSessionRequest(tags=[], user_metadata={}, sdk_version="v"),
    "session_heartbeat": t.SessionHeartbeatRequest(session_id="s"),
    "finish_session": t.FinishSessionRequest(session_id="s", reason=t.ClientSessionFinishSuccess()),
    "list_sessions": t.ListSessionsRequest(),
    "search_sessions": t.SessionSearchRequest(),
    "search_checkpoints": t.CheckpointSearchRequest(),
    "external_weights_upload_start": t.ExternalWeightsUploadStartRequest(
        base_model="m", lora_config=t.LoraConfig(rank=8)
    ),
    "external_weights_upload_finish": t.ExternalWeightsUploadFinishRequest(upload_id="u"),
    "get_session": t.GetSessionRequest(session_id="s"),
    "assign_session_project": t.AssignSessionProjectRequest(session_id="s", project_id="p"),
    "export_session_trace": t.ExportSessionTraceRequest(session_id="s"),
    "create_model": t.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b"),
    "unload_model": t.UnloadModelRequest(model_id=RUN),
    "forward_backward": t.ForwardBackwardRequest(_SMALL_INPUT, RUN),
    "forward": t.ForwardRequest(_SMALL_INPUT, RUN),
    "optim_step": t.OptimStepRequest(model_id=RUN, optim_params=t.AdamParams()),
    "save_weights": t.SaveWeightsRequest(model_id=RUN),
    "save_weights_for_sampler": t.SaveWeightsForSamplerRequest(model_id=RUN),
    "save_weights_external": t.SaveWeightsExternalRequest(model_id=RUN, path="e1"),
    "load_weights": t.LoadWeightsRequest(path="tinker://r/weights/c", optimizer=True),
    "create_custom_loss": t.CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name="f", inputs=[], graph=t.CustomLossGraph(nodes=[])
    ),
    "get_info": t.GetInfoRequest(model_id=RUN),
    "get_weights_info_by_tinker_path": t.WeightsInfoRequest(tinker_path="tinker://r/weights/c"),
    "create_sampling_session": t.CreateSamplingSessionRequest(
        session_id="s", sampling_session_seq_id=0
    ),
    "join_sampling_session": t.JoinSamplingSessionRequest(sampling_session_id="s"),
    "get_sampler": t.GetSamplerRequest(sampler_id="s:sample:0"),
    "asample": t.SampleRequest(
        prompt=t.ModelInput.from_ints([1]), sampling_params=t.SamplingParams()
    ),
    "retrieve_future": t.FutureRetrieveRequest(request_id="r"),
    "retrieve_futures": t.FuturesRetrieveRequest(
        target=t.SamplingSessionFuturesTarget(sampling_session_id="s")
    ),
    "cancel_future": t.FutureCancelRequest(request_id="r"),
    "asample_many": x.SampleManyRequest(samples=[{"seq_id": 1}]),
    "retrieve_results": x.ResultsRetrieveRequest(
        target=t.SamplingSessionFuturesTarget(sampling_session_id="s"), inline_bytes=65536
    ),
    "fetch_results": x.ResultsFetchRequest(request_ids=["r"]),
    "asample_stream": t.SampleRequest(
        prompt=t.ModelInput.from_ints([1]), sampling_params=t.SamplingParams()
    ),
    "list_replicas": EMPTY,
    "drain_replica": x.ReplicaRequest(name="r-0"),
    "resume_replica": x.ReplicaRequest(name="r-0"),
    "list_training_runs": t.ListTrainingRunsRequest(),
    "get_training_run": t.GetTrainingRunRequest(training_run_id=RUN),
    "list_checkpoints": t.ListCheckpointsRequest(training_run_id=RUN),
    "list_model_checkpoints": t.ListCheckpointsRequest(training_run_id=RUN),
    "list_user_checkpoints": t.ListUserCheckpointsRequest(),
    "get_external_weights_urls": t.CheckpointRequest(**NAMED),
    "get_checkpoint_archive_url": t.CheckpointRequest(**NAMED),
    "publish_checkpoint": t.CheckpointRequest(**NAMED),
    "unpublish_checkpoint": t.CheckpointRequest(**NAMED),
    "set_checkpoint_ttl": t.SetCheckpointTtlRequest(**NAMED),
    "delete_checkpoint": t.CheckpointRequest(**NAMED),
    "copy_weights": t.CopyWeightsRequest(source_path="tinker://r/weights/c"),
    "get_billing_usage": t.GetBillingUsageRequest(starting_on=HOUR, ending_before=HOUR),
    "get_current_checkpoint_storage_usage": t.GetCurrentCheckpointStorageUsageRequest(),
    "get_audit_log": t.GetAuditLogRequest(),
}
"""By endpoint, with required fields alone."""

FULL: dict[str, Any] = {
    "telemetry": t.TelemetrySendRequest(
        events=[
            t.SessionStartEvent(**_EVENT),
            t.SessionEndEvent(**_EVENT, duration="0:01"),
            t.UnhandledExceptionEvent(**_EVENT, error_type="E", error_message="m", traceback="t"),
            t.GenericEvent(**_EVENT, event_name="n", event_data={"a": None}),
        ],
        platform="p",
        sdk_version="v",
        session_id="s",
        process_uuid="u",
    ),
    "create_session": t.CreateSessionRequest(
        tags=["a", "ß"],
        user_metadata={"k": None, "n": [1, {"x": 0.5}]},
        sdk_version="v",
        project_id="p",
        display_name="d",
    ),
    "finish_session": t.FinishSessionRequest(
        session_id="s", reason=t.ClientSessionFinishErrored(), detail="why"
    ),
    "list_sessions": t.ListSessionsRequest(limit=1, offset=2, access_scope="accessible"),
    "search_checkpoints": t.CheckpointSearchRequest(
        project_ids=["p"],
        user_metadata={"k": "v"},
        checkpoint_type="external",
        owner=t.UserSearchOwner(owner_urns=["u"]),
        base_models=["m"],
        limit=200,
        cursor=t.CheckpointSearchCursor(last_created_at=HOUR, last_checkpoint_uuid="c"),
    ),
    "external_weights_upload_start": t.ExternalWeightsUploadStartRequest(
        base_model="m",
        lora_config=t.LoraConfig(rank=8, seed=1),
        destination_project_id="p",
        user_metadata={"k": "v"},
    ),
    "search_sessions": t.SessionSearchRequest(
        session_id="s",
        project_ids=["p"],
        user_metadata={"k": "v"},
        display_name="d",
        owner=t.UserSearchOwner(owner_urns=["u"]),
        statuses=[
            t.ActiveSessionStatusQuery(),
            t.CancelledSessionStatusQuery(),
            t.FailedSessionStatusQuery(),
            t.ClientFinishedSessionStatusQuery(reasons=["success", "errored"]),
        ],
        limit=200,
        cursor=t.SessionSearchCursor(last_created_at=HOUR, last_session_id="s"),
    ),
    "get_session": t.GetSessionRequest(session_id="s", access_scope="accessible"),
    "create_model": t.CreateModelRequest(
        session_id="s",
        model_seq_id=1,
        base_model="b",
        user_metadata={"k": None},
        lora_config=t.LoraConfig(rank=8, seed=3, train_unembed=False, train_mlp=False),
        optimizer_config=t.DimuonOptimizerConfig(),
    ),
    "forward_backward": t.ForwardBackwardRequest(_FULL_INPUT, RUN, 2147483647, forward_only=True),
    "forward": t.ForwardRequest(_FULL_INPUT, RUN, 3),
    "optim_step": t.OptimStepRequest(
        model_id=RUN, seq_id=4, optim_params=t.DimuonParams(learning_rate=0.5)
    ),
    "save_weights": t.SaveWeightsRequest(
        model_id=RUN,
        path="c1",
        seq_id=5,
        ttl_seconds=3600,
        overwrite=True,
        user_metadata={"k": "v"},
    ),
    "save_weights_for_sampler": t.SaveWeightsForSamplerRequest(
        model_id=RUN,
        path="s1",
        sampling_session_seq_id=0,
        seq_id=6,
        ttl_seconds=3600,
        user_metadata={"k": "v"},
    ),
    "save_weights_external": t.SaveWeightsExternalRequest(
        model_id=RUN,
        path="e1",
        seq_id=7,
        ttl_seconds=3600,
        age_encryption_recipients=["age1"],
        user_metadata={"k": "v"},
    ),
    "load_weights": t.LoadWeightsRequest(
        model_id=RUN,
        seq_id=1,
        session_id="s",
        model_seq_id=0,
        base_model="b",
        user_metadata={"k": "v"},
        path="tinker://r/weights/c",
        optimizer=True,
        optimizer_config=t.AdamOptimizerConfig(),
        weights_access_token="t",
    ),
    "create_custom_loss": t.CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=1,
        name="f",
        inputs=[t.CustomLossInput(name="logprobs", rank=1)],
        graph=_GRAPH,
    ),
    "create_sampling_session": t.CreateSamplingSessionRequest(
        session_id="s", sampling_session_seq_id=1, base_model="b", model_path="tinker://r/w/c"
    ),
    "asample": t.SampleRequest(
        num_samples=2,
        prompt=PROMPTS["mix"],
        sampling_params=t.SamplingParams(
            max_tokens=5, seed=2**64 - 1, stop=["x", "y"], temperature=0.5, top_k=10, top_p=0.9
        ),
        base_model="b",
        model_path="tinker://r/sampler_weights/s",
        sampling_session_id="s:sample:0",
        seq_id=999_999_999_000_000_001,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=t.TensorData([7], "int64", [2, 2], [0, 1, 1], [1]),
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=1,
        record_stability_info=True,
    ),
    "retrieve_future": t.FutureRetrieveRequest(request_id="r", allow_metadata_only=True),
    "retrieve_futures": t.FuturesRetrieveRequest(
        target=t.SamplingSessionFuturesTarget(sampling_session_id="s", cloned_sampler_id=7),
        prev_cursor=3,
        timeout=1.5,
        retrieved_request_ids=["r-1"],
    ),
    "retrieve_results": x.ResultsRetrieveRequest(
        target=t.SamplingSessionFuturesTarget(sampling_session_id="s", cloned_sampler_id=7),
        prev_cursor=3,
        timeout=1.5,
        retrieved_request_ids=["r-1"],
        inline_bytes=1,
        answer_bytes=2,
        linger_ms=3.0,
    ),
    "list_training_runs": t.ListTrainingRunsRequest(
        limit=1, offset=2, access_scope="accessible", project_id="p"
    ),
    "get_training_run": t.GetTrainingRunRequest(training_run_id=RUN, access_scope="accessible"),
    "list_user_checkpoints": t.ListUserCheckpointsRequest(limit=1, offset=2),
    "set_checkpoint_ttl": t.SetCheckpointTtlRequest(**NAMED, ttl_seconds=3600),
    "copy_weights": t.CopyWeightsRequest(
        session_id="s",
        model_seq_id=0,
        destination_project_id="p",
        source_path="tinker://r/weights/c",
        ttl_seconds=3600,
        weights_access_token="t",
    ),
    "get_current_checkpoint_storage_usage": t.GetCurrentCheckpointStorageUsageRequest(
        project_id="p"
    ),
    "get_audit_log": t.GetAuditLogRequest(event_type="teams", day=HOUR.date()),
}
"""By endpoint, with every field set; not those that have required fields alone."""
FULL["asample_stream"] = FULL["asample"]
