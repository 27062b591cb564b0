"""Each fault does what it says, seen from the other end of a real socket."""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.testing.caller import (
    Caller,
    Reply,
    asample,
    calling,
    forward_backward,
    optim_step,
)
from tinsmith import types as t
from tinsmith.types import requests as r

HEALTH = r.EmptyRequest()


def health(caller: Caller) -> Reply:
    return caller.call("healthz", HEALTH)


@pytest.mark.parametrize("status", [400, 402, 408, 409, 410, 422, 429, 500, 503, 529])
def test_a_status_fault_is_returned_the_given_number_of_times_with_its_headers(status: int) -> None:
    with calling() as caller:
        fault = caller.service.faults.add(
            on="healthz", times=2, status=status, headers={"retry-after-ms": "300"}
        )

        replies = [health(caller) for _ in range(3)]

        assert [reply.status for reply in replies] == [status, status, 200]
        assert replies[0].headers["retry-after-ms"] == "300"
        assert replies[0].plain == {"detail": "refused, as the test asked"}
        assert fault.struck == 2
        assert [one.status for one in caller.service.requests("healthz")] == [status, status, 200]


def test_a_rejected_request_has_no_effect_unless_the_fault_says_so() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        caller.service.faults.add(on="optim_step", nth=1, status=500)
        caller.service.faults.add(on="optim_step", nth=2, status=500, after_work=True)

        for seq_id in (1, 2):
            assert caller.call("optim_step", optim_step(model_id, seq_id)).status == 500
        first = caller.do("optim_step", optim_step(model_id, 1))
        second = caller.do("optim_step", optim_step(model_id, 2))

        assert [first.metrics["tinsmith/step"], second.metrics["tinsmith/step"]] == [1, 2]


def test_empty_400_has_no_body() -> None:
    with calling() as caller:
        caller.service.faults.add(on="healthz", empty_400=True)

        reply = health(caller)

        assert (reply.status, reply.body, reply.headers["content-length"]) == (400, b"", "0")


def test_a_lost_reply_fault_still_does_the_work() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.add(on="asample", lose_reply=True)

        with pytest.raises(http.client.RemoteDisconnected):
            caller.call("asample", asample(sampler_id, 0))

        again = caller.ask("asample", asample(sampler_id, 0))
        assert again.request_id == f"{sampler_id}:0"
        assert caller.result("asample", again.request_id).sequences


def test_a_half_reply_is_truncated_in_its_body() -> None:
    with calling() as caller:
        caller.service.faults.add(on="get_server_capabilities", half_reply=True)

        with pytest.raises(http.client.IncompleteRead):
            caller.call("get_server_capabilities", HEALTH)

        caller.ask("get_server_capabilities", HEALTH)


def test_reset_breaks_the_connection_before_any_work() -> None:
    with calling() as caller:
        caller.service.faults.add(on="create_session", reset=True)

        with pytest.raises(ConnectionResetError):
            caller.new_session()

        assert caller.new_session()


def test_a_delay_fault_delays_the_reply_but_not_the_work() -> None:
    with calling() as caller:
        caller.service.faults.add(on="create_session", delay_s=0.3)
        began = time.monotonic()

        caller.new_session()

        assert time.monotonic() - began >= 0.3


def test_hold_counts_held_requests_and_releases_them_in_order() -> None:
    with calling() as caller, ThreadPoolExecutor(5) as pool:
        hold = caller.service.faults.hold(on="healthz")
        calls = [pool.submit(health, caller) for _ in range(5)]

        hold.wait_held(5)
        assert (hold.held, caller.service.in_flight("healthz")) == (5, 5)
        hold.release(2)
        while sum(call.done() for call in calls) < 2:
            time.sleep(0.001)
        assert hold.held == 3
        hold.release()

        assert [call.result().status for call in calls] == [200] * 5
        assert (hold.most_held, caller.service.in_flight()) == (5, 0)


def test_a_client_that_disconnects_is_noticed() -> None:
    with calling() as caller:
        with caller.service.faults.hold(on="healthz") as hold:
            host = caller.service.base_url.removeprefix("http://")
            connection = http.client.HTTPConnection(host, timeout=10)
            connection.request("GET", "/api/v1/healthz", headers={"X-API-Key": "tml-test"})
            hold.wait_held(1)
            connection.close()

            deadline = time.monotonic() + 60
            while hold.held and time.monotonic() < deadline:
                time.sleep(0.001)

        received = caller.service.requests("healthz")[0]
        assert (received.client_left, received.status) == (True, None)


def test_nth_and_when_select_the_request_that_fails() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.add(on="asample", nth=2, status=500)
        caller.service.faults.add(
            on=("asample", "optim_step"),
            times=None,
            when=lambda received: received.request.seq_id == 3,
            status=503,
        )

        replies = [caller.call("asample", asample(sampler_id, n)) for n in (0, 1, 2, 3, 3)]

        assert [reply.status for reply in replies] == [200, 500, 200, 503, 503]


