"""Polls: held while there is nothing, answered at once when there is, gone with their client."""

from __future__ import annotations

import asyncio
import resource
import threading
import time

import httpx
import pytest

from tests.integration.service.api.calls import (
    a_model,
    a_sample,
    a_sampler,
    a_step,
    ok,
    post,
    result,
)
from tests.integration.service.api.running import KEYS, RunningServer
from tinsmith.errors import RequestErrorCategory
from tinsmith.service.ledger.board import QueueReport
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire.endpoints import ENDPOINTS

LONG_S = 60.0


def test_a_poll_is_answered_when_its_command_is_settled() -> None:
    """And not before: the poll is held."""
    with RunningServer(long_poll_s=LONG_S) as server, server.http() as http:
        server.held = {"optim_step"}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]
        answers: list[httpx.Response] = []
        poll = threading.Thread(target=lambda: answers.append(result(http, request_id)))
        poll.start()
        server.wait_polls(1)

        server.release()
        poll.join(20)

        assert ok(answers[0]) == {"metrics": {"grad_norm": 1.0}}


def test_a_pending_reply_has_the_queue_state() -> None:
    """408, so that clients ask again without a word in their log."""
    with RunningServer(long_poll_s=0.01) as server, server.http() as http:
        server.held = {"optim_step"}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]
        server.ledger.board.set_queue_state(
            QueueReport("paused_capacity", "all places are taken"), model
        )

        reply = post(http, "retrieve_future", {"request_id": request_id})

        assert reply.status_code == 408
        assert reply.json() == {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "paused_capacity",
            "queue_state_reason": "all places are taken",
        }


def test_a_failed_command_is_answered_200_with_its_category() -> None:
    """200 with a category: a 5xx would make clients ask for ever."""
    with RunningServer() as server, server.http() as http:
        failure = RequestFailedResponse(error="no", category=RequestErrorCategory.User)
        server.failures = {"optim_step": failure}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]

        assert ok(result(http, request_id)) == {"error": "no", "category": "user"}


def test_a_large_result_is_announced_by_its_size() -> None:
    """If the client asks for that; the result can be read again and again."""
    accept = {"Accept": "application/x-protobuf"}
    with RunningServer(inline_bytes=4) as server, server.http() as http:
        sampler = a_sampler(http)
        request_id = ok(post(http, "asample", a_sample(sampler)))["request_id"]
        whole = result(http, request_id, headers=accept)

        body = {"request_id": request_id, "allow_metadata_only": True}
        announced = ok(post(http, "retrieve_future", body, headers=accept))

        assert announced == {
            "status": "complete_metadata",
            "response_payload_size": len(whole.content),
        }
        assert result(http, request_id, headers=accept).content == whole.content


def test_old_clients_get_json() -> None:
    """Whoever does not name protobuf cannot read it."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        request_id = ok(post(http, "asample", a_sample(sampler)))["request_id"]

        sample = ok(result(http, request_id, headers={"Accept": "application/json"}))

        assert sample["sequences"][0]["tokens"] == [0, 7]


def test_acknowledged_results_are_deleted_and_others_are_kept() -> None:
    """410 for what the client said it has; another sampler's ids are passed by."""
    with RunningServer() as server, server.http() as http:
        sampler, other = a_sampler(http), a_sampler(http)
        for one in (sampler, other):
            ok(post(http, "asample", a_sample(one, 0)))
            result(http, f"{one}:0")
        target = {"type": "sampling_session", "sampling_session_id": sampler}

        feed = ok(post(http, "retrieve_futures", {"target": target, "prev_cursor": 0}))
        body = {
            "target": target,
            "prev_cursor": feed["cursor"],
            "timeout": 0,
            "retrieved_request_ids": [f"{sampler}:0", f"{other}:0", "nonsense"],
        }
        ok(post(http, "retrieve_futures", body))

        assert [entry["request_id"] for entry in feed["completions"]] == [f"{sampler}:0"]
        assert result(http, f"{sampler}:0").status_code == 410
        assert result(http, f"{other}:0").status_code == 200


