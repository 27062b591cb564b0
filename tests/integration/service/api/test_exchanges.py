"""The server's outer edge: hostile and broken requests, each answered with a status and words."""

from __future__ import annotations

import gzip
import json
import logging
import socket

import httpx
import pytest

from tests.integration.service.api.calls import (
    a_model,
    a_pass,
    a_sample,
    a_sampler,
    ok,
    post,
    result,
)
from tests.integration.service.api.running import KEYS, RunningServer
from tinsmith.service.ledger.board import SchedulerReport
from tinsmith.wire.content import compress, decompress
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.zstd_library import zstd

JSON = {"Content-Type": "application/json"}
STEP = ENDPOINTS["optim_step"].path


def raw(server: RunningServer, request: bytes) -> bytes:
    """Send bytes as they are, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/api/v1/", 404),
        ("GET", "/api/v1/nothing", 404),
        ("GET", STEP, 405),
        ("PUT", "/api/v1/sessions", 405),
        ("POST", "/api/v1/../../etc/passwd", 404),
        ("GET", "/api/v1/sessions/%2e%2e/x", 404),
        ("GET", "/api/v1//optim_step", 404),
    ],
)
def test_unknown_paths_and_methods_are_answered_in_json(
    method: str, path: str, status: int
) -> None:
    """With a body, also for methods that a path does not take."""
    with RunningServer() as server, server.http() as http:
        reply = http.request(method, path)

        assert reply.status_code == status
        assert isinstance(reply.json()["detail"], str)
        assert int(reply.headers["content-length"]) > 0
        assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model_id": 3}',
        b'{"model_id": "\\ud800", "seq_id": 1, "adam_params": {}}',
        b'{"model_id": "x", "seq_id": 1e400, "adam_params": {}}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_body_is_a_400_with_a_message(body: bytes) -> None:
    """Never an empty one: clients take that for a broken connection."""
    with RunningServer() as server, server.http() as http:
        reply = http.post(STEP, content=body, headers=JSON)

        assert reply.status_code in (400, 404, 422)
        assert reply.json()["detail"]
        assert int(reply.headers["content-length"]) > 0


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_a_decompression_bomb_is_rejected_before_it_expands(encoding: str) -> None:
    """A few kilobytes that would unpack to a gigabyte."""
    large = bytes(64 * 1024 * 1024)
    bomb = zstd.compress(large) if encoding == "zstd" else gzip.compress(large, 1)
    with RunningServer(decoded_bytes=1024 * 1024) as server, server.http() as http:
        reply = http.post(STEP, content=bomb, headers={**JSON, "Content-Encoding": encoding})

        assert reply.status_code == 413
        assert reply.json()["detail"]


def test_an_oversized_body_is_rejected_before_it_is_read() -> None:
    """By what it announces; and one that announces nothing, as soon as it has grown too large."""
    with RunningServer(body_bytes=1000) as server:
        announced = raw(
            server,
            f"POST {STEP} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 999999999\r\n\r\n".encode(),
        )
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        chunked = raw(
            server,
            f"POST {STEP} HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            + chunk * 3,
        )

        for answer in (announced, chunked):
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in answer.lower()
            assert b'{"detail":' in answer


def test_a_body_that_never_arrives_is_answered_408() -> None:
    """A slow client holds nothing for long."""
    with RunningServer(upload_window_s=0.1) as server:
        head = f"POST {STEP} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100\r\n\r\n"

        assert raw(server, head.encode() + b'{"model').startswith(b"HTTP/1.1 408 ")


def test_oversized_headers_are_rejected() -> None:
    """With a status of their own."""
    with RunningServer() as server, server.http() as http:
        assert http.get("/api/v1/healthz", headers={"x": "y" * 70_000}).status_code == 431


def test_a_missing_wrong_or_revoked_credential_is_a_401() -> None:
    """401 with a body for none, a wrong one, a revoked one, and one that is no text."""
    with RunningServer(with_keys=True) as server:
        for key in (None, "", "tml-wrong", "eyJ.e.30", "eyJhbGciOiJub25lIn0.e30.", "\xe9" * 9000):
            headers = {} if key is None else {b"X-API-Key": key.encode("latin-1")}
            reply = httpx.get(f"{server.base_url}/api/v1/get_server_capabilities", headers=headers)
            assert reply.status_code == 401, key
            assert reply.json()["detail"]
        with server.http() as http:
            assert http.get("/api/v1/auth/apikey/me").status_code == 200
            assert http.delete("/api/v1/auth/apikey/me").status_code == 204
            assert http.get("/api/v1/auth/apikey/me").status_code == 401
        assert httpx.get(f"{server.base_url}/api/v1/healthz").status_code == 200


def test_a_token_is_valid_until_its_key_is_revoked() -> None:
    """The exchange of §2.2: an hour, claims that `whoami` reads, and no life of its own."""
    with RunningServer(with_keys=True) as server, server.http() as http:
        token = ok(post(http, "auth_token", {}))["jwt"]
        headers = {"X-API-Key": token}
        path = ENDPOINTS["get_server_capabilities"].path

        assert token.startswith("eyJ")
        assert httpx.get(server.base_url + path, headers=headers).status_code == 200
        http.delete("/api/v1/auth/apikey/me")
        assert httpx.get(server.base_url + path, headers=headers).status_code == 401


def test_telemetry_is_accepted_whatever_it_contains(caplog: pytest.LogCaptureFixture) -> None:
    """Clients send it again for ever otherwise; and what it holds is not written anywhere."""
    with caplog.at_level(logging.DEBUG), RunningServer() as server, server.http() as http:
        reply = http.post(ENDPOINTS["telemetry"].path, content=b'{"x-api-key": "tml-secret"')

        assert ok(reply) == {"status": "accepted"}
    assert "tml-secret" not in caplog.text


def test_the_health_check_is_503_while_commands_are_not_run() -> None:
    """503 while commands are not being run."""
    with RunningServer() as server, server.http() as http:
        path = ENDPOINTS["healthz"].path
        server.ledger.board.publish_report(SchedulerReport(problem="the engine is gone"))
        ill = http.get(path)
        server.ledger.board.publish_report(SchedulerReport(is_ready=True))

        assert (ill.status_code, ill.json()["detail"]) == (503, "the engine is gone")
        assert ok(http.get(path)) == {"status": "ok"}


def test_a_repeated_503_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the service begins, or the ledger is away, thousands ask again and again."""
    with RunningServer() as server, server.http() as http:
        server.ledger.board.publish_report(SchedulerReport(problem="the engine is gone"))
        statuses = {http.get(ENDPOINTS["healthz"].path).status_code for _ in range(20)}

    assert statuses == {503}
    assert caplog.text.count("the engine is gone") == 1


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A newer client may mean something by them."""
    with caplog.at_level(logging.INFO), RunningServer() as server, server.http() as http:
        for _ in range(3):
            body = {"tags": [], "sdk_version": "9", "from_the_future": 1}
            ok(post(http, "create_session", body))

    told = [record for record in caplog.records if "from_the_future" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity"])
def test_large_responses_are_compressed_if_the_client_accepts_it(encoding: str) -> None:
    """And small ones, and those of other clients, are not."""
    with RunningServer(compress_from_bytes=100) as server, server.http() as http:
        sampler = a_sampler(http)
        request_id = ok(post(http, "asample", a_sample(sampler, num_samples=500)))["request_id"]
        headers = {"Accept-Encoding": encoding}
        result(http, request_id)
        with http.stream(
            "POST",
            ENDPOINTS["retrieve_future"].path,
            json={"request_id": request_id},
            headers=headers,
        ) as reply:
            body = b"".join(reply.iter_raw())
        small = post(http, "session_heartbeat", {"session_id": "x"}, headers=headers)

        assert reply.headers.get("content-encoding", "identity") == encoding
        plain = bytes(decompress(body, encoding))
        assert len(json.loads(plain)["sequences"]) == 500
        assert "content-encoding" not in small.headers


def test_a_path_prefix_is_part_of_every_path() -> None:
    """A service may live below another one's address."""
    with RunningServer(path_prefix="/svc") as server, server.http() as http:
        assert http.get("/svc/api/v1/healthz").status_code == 200
        assert http.get("/api/v1/healthz").status_code == 404


