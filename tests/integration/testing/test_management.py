"""Sessions, runs and checkpoints as the management calls see them."""

from __future__ import annotations

import datetime
import json
import struct
import tarfile
import urllib.request
from io import BytesIO
from typing import Any

from tests.integration.testing.caller import TIMEOUT_S, Caller, asample, calling, forward_backward
from tinsmith import types as t
from tinsmith.types import requests as r


def saved(caller: Caller, model_id: str, name: str, seq_id: int, **fields: Any) -> str:
    request = r.SaveWeightsRequest(model_id=model_id, path=name, seq_id=seq_id, **fields)
    path: str = caller.do("save_weights", request).path
    return path


def named(path: str) -> dict[str, str]:
    parsed = t.ParsedCheckpointTinkerPath.from_tinker_path(path)
    return {"training_run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}


def listed(caller: Caller) -> list[t.Checkpoint]:
    found: t.CheckpointsListResponse = caller.ask(
        "list_user_checkpoints", r.ListUserCheckpointsRequest()
    )
    return found.checkpoints


def test_checkpoint_is_published_given_a_time_to_live_and_deleted_by_its_listed_id() -> None:
    with calling() as caller:
        path = saved(caller, caller.new_model(), "c1", 1, user_metadata={"k": "v"})
        checkpoint = r.CheckpointRequest(**named(path))
        assert path == "tinker://session-0:train:0/weights/c1"

        caller.ask("publish_checkpoint", checkpoint)
        caller.ask("set_checkpoint_ttl", r.SetCheckpointTtlRequest(**named(path), ttl_seconds=3600))
        shown = listed(caller)[0]
        assert (shown.public, shown.user_metadata) == (True, {"k": "v"})
        assert shown.expires_at is not None and shown.expires_at.tzinfo is not None
        caller.ask("unpublish_checkpoint", checkpoint)
        forever = r.SetCheckpointTtlRequest(**named(path), ttl_seconds=None)
        caller.ask("set_checkpoint_ttl", forever)
        assert (listed(caller)[0].public, listed(caller)[0].expires_at) == (False, None)
        caller.ask("delete_checkpoint", checkpoint)

        assert listed(caller) == []
        assert caller.call("delete_checkpoint", checkpoint).status == 404


def test_time_to_live_out_of_range_is_refused() -> None:
    with calling() as caller:
        path = saved(caller, caller.new_model(), "c1", 1)
        request = r.SetCheckpointTtlRequest(**named(path), ttl_seconds=60)

        assert caller.call("set_checkpoint_ttl", request).status == 400


def test_name_is_taken_until_it_is_overwritten() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        saved(caller, model_id, "c1", 1)
        again = r.SaveWeightsRequest(model_id=model_id, path="c1", seq_id=2)

        submitted = caller.ask("save_weights", again)

        assert "exists" in caller.poll(submitted.request_id).plain["error"]
        saved(caller, model_id, "c1", 3, overwrite=True)


def test_runs_and_checkpoints_are_listed_newest_first_in_pages() -> None:
    with calling() as caller:
        session_id = caller.new_session()
        models = [caller.new_model(session_id, number) for number in range(3)]
        paths = [saved(caller, model_id, "c1", 1) for model_id in models]

        page = caller.ask("list_training_runs", r.ListTrainingRunsRequest(limit=2, offset=1))

        assert [run.training_run_id for run in page.training_runs] == [models[1], models[0]]
        assert page.cursor == t.Cursor(offset=1, limit=2, total_count=3)
        assert page.training_runs[0].last_checkpoint.tinker_path == paths[1]
        assert [checkpoint.tinker_path for checkpoint in listed(caller)] == paths[::-1]


def test_exported_files_are_fetched_without_a_key_and_in_parts() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        save = r.SaveWeightsExternalRequest(model_id=model_id, path="e1", seq_id=1)
        path = caller.do("save_weights_external", save).path

        urls = caller.ask("get_external_weights_urls", r.CheckpointRequest(**named(path))).urls

        url = urls["adapter_model.safetensors"]
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            whole = reply.read()
        rest = urllib.request.Request(url, headers={"Range": "bytes=10-"})
        with urllib.request.urlopen(rest, timeout=TIMEOUT_S) as reply:
            assert (reply.status, reply.read()) == (206, whole[10:])
        (header_bytes,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + header_bytes])
        assert header["lora_A.weight"]["data_offsets"][1] == len(whole) - 8 - header_bytes