@pytest.mark.parametrize("count", [1, 40])
def test_polls_end_when_their_clients_disconnect(count: int) -> None:
    """Nothing waits for somebody who is gone."""

    async def leave(server: RunningServer, request_id: str) -> None:
        headers = {"X-API-Key": KEYS["alice"]}
        async with httpx.AsyncClient(
            base_url=server.base_url, headers=headers, limits=httpx.Limits(max_connections=None)
        ) as http:
            path = ENDPOINTS["retrieve_future"].path
            polls = [
                asyncio.create_task(http.post(path, json={"request_id": request_id}, timeout=60))
                for _ in range(count)
            ]
            await asyncio.to_thread(server.wait_polls, count)
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    with RunningServer(long_poll_s=LONG_S) as server, server.http() as http:
        server.held = {"optim_step"}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]

        asyncio.run(leave(server, request_id))

        server.wait_for(lambda: sum(report.client_left for report in server.reports) == count)
        assert len(server.app.context.long_polls) == 0


def test_waiting_polls_are_answered_when_the_server_stops() -> None:
    """They are told to ask again, rather than cut off."""
    answers: list[httpx.Response] = []
    with RunningServer(long_poll_s=LONG_S) as server, server.http() as http:
        server.held = {"optim_step"}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]

        def ask() -> None:
            answers.append(post(http, "retrieve_future", {"request_id": request_id}))

        poll = threading.Thread(target=ask)
        poll.start()
        server.wait_polls(1)
        server.run(_end_waits(server))
        poll.join(20)

    assert [answer.status_code for answer in answers] == [408]


async def _end_waits(server: RunningServer) -> None:
    server.app.context.long_polls.close()


def test_thousands_of_idle_polls_wait_and_are_released() -> None:
    """Others are answered meanwhile, and one settlement wakes them all."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(2000, most // 3 - 100)

    async def hold(server: RunningServer, request_id: str) -> list[int]:
        path = ENDPOINTS["retrieve_future"].path
        body = f'{{"request_id":"{request_id}"}}'.encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEYS['alice']}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()

        async def poll() -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + body)
            line = await reader.readline()
            writer.close()
            return int(line.split()[1])

        polls = [asyncio.create_task(poll()) for _ in range(count)]
        await asyncio.to_thread(server.wait_polls, count)
        beat = await asyncio.to_thread(_healthy, server)
        await asyncio.to_thread(server.release)
        return [beat, *await asyncio.gather(*polls)]

    with RunningServer(long_poll_s=LONG_S) as server, server.http() as http:
        server.held = {"optim_step"}
        model = a_model(http)
        request_id = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]

        statuses = asyncio.run(hold(server, request_id))

    assert statuses == [200] * (count + 1)


def _healthy(server: RunningServer) -> int:
    with server.http() as http:
        return http.get(ENDPOINTS["healthz"].path).status_code


def test_a_results_poll_reports_a_paused_queue_once() -> None:
    """At once, with nothing else to tell; the next poll is held as usual."""
    with RunningServer(long_poll_s=LONG_S) as server, server.http() as http:
        sampler = a_sampler(http)
        body = {
            "target": {"type": "sampling_session", "sampling_session_id": sampler},
            "inline_bytes": 100,
        }
        answers: list[httpx.Response] = []
        poll = threading.Thread(target=lambda: answers.append(post(http, "retrieve_results", body)))
        poll.start()
        server.wait_polls(1)

        async def hold() -> None:
            server.ledger.board.set_queue_state(QueueReport("paused_capacity", "full"), sampler)

        server.run(hold())
        poll.join(20)
        next_one = ok(post(http, "retrieve_results", {**body, "timeout": 0.05}))

        told = ok(answers[0])
        assert (told["completions"], told["queue_state"]) == ([], "paused_capacity")
        assert next_one["queue_state_reason"] == "full"

    last = server.reports[-1]  # told after its answer, so looked at when all have ended
    assert last.ended_s - last.started_s >= 0.05, "it was held"


def test_a_poll_waits_briefly_while_the_ledger_is_unavailable() -> None:
    """Clients ask again at once after a 503; they must not spin."""
    with RunningServer() as server, server.http() as http:
        server.run(server.ledger.close())

        asked = time.monotonic()
        reply = post(http, "retrieve_future", {"request_id": "a:1"})

        assert time.monotonic() - asked >= 0.9
        assert reply.status_code == 503
        assert "retry-after-ms" in reply.headers