def test_clear_removes_all_rules_and_releases_held_requests() -> None:
    with calling() as caller, ThreadPoolExecutor(1) as pool:
        hold = caller.service.faults.hold(on="healthz")
        call = pool.submit(health, caller)
        hold.wait_held(1)

        caller.service.faults.clear()

        assert call.result(timeout=5).status == 200
        assert health(caller).status == 200


def test_failed_command_is_answered_with_its_category() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        caller.service.faults.fail_command(on="forward_backward", category="user", error="no")

        submitted = caller.ask("forward_backward", forward_backward(model_id, 1))

        reply = caller.poll(submitted.request_id)
        assert (reply.status, reply.plain) == (200, {"error": "no", "category": "user"})
        caller.do("forward_backward", forward_backward(model_id, 2))


def test_polls_report_a_pause_until_it_ends() -> None:
    with calling(long_poll_s=0.1) as caller:
        sampler_id = caller.new_sampler()
        pause = caller.service.faults.pause(
            on="asample", queue_state="paused_rate_limit", reason="too fast", retry_after_ms=250.0
        )
        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id

        told = caller.poll(request_id)

        assert told.status == 408
        assert told.plain == {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "paused_rate_limit",
            "queue_state_reason": "too fast",
            "retry_after_ms": 250.0,
        }
        pause.release()
        assert caller.result("asample", request_id).sequences


def test_a_pause_may_end_by_itself_and_be_reported_immediately_with_200() -> None:
    with calling(long_poll_s=30.0) as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.pause(on="asample", polls=2, poll_after_s=0.0, poll_status=200)
        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id

        told = [caller.poll(request_id) for _ in range(2)]

        assert [reply.status for reply in told] == [200, 200]
        assert {reply.plain["queue_state"] for reply in told} == {"paused_capacity"}
        assert caller.result("asample", request_id).sequences


def test_a_paused_model_also_pauses_its_queued_commands() -> None:
    with calling(long_poll_s=0.1) as caller:
        model_id = caller.new_model()
        with caller.service.faults.pause(on="optim_step", reason="full"):
            ids = [caller.ask("optim_step", optim_step(model_id, n)).request_id for n in (1, 2)]

            told = [caller.poll(request_id).plain["queue_state_reason"] for request_id in ids]

        assert told == ["full", "full"]
        assert [caller.result("optim_step", one).metrics["tinsmith/step"] for one in ids] == [1, 2]


def completions(caller: Caller, sampler_id: str) -> list[str]:
    target = r.SamplingSessionFuturesTarget(sampling_session_id=sampler_id)
    found: t.FuturesRetrieveResponse = caller.ask(
        "retrieve_futures", r.FuturesRetrieveRequest(target=target)
    )
    return [one.request_id for one in found.completions]


def test_completions_can_be_delivered_in_reverse_order() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.reorder_completions(on="asample", count=3)

        ids = [caller.ask("asample", asample(sampler_id, n)).request_id for n in range(3)]
        for request_id in ids:
            caller.result("asample", request_id)

        assert completions(caller, sampler_id) == ids[::-1]


def test_reordered_training_still_runs_in_order() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        caller.service.faults.reorder_completions(on="optim_step", count=2, apart_s=0.05)

        first, second = (caller.ask("optim_step", optim_step(model_id, n)) for n in (1, 2))
        order: list[str] = []

        def wait(request_id: str) -> Any:
            result = caller.result("optim_step", request_id)
            order.append(request_id)
            return result

        with ThreadPoolExecutor(2) as pool:
            steps = list(pool.map(wait, [first.request_id, second.request_id]))

        assert [step.metrics["tinsmith/step"] for step in steps] == [1, 2]
        assert order == [second.request_id, first.request_id]


def test_an_expired_result_stays_a_410() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.expire_results(on="asample")

        ids = [caller.ask("asample", asample(sampler_id, n)).request_id for n in range(2)]

        assert [caller.poll(one).status for one in (ids[0], ids[0], ids[1])] == [410, 410, 200]


def test_a_delayed_command_is_accepted_immediately() -> None:
    with calling(long_poll_s=0.0) as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.delay_commands(on="asample", delay_s=3600.0)

        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id

        assert caller.poll(request_id).status == 408


def test_delayed_command_ends_after_its_delay() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        caller.service.faults.delay_commands(on="asample", delay_s=0.3)
        began = time.monotonic()

        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
        caller.result("asample", request_id)

        assert time.monotonic() - began >= 0.3


def test_rules_may_be_added_while_requests_come() -> None:
    with calling() as caller:
        stop = threading.Event()

        def call_on() -> int:
            count = 0
            while not stop.is_set():
                count += health(caller).status == 503
            return count

        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(call_on) for _ in range(2)]
            for _ in range(50):
                caller.service.faults.add(on="healthz", status=503)
            while sum(one.status == 503 for one in caller.service.requests("healthz")) < 50:
                time.sleep(0.001)
            stop.set()

            assert sum(call.result() for call in calls) == 50