def test_every_response_has_its_own_request_id_header() -> None:
    """The id by which logs are searched."""
    with RunningServer() as server, server.http() as http:
        ids = {http.get("/api/v1/healthz").headers["x-request-id"] for _ in range(3)}
        ids.add(http.get("/nothing").headers["x-request-id"])

    assert len(ids) == 4
    assert {report.call_id for report in server.reports} == ids


def test_permanent_rejections_never_use_a_status_that_clients_retry() -> None:
    """409 would make every client spin for minutes."""
    with RunningServer() as server, server.http() as http:
        model = a_model(http)
        path, headers = (
            ENDPOINTS["forward_backward"].path,
            {"Content-Type": "application/x-protobuf"},
        )
        refused = [
            http.post(path, content=a_pass(model, 1)[:-3], headers=headers),
            http.post(path, content=a_pass("nobody", 1), headers=headers),
            http.post(path, content=compress([b"junk"]), headers=headers),
            http.post(path, content=a_pass(model, 1, target_tokens=[1, 2, 9999]), headers=headers),
        ]

        assert all(reply.status_code in (400, 404, 422) for reply in refused)


def test_key_details_name_the_tenant_but_never_the_key() -> None:
    """Whose key it is, as the command line asks after a login."""
    with RunningServer(with_keys=True) as server, server.http("bob") as http:
        shown = ok(http.get("/api/v1/auth/apikey/me"))

        assert shown["details"]["org_details"]["name"] == "bob"
        assert KEYS["bob"] not in json.dumps(shown)
