"""Tokens as they are drawn: from the board while a sample runs, from its result at the end."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.service.api.calls import a_sample, a_sampler, ok, post, result
from tests.integration.service.api.running import RunningServer
from tinsmith.service.api.routes import streams
from tinsmith.service.ledger.board import QueueReport, TokenPiece
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.sse import EventDecoder, ServerSentEvent

PATH = ENDPOINTS["asample_stream"].path


class Reader:
    """The events of one stream, one after another."""

    def __init__(self, reply: httpx.Response) -> None:
        self.reply = reply
        self._bytes = reply.iter_raw()
        self._decoder = EventDecoder()
        self._events: list[ServerSentEvent] = []

    def next(self) -> tuple[str, Any]:
        """The next event: its name and its data."""
        while not self._events:
            self._events = self._decoder.feed(next(self._bytes))
        event = self._events.pop(0)
        self.last_id = event.id
        return event.event, json.loads(event.data)

    def rest(self) -> list[tuple[str, Any]]:
        """All further events."""
        found = [(event.event, json.loads(event.data)) for event in self._events]
        for piece in self._bytes:
            found += [(e.event, json.loads(e.data)) for e in self._decoder.feed(piece)]
        return found


def tell(server: RunningServer, request_id: str, *pieces: TokenPiece) -> None:
    """Say what was drawn, as a scheduler does."""

    async def told() -> None:
        server.ledger.board.publish_tokens(request_id, pieces)

    server.run(told())


def test_tokens_stream_while_the_sample_runs_and_none_is_sent_twice() -> None:
    """No token twice: what the board told is not told again by the result."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        body = a_sample(sampler, 0, num_samples=2)
        with http.stream("POST", PATH, json=body) as reply:
            reader = Reader(reply)
            opened = reader.next()
            tell(server, f"{sampler}:0", TokenPiece(1, (1,), (-0.5,)))
            early = reader.next()
            position = reader.last_id
            server.release()
            late = reader.rest()

    assert reply.headers["content-type"] == "text/event-stream"
    assert opened == (
        "open",
        {
            "request_id": f"{sampler}:0",
            "sample_sequence_ids": [f"{sampler}:0:s0", f"{sampler}:0:s1"],
        },
    )
    assert early == ("tokens", {"index": 1, "offset": 0, "tokens": [1], "logprobs": [-0.5]})
    assert position == "0.1"
    assert [(name, data.get("index"), data.get("tokens")) for name, data in late] == [
        ("tokens", 0, [0, 7]),
        ("tokens", 1, [7]),
        ("result", None, None),
    ]
    assert late[0][1]["stop_reason"] == "stop"


def test_a_reconnecting_client_resumes_where_it_stopped() -> None:
    """By the id of the last event that it read; the board is still watched for it."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        request_id, body = f"{sampler}:0", a_sample(sampler, 0)
        with http.stream("POST", PATH, json=body) as reply:
            reader = Reader(reply)
            reader.next()
            tell(server, request_id, TokenPiece(0, (0,)))
            reader.next()
        server.wait_for(lambda: any(report.client_left for report in server.reports))
        tell(server, request_id, TokenPiece(0, (7,)))

        with http.stream("POST", PATH, json=body, headers={"Last-Event-ID": "1"}) as reply:
            reader = Reader(reply)
            opened, went_on = reader.next(), reader.next()
            server.release()
            late = reader.rest()

    assert opened[0] == "open"
    assert (went_on[1]["offset"], went_on[1]["tokens"]) == (1, [7])
    assert [name for name, _ in late] == ["tokens", "result"]
    assert late[0][1]["tokens"] == []


def test_a_stream_of_a_finished_sample_returns_all_of_it() -> None:
    """Also one that was sent by another route."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        body = a_sample(sampler, 0)
        ok(post(http, "asample", body))
        assert result(http, f"{sampler}:0").status_code == 200

        with http.stream("POST", PATH, json=body) as reply:
            events = Reader(reply).rest()

    assert [name for name, _ in events] == ["open", "tokens", "result"]
    assert events[1][1]["tokens"] == [0, 7]


def test_a_sample_that_is_rerun_does_not_repeat_its_tokens() -> None:
    """The engine began again; the client has the first tokens already."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        request_id = f"{sampler}:0"

        async def restart() -> None:
            server.ledger.board.restart_tokens(request_id)

        with http.stream("POST", PATH, json=a_sample(sampler, 0)) as reply:
            reader = Reader(reply)
            reader.next()
            tell(server, request_id, TokenPiece(0, (0,)))
            first = reader.next()
            server.run(restart())
            tell(server, request_id, TokenPiece(0, (0,)), TokenPiece(0, (7,)))
            second = reader.next()
            server.release()

    assert (first[1]["offset"], first[1]["tokens"]) == (0, [0])
    assert (second[1]["offset"], second[1]["tokens"]) == (1, [7])


def test_a_stream_reports_that_it_is_paused() -> None:
    """Before anything else comes."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        server.ledger.board.set_queue_state(QueueReport("paused_capacity", "full", 0.5), sampler)

        with http.stream("POST", PATH, json=a_sample(sampler, 0)) as reply:
            reader = Reader(reply)
            reader.next()
            told = reader.next()
            server.release()

    assert told == (
        "queue",
        {"queue_state": "paused_capacity", "queue_state_reason": "full", "retry_after_ms": 500.0},
    )


