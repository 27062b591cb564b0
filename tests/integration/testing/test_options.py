"""The options of the test service that `docs/testing.md` lists."""

from __future__ import annotations

import datetime
import time
import urllib.request
from pathlib import Path

import pytest

from tests.integration.testing.caller import (
    Caller,
    asample,
    calling,
    forward_backward,
    optim_step,
)
from tests.numerics.small_models import VOCABULARY, make_model
from tinsmith.testing import running_service
from tinsmith.types import requests as r

DEADLINE_S = 60.0


def test_without_flags_no_extensions_are_announced() -> None:
    with calling() as caller:
        flags = caller.call("client_config", r.ClientConfigRequest(sdk_version="0.36.0"))
        model = caller.new_model()
        passed = caller.do("forward_backward", forward_backward(model, 1))
        stream = caller.call("asample_stream", asample(caller.new_sampler(), 0))

    assert flags.plain == {"use_pyqwest_transport": False}
    assert set(passed.metrics) == {"loss:sum"}
    assert stream.status == 404


def test_only_the_given_flags_are_announced() -> None:
    with calling(sample_use_retrieve_futures=True) as caller:
        flags = caller.call("client_config", r.ClientConfigRequest(sdk_version="0.36.0"))

    assert flags.plain == {"sample_use_retrieve_futures": True, "use_pyqwest_transport": False}


def test_a_result_expires() -> None:
    with calling(result_lifetime_s=0.2) as caller:
        asked = caller.ask("asample", asample(caller.new_sampler(), 0))
        assert caller.poll(asked.request_id).status == 200

        deadline = time.monotonic() + DEADLINE_S
        while (status := caller.poll(asked.request_id).status) != 410:
            assert time.monotonic() < deadline, status
            time.sleep(0.05)


def test_a_session_without_heartbeats_ends() -> None:
    with calling(session_lifetime_s=0.3) as caller:
        session_id = caller.new_session()
        beat = r.SessionHeartbeatRequest(session_id=session_id)

        deadline = time.monotonic() + DEADLINE_S
        time.sleep(1.0)
        while (status := caller.call("session_heartbeat", beat).status) != 410:
            assert time.monotonic() < deadline, status
            time.sleep(1.0)


def test_large_results_are_announced_by_their_size_if_the_poll_allows_it() -> None:
    with calling(inline_bytes=8) as caller:
        asked = caller.ask("asample", asample(caller.new_sampler(), 0))

        peeked = caller.poll(asked.request_id, metadata_only=True)
        whole = caller.poll(asked.request_id)

    assert peeked.plain["response_payload_size"] == len(whole.body)


def test_a_trace_is_ready_after_the_given_number_of_polls() -> None:
    with calling(trace_polls=2) as caller:
        request = r.ExportSessionTraceRequest(session_id=caller.new_session())
        told = [caller.ask("export_session_trace", request) for _ in range(3)]
        with urllib.request.urlopen(str(told[-1].url)) as trace:
            assert b"traceEvents" in trace.read()

    assert [one.status for one in told] == ["pending", "pending", "ready"]


def saved(caller: Caller) -> str:
    model = caller.new_model()
    request = r.SaveWeightsRequest(model_id=model, path="c1", seq_id=1)
    path: str = caller.do("save_weights", request).path
    return path


@pytest.mark.parametrize("in_parts", [True, False])
def test_archives_can_be_redirected_to_and_fetched_in_parts(in_parts: bool) -> None:
    with calling(archive_redirects=True, downloads_in_parts=in_parts) as caller:
        run, checkpoint = saved(caller).removeprefix("tinker://").split("/", 1)
        request = r.CheckpointRequest(training_run_id=run, checkpoint_id=checkpoint)
        reply = caller.call("get_checkpoint_archive_url", request)
        part = urllib.request.Request(reply.headers["location"], headers={"Range": "bytes=0-9"})
        with urllib.request.urlopen(part) as fetched:
            content = fetched.read()
            status = fetched.status

    assert reply.status == 302
    assert (status == 206, len(content) == 10) == (in_parts, in_parts)


def test_the_audit_log_can_be_redirected_to() -> None:
    with calling(audit_redirects=True) as caller:
        path = saved(caller)
        reply = caller.call("get_audit_log", r.GetAuditLogRequest(event_type="checkpoints"))
        with urllib.request.urlopen(reply.headers["location"]) as fetched:
            assert path.encode() in fetched.read()

    assert reply.status == 302