def test_archive_is_a_tar_of_the_adapter() -> None:
    with calling() as caller:
        path = saved(caller, caller.new_model(), "c1", 1)

        url = caller.ask("get_checkpoint_archive_url", r.CheckpointRequest(**named(path))).url

        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            content = reply.read()
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            assert "adapter_config.json" in archive.getnames()


def test_copy_is_made_once_for_each_key() -> None:
    with calling() as caller:
        path = saved(caller, caller.new_model(), "c1", 1)
        request = r.CopyWeightsRequest(source_path=path, destination_project_id="p2")

        first, second = (
            caller.ask("copy_weights", request, X_Idempotency_Key="k").tinker_path for _ in range(2)
        )

        assert first == second != path
        info = r.WeightsInfoRequest(tinker_path=first)
        assert caller.ask("get_weights_info_by_tinker_path", info).lora_rank == 8


def test_session_is_made_once_for_each_idempotency_key() -> None:
    with calling() as caller:
        request = r.CreateSessionRequest(tags=[], sdk_version="0.36.0")
        made = [
            caller.ask("create_session", request, X_Idempotency_Key=key).session_id
            for key in ("a", "a", "b")
        ]

        assert made == ["session-0", "session-0", "session-1"]


def test_finished_session_takes_no_more_work_and_its_first_reason_stays() -> None:
    with calling() as caller:
        session_id = caller.new_session()
        model_id, sampler_id = caller.new_model(session_id), caller.new_sampler(session_id)
        for reason in (t.ClientSessionFinishErrored(), t.ClientSessionFinishSuccess()):
            finish = r.FinishSessionRequest(session_id=session_id, reason=reason, detail="d")
            caller.ask("finish_session", finish)

        beat = caller.call("session_heartbeat", r.SessionHeartbeatRequest(session_id=session_id))
        refused = [
            caller.call("forward_backward", forward_backward(model_id, 1)).status,
            caller.call("asample", asample(sampler_id, 0)).status,
        ]

        assert (beat.status, refused) == (410, [400, 400])
        found = caller.ask("search_sessions", r.SessionSearchRequest()).sessions[0]
        assert found.status == t.ClientSessionFinished(
            reason=t.ClientSessionFinishErrored(), detail="d"
        )


def test_session_ends_without_heartbeats_and_when_cancelled() -> None:
    with calling(session_lifetime_s=0.0) as caller:
        beat = r.SessionHeartbeatRequest(session_id=caller.new_session())
        assert caller.call("session_heartbeat", beat).status == 410
    with calling() as caller:
        session_id = caller.new_session()
        caller.service.sessions.cancel(session_id, "by an operator")
        beat = r.SessionHeartbeatRequest(session_id=session_id)
        assert caller.call("session_heartbeat", beat).status == 410


def test_sessions_are_searched_by_words_metadata_and_state_in_pages() -> None:
    with calling() as caller:
        for name, kind in [("Run one", "a"), ("run two", "a"), ("other", "b")]:
            caller.new_session(display_name=name, user_metadata={"kind": kind, "n": 1})

        def found(**fields: Any) -> list[str]:
            request = r.SessionSearchRequest(**fields)
            answer: t.SessionSearchResponse = caller.ask("search_sessions", request)
            return [session.session_id for session in answer.sessions]

        assert found() == ["session-2", "session-1", "session-0"]
        assert found(display_name="RUN") == ["session-1", "session-0"]
        assert found(display_name="run two", session_id="session-2") == ["session-2", "session-1"]
        assert found(user_metadata={"kind": "b", "n": "1"}) == ["session-2"]
        assert found(statuses=[t.FailedSessionStatusQuery()]) == []
        first = caller.ask("search_sessions", r.SessionSearchRequest(limit=2))
        assert found(cursor=first.next_cursor) == ["session-0"]


def test_usage_and_audit_tell_what_was_done() -> None:
    with calling() as caller:
        session_id = caller.new_session()
        model_id = caller.new_model(session_id)
        caller.do("forward_backward", forward_backward(model_id, 1))
        path = saved(caller, model_id, "c1", 2)
        caller.do("asample", asample(caller.new_sampler(session_id), 0))
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)

        window = r.GetBillingUsageRequest(starting_on=now - day, ending_before=now + day)
        usage = caller.ask("get_billing_usage", window)
        audit = caller.ask("get_audit_log", r.GetAuditLogRequest(event_type="checkpoints"))

        kinds = {event.event_info.type: event.event_info for event in usage.data}
        assert kinds["training"].token_count == 3
        assert kinds["sampling_sample"].token_count == 4
        assert list(usage.sessions) == [session_id]
        assert [(e.event, e.tinker_path) for e in audit.entries] == [("checkpoint.created", path)]
