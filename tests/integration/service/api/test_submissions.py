"""Submissions: durable once, whatever the network does to them, and refused with a reason."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from tests.integration.service.api.calls import (
    PROTOBUF,
    a_model,
    a_pass,
    a_sample,
    a_sampler,
    a_session,
    a_step,
    ok,
    post,
    result,
)
from tests.integration.service.api.running import KEYS, MODEL, RunningServer
from tinsmith.service.ledger.records import CheckpointEntry, QueueId, TenantId
from tinsmith.wire.content import compress
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.generated.tags import FORWARD_BACKWARD_REQUEST__DATA as DATA
from tinsmith.wire.protobuf import header


def test_the_same_submission_twice_is_one_command() -> None:
    """Also when both come at the same moment, and with other idempotency keys."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        body = a_step(model, 1)

        def send(key: str) -> str:
            reply = post(http, "optim_step", body, headers={"X-Idempotency-Key": key})
            return str(ok(reply)["request_id"])

        with ThreadPoolExecutor(8) as pool:
            answers = set(pool.map(send, map(str, range(32))))

        assert answers == {f"{model}:1"}
        assert ok(result(http, f"{model}:1")) == {"metrics": {"grad_norm": 1.0}}
        assert send("late") == f"{model}:1"


def test_a_different_body_under_a_used_seq_id_is_rejected_permanently() -> None:
    """With a status that no client tries again."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        ok(post(http, "optim_step", a_step(model, 1)))

        other = {**a_step(model, 1), "adam_params": {"learning_rate": 1.0}}
        refused = post(http, "optim_step", other)

        assert refused.status_code == 400
        assert "detail" in refused.json()


def test_seq_ids_may_arrive_in_any_order() -> None:
    """A submission never waits for its turn: chunk 1 is sent last."""
    with RunningServer() as server, server.http() as http:
        server.held = {"forward_backward"}
        model = a_model(http)

        for number in (4, 3, 2, 1):
            path = ENDPOINTS["forward_backward"].path
            ok(http.post(path, content=a_pass(model, number), headers=PROTOBUF))

        server.release()
        for number in (1, 2, 3, 4):
            reply = result(http, f"{model}:{number}", headers={"Accept": "application/x-protobuf"})
            assert reply.headers["content-type"] == "application/x-protobuf"


def test_resubmitting_after_a_lost_reply_finds_the_first_submission() -> None:
    """The client vanished after sending; the retry gets the first one's id."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        body = msgspec.json.encode(a_step(model, 1))
        with socket.create_connection(("127.0.0.1", server.port)) as lost:
            head = (
                f"POST {ENDPOINTS['optim_step'].path} HTTP/1.1\r\nHost: localhost\r\n"
                f"X-API-Key: {KEYS['alice']}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            lost.sendall(head.encode() + body)
            server.wait_for(lambda: server.settled >= 2)

        again = post(http, "optim_step", msgspec.json.decode(body))

        assert ok(again)["request_id"] == f"{model}:1"
        assert server.settled == 2


def test_a_rejected_seq_id_is_spent() -> None:
    """What comes after it need not wait for it."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)

        bad = http.post(
            ENDPOINTS["forward_backward"].path,
            content=a_pass(model, 1, weights=[1.0, float("nan"), 1.0]),
            headers=PROTOBUF,
        )

        assert bad.status_code == 400
        assert "data[0].loss_fn_inputs['weights'] contains NaN" in bad.json()["detail"]
        assert server.run(server.ledger.spent(QueueId(model))) == [1]


def test_a_compressed_body_is_decompressed() -> None:
    """Current clients send passes as zstd."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)

        reply = http.post(
            ENDPOINTS["forward_backward"].path,
            content=compress([a_pass(model, 1)]),
            headers={**PROTOBUF, "Content-Encoding": "zstd"},
        )

        assert ok(reply)["request_id"] == f"{model}:1"


def test_nothing_can_be_submitted_to_a_session_that_ended() -> None:
    """Refused for good, and with words; a retry of what was accepted still gets its answer."""
    with RunningServer() as server, server.http() as http:
        session = a_session(http)
        model, sampler = a_model(http, session), a_sampler(http, session)
        ok(post(http, "optim_step", a_step(model, 1)))
        path = ENDPOINTS["finish_session"].path.format(session_id=session)
        assert http.post(path, json={"reason": {"type": "success"}}).status_code == 204

        late = [
            post(http, "optim_step", a_step(model, 2)),
            post(http, "asample", a_sample(sampler)),
            post(
                http,
                "create_model",
                {"session_id": session, "model_seq_id": 1, "base_model": MODEL},
            ),
        ]

        assert [reply.status_code for reply in late] == [400] * 3
        assert all("has ended" in reply.json()["detail"] for reply in late)
        assert ok(post(http, "optim_step", a_step(model, 1)))["request_id"] == f"{model}:1"
        beat = post(http, "session_heartbeat", {"session_id": session})
        assert beat.status_code == 410


def test_the_same_idempotency_key_opens_one_session() -> None:
    """A creation whose reply was lost does not leave a second session."""
    with RunningServer(with_keys=True) as server, server.http() as alice, server.http("bob") as bob:
        body = {"tags": [], "sdk_version": "0.36.0"}
        same = {"X-Idempotency-Key": "k"}

        first = ok(post(alice, "create_session", body, headers=same))
        again = ok(post(alice, "create_session", body, headers=same))
        other = ok(post(alice, "create_session", body))
        bobs = ok(post(bob, "create_session", body, headers=same))

        assert first == again
        assert len({first["session_id"], other["session_id"], bobs["session_id"]}) == 3


def test_too_many_commands_in_flight_is_a_429_with_a_delay() -> None:
    """429 with a delay; once something is settled there is room again."""
    with RunningServer(commands_in_flight=3) as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        taken = [post(http, "asample", a_sample(sampler, n)).status_code for n in range(3)]

        refused = post(http, "asample", a_sample(sampler, 3))
        server.release()
        server.wait_for(lambda: server.settled >= 3)
        time.sleep(float(refused.headers["retry-after-ms"]) / 1000)  # as the client was asked
        again = post(http, "asample", a_sample(sampler, 3))

        assert taken == [200] * 3
        assert refused.status_code == 429
        assert float(refused.headers["retry-after-ms"]) > 0
        assert ok(again)["request_id"] == f"{sampler}:3"


@pytest.mark.parametrize("count", [1, 3])
def test_sequence_ids_are_assigned_at_submission(count: int) -> None:
    """As many as were asked for, the same for a retry."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        body = a_sample(sampler, 5, num_samples=count)

        first, again = ok(post(http, "asample", body)), ok(post(http, "asample", body))

        assert first == again
        assert first["sample_sequence_ids"] == [f"{sampler}:5:s{n}" for n in range(count)]


def test_only_the_invalid_samples_of_a_batch_are_rejected() -> None:
    """Each item is read by itself."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)
        wrong_token = {"chunks": [{"type": "encoded_text", "tokens": [5000]}]}
        samples = [
            a_sample(sampler, 0),
            a_sample(sampler, 1, prompt=wrong_token),
            {"seq_id": 2},
            a_sample("nobody:sample:0", 3),
            a_sample(sampler, 4),
        ]

        items = ok(post(http, "asample_many", {"samples": samples}))["items"]

        assert [item.get("status") for item in items] == [None, 400, 400, 404, None]
        assert items[4]["request_id"] == f"{sampler}:4"
        assert ok(post(http, "asample", a_sample(sampler, 4)))["request_id"] == f"{sampler}:4"


def test_a_sample_can_be_cancelled_but_an_optim_step_cannot() -> None:
    """Those after a step count on its having run."""
    with RunningServer() as server, server.http() as http:
        server.held = {"asample", "optim_step"}
        sampler, model = a_sampler(http), a_model(http)
        sample = ok(post(http, "asample", a_sample(sampler)))["request_id"]
        step = ok(post(http, "optim_step", a_step(model, 1)))["request_id"]

        cancelled = post(http, "cancel_future", {"request_id": sample})
        refused = post(http, "cancel_future", {"request_id": step})

        assert cancelled.status_code == 204
        assert refused.status_code == 400
        assert ok(result(http, sample))["category"] == "user"


def test_a_token_for_another_tenant_s_checkpoint_is_not_stored() -> None:
    """It is used when it comes; what is kept of the command does not hold it."""
    with (
        RunningServer(with_keys=True) as server,
        server.http() as alice,
        server.http("bob") as bob,
    ):
        theirs = a_model(alice)
        entry = CheckpointEntry(
            id=f"tinker://{theirs}/weights/one",
            tenant_id=TenantId("alice"),
            created_at=server.ledger.now(),
            run_id=theirs,
            checkpoint_id="weights/one",
            details={"base_model": MODEL},
        )
        server.run(server.ledger.entries(CheckpointEntry).add(entry))
        server.held = {"load_weights"}
        body = {"session_id": a_session(bob), "model_seq_id": 0, "path": entry.id}

        refused = post(bob, "load_weights", body)
        loaded = post(bob, "load_weights", {**body, "weights_access_token": KEYS["alice"]})

        assert refused.status_code == 404
        payload = server.run(server.ledger.payload(ok(loaded)["request_id"]))
        assert KEYS["alice"].encode() not in payload
        assert entry.id.encode() in payload


def test_an_ended_session_is_not_returned_for_its_idempotency_key() -> None:
    """Not even to the idempotency key that made it."""
    with RunningServer() as server, server.http() as http:
        body, headers = {"tags": [], "sdk_version": "1"}, {"X-Idempotency-Key": "k"}
        first = ok(post(http, "create_session", body, headers=headers))["session_id"]
        server.run(server.app.context.sessions.end(first, {"type": "cancelled"}))

        assert ok(post(http, "create_session", body, headers=headers))["session_id"] != first


def test_a_model_created_while_its_session_ends_is_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RunningServer() as server, server.http() as http:
        session = a_session(http)
        service = server.app.context
        found_open = service.lookups.open_session

        async def and_ended(*asked: Any) -> Any:
            found = await found_open(*asked)
            await service.sessions.end(session, {"type": "client_finished"})
            return found

        monkeypatch.setattr(service.lookups, "open_session", and_ended)
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        model = ok(post(http, "create_model", body))["model_id"]

        kinds = [one.kind for one in server.run(server.ledger.replay(QueueId(model)))]
        assert kinds == ["create_model", "release_model"]


def test_an_invalid_command_does_not_block_those_behind_it() -> None:
    """The official SDK writes a learning rate that is NaN as null."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        body = {**a_step(model, 1), "adam_params": {"learning_rate": None}}

        refused = post(http, "optim_step", body)
        ok(post(http, "optim_step", a_step(model, 2)))

        assert refused.status_code == 400
        assert server.run(server.ledger.spent(QueueId(model))) == [1]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("size", [3, 200_000])
def test_an_invalid_forward_backward_does_not_block_those_behind_it(
    size: int, is_packed: bool
) -> None:
    """However large: the official SDK sends a shape of -1 as it is, and goes on with the next."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        body = a_pass(model, 1, weights=[1.0] * size) + header(DATA, 1) + b"\x07"
        headers = dict(PROTOBUF)
        if is_packed:
            body = compress([body])
            headers["Content-Encoding"] = "zstd"

        refused = http.post(ENDPOINTS["forward_backward"].path, content=body, headers=headers)
        ok(post(http, "optim_step", a_step(model, 2)))

        assert refused.status_code == 400
        assert server.run(server.ledger.spent(QueueId(model))) == [1]


def test_an_invalid_large_command_does_not_block_those_behind_it() -> None:
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        body = {**a_step(model, 1), "adam_params": None, "more": "x" * 1_000_000}

        refused = post(http, "optim_step", body)
        ok(post(http, "optim_step", a_step(model, 2)))

        assert refused.status_code == 400
        assert server.run(server.ledger.spent(QueueId(model))) == [1]