def test_streams_are_rejected_like_samples() -> None:
    """With a status, before any event; and nothing is watched afterwards."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        refused = [
            post(http, "asample_stream", {**a_sample(sampler), "seq_id": None}),
            post(http, "asample_stream", a_sample("nobody")),
            post(http, "asample_stream", a_sample(sampler, num_samples=0)),
            post(
                http,
                "asample_stream",
                a_sample(sampler),
                headers={"Last-Event-ID": "1.2"},
            ),
        ]

        assert [reply.status_code for reply in refused] == [400, 404, 400, 400]
        assert not server.ledger.board.is_watched(f"{sampler}:0")


def test_an_expired_result_is_a_410() -> None:
    """And no stream."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        body = a_sample(sampler, 0)
        ok(post(http, "asample", body))
        result(http, f"{sampler}:0")
        server.run(server.ledger.acknowledge([f"{sampler}:0"]))

        assert post(http, "asample_stream", body).status_code == 410


def test_small_results_are_inlined_in_the_poll_and_large_ones_fetched() -> None:
    """As many as fit into the answer; each state has its word."""
    with RunningServer(answer_inline_bytes=64) as server, server.http() as http:
        sampler = a_sampler(http)
        for number, count in enumerate((1, 30, 1)):
            ok(post(http, "asample", a_sample(sampler, number, num_samples=count)))
            result(http, f"{sampler}:{number}")
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        server.held = {"asample"}
        ok(post(http, "asample", a_sample(sampler, 3)))

        poll = {"target": target, "inline_bytes": 10_000, "answer_bytes": 10_000}
        told = ok(post(http, "retrieve_results", poll))
        cut = ok(post(http, "retrieve_results", {**poll, "answer_bytes": 1}))
        server.run(server.ledger.acknowledge([f"{sampler}:0"]))
        ids = [f"{sampler}:{n}" for n in range(4)] + ["nobody:7"]
        fetched = ok(post(http, "fetch_results", {"request_ids": ids}))["results"]

    assert [bool(entry.get("payload")) for entry in told["completions"]] == [True, False, True]
    assert told["queue_state"] == "active"
    assert [entry["request_id"] for entry in cut["completions"]] == [
        f"{sampler}:0",
        f"{sampler}:1",
    ]
    assert [entry["state"] for entry in fetched] == [
        "gone",
        "finished",
        "finished",
        "pending",
        "unknown",
    ]


def test_a_stream_ends_when_the_server_stops() -> None:
    """Without a result, so that the client asks the next server for the rest."""

    async def stop(server: RunningServer) -> None:
        server.app.context.long_polls.close()

    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        with http.stream("POST", PATH, json=a_sample(sampler, 0)) as reply:
            reader = Reader(reply)
            reader.next()
            server.run(stop(server))
            late = reader.rest()

    assert [name for name, _ in late] == []


def test_a_late_reader_of_a_stream_gets_its_tokens_from_the_result() -> None:
    """What was drawn before anybody watched is not known: no later token may take its place."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        request_id, body = f"{sampler}:0", a_sample(sampler, 0)
        ok(post(http, "asample", body))
        with (
            http.stream("POST", PATH, json=body) as one,
            http.stream("POST", PATH, json=body) as other,
        ):
            readers = Reader(one), Reader(other)
            assert [reader.next()[0] for reader in readers] == ["open", "open"]
            tell(server, request_id, TokenPiece(0, (7,)))
            server.release()
            late = [reader.rest() for reader in readers]

        for events in late:
            assert [(name, data.get("tokens")) for name, data in events] == [
                ("tokens", [0, 7]),
                ("result", None),
            ]
        server.wait_for(lambda: len(server.reports) >= 4)
        assert not server.run(_is_watched(server, request_id)), "nothing is watched any more"


async def _is_watched(server: RunningServer, request_id: str) -> bool:
    return server.ledger.board.is_watched(request_id)


def test_one_tenant_cannot_take_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_OF_TENANT", 1)
    with (
        RunningServer(with_keys=True) as server,
        server.http("alice") as alice,
        server.http("bob") as bob,
    ):
        server.held = {"asample"}
        mine, theirs = a_sampler(alice), a_sampler(bob)
        with alice.stream("POST", PATH, json=a_sample(mine, 0)) as reply:
            first = Reader(reply)
            first.next()
            refused = alice.post(PATH, json=a_sample(mine, 1))
            with bob.stream("POST", PATH, json=a_sample(theirs, 0)) as another:
                other = Reader(another)
                assert other.next()[0] == "open"
                server.release()
                other.rest()
            first.rest()
        later = alice.post(PATH, json=a_sample(mine, 2))

        assert (refused.status_code, later.status_code) == (429, 200)