def test_other_keys_see_the_same_and_unknown_ones_nothing() -> None:
    with calling(further_api_keys=["tml-other"]) as caller:
        session_id = caller.new_session()
        request = r.ListSessionsRequest()
        statuses = [
            caller.call("list_sessions", request, X_API_Key=key).status
            for key in ("tml-other", "tml-nobody")
        ]
        listed = caller.ask("list_sessions", request, X_API_Key="tml-other")

    assert statuses == [200, 401]
    assert listed.sessions == [session_id]


def test_tokens_expire_and_can_be_revoked() -> None:
    with calling(pjwt_auth_enabled=True, token_lifetime_s=3600.0) as caller:
        token = caller.ask("auth_token", r.AuthTokenRequest()).jwt
        before = caller.call("list_sessions", r.ListSessionsRequest(), X_API_Key=token).status
        caller.service.account.revoke_tokens()
        after = caller.call("list_sessions", r.ListSessionsRequest(), X_API_Key=token).status
    with calling(pjwt_auth_enabled=True, token_lifetime_s=0.0) as caller:
        token = caller.ask("auth_token", r.AuthTokenRequest()).jwt
        late = caller.call("list_sessions", r.ListSessionsRequest(), X_API_Key=token).status

    assert (before, after, late) == (200, 401, 401)


def test_samples_are_as_long_and_of_such_tokens_as_the_options_say() -> None:
    with calling(vocabulary_size=50, max_tokens=5, eos_token=7) as caller:
        sampler = caller.new_sampler()
        free = asample(sampler, 0, params={"max_tokens": None})
        ended = asample(sampler, 1, num_samples=32, params={"stop": None, "max_tokens": 60})
        sequences = [caller.do("asample", one).sequences for one in (free, ended)]

    assert len(sequences[0][0].tokens) == 5
    assert all(token < 50 for sequence in sequences[1] for token in sequence.tokens)
    stopped = [one for one in sequences[1] if one.stop_reason == "stop"]
    assert stopped
    assert all(one.tokens[-1] == 7 for one in stopped)


def test_a_missing_seq_id_is_waited_for_as_long_as_the_option_says() -> None:
    with calling(gap_wait_s=0.1, long_poll_s=20.0) as caller:
        model = caller.new_model()

        passed = caller.do("forward_backward", forward_backward(model, 3))

    assert passed.metrics["loss:sum"] > 0


def test_custom_answers_replace_those_of_the_service() -> None:
    from tinsmith.wire.exchange import HttpReply

    with calling() as caller:
        caller.service.answers["healthz"] = lambda _: HttpReply(299, {}, [b"mine"])
        reply = caller.call("healthz", r.EmptyRequest())

    assert (reply.status, reply.body) == (299, b"mine")


def test_bodies_are_kept_if_asked_for() -> None:
    with calling(keep_bodies=True) as caller:
        caller.new_session()
        (received,) = caller.service.requests("create_session")

    assert received.body is not None
    assert b"sdk_version" in received.body


def test_an_unknown_base_model_is_rejected_as_by_any_service() -> None:
    with running_service(base_models=["test/mine"]) as service:
        caller = Caller(service)
        request = r.CreateSamplingSessionRequest(
            session_id=caller.new_session(), sampling_session_seq_id=0, base_model="other"
        )

        assert caller.call("create_sampling_session", request).status == 400


def test_expiry_dates_are_in_the_future() -> None:
    with calling() as caller:
        run, checkpoint = saved(caller).removeprefix("tinker://").split("/", 1)
        request = r.CheckpointRequest(training_run_id=run, checkpoint_id=checkpoint)
        found = caller.ask("get_checkpoint_archive_url", request)

    assert found.expires > datetime.datetime.now(datetime.UTC)


def test_a_real_model_is_trained_and_sampled_under_faults(tmp_path: Path) -> None:
    make_model(tmp_path)
    with calling(engine="embedded", base_models=[f"Qwen/Qwen3-8B={tmp_path}"]) as caller:
        model, sampler = caller.new_model(), caller.new_sampler()
        caller.service.faults.fail_command(on=("optim_step", "asample"), times=2, error="no")
        passed = caller.do("forward_backward", forward_backward(model, 1))
        failed = caller.poll(caller.ask("optim_step", optim_step(model, 2)).request_id)
        again = caller.do("forward_backward", forward_backward(model, 3))
        refused = caller.poll(caller.ask("asample", asample(sampler, 0)).request_id)
        sampled = caller.do("asample", asample(sampler, 1))

    assert failed.plain == refused.plain == {"error": "no", "category": "server"}
    assert again.loss_fn_outputs == passed.loss_fn_outputs  # the step was not taken
    assert max(sampled.sequences[0].tokens) < VOCABULARY
