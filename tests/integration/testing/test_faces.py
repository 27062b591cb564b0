"""Starting and stopping: in a thread or on the current loop, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import http.client
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.integration.testing.caller import Caller, asample, calling, optim_step
from tinsmith.testing import running_service
from tinsmith.testing import service as testing_service
from tinsmith.types import requests as r
from tinsmith.wire.exchange import read_request


def test_the_server_thread_ends_with_the_with_block() -> None:
    with running_service() as service:
        names = [thread.name for thread in threading.enumerate()]
        port = int(service.base_url.rpartition(":")[2])
        assert "tinsmith-testing" in names

    assert "tinsmith-testing" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_closing_ends_all_requests_in_flight() -> None:
    """Held replies, held work, long polls and idle connections; warnings are errors here."""
    with calling() as caller:
        model_id, sampler_id = caller.new_model(), caller.new_sampler()
        service = caller.service
        commands = service.faults.hold_commands()
        caller.ask("optim_step", optim_step(model_id, 2))  # waits for 1
        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
        commands.wait_held(1)
        replies = service.faults.hold(on="healthz")
        host = service.base_url.removeprefix("http://")
        open_ones = [http.client.HTTPConnection(host, timeout=10) for _ in range(3)]
        headers = {"X-API-Key": "tml-test"}
        open_ones[0].request("GET", "/api/v1/healthz", headers=headers)
        body = b'{"request_id": "%b"}' % request_id.encode()
        open_ones[1].request("POST", "/api/v1/retrieve_future", body, headers)
        open_ones[2].connect()
        replies.wait_held(1)
        service.wait_requests("retrieve_future", 2)
        assert service.in_flight() == 2

    for connection in open_ones:
        connection.close()
    assert service.in_flight() == 0
    assert all(received.client_left for received in service.requests("healthz"))
    gc.collect()  # an unclosed socket would speak up now


def test_clients_that_connect_while_it_closes_leave_no_socket_behind() -> None:
    for count in range(20):
        with running_service() as service:
            address = ("127.0.0.1", int(service.base_url.rpartition(":")[2]))
            late = [socket.create_connection(address, timeout=5) for _ in range(count % 5)]
        for client in late:
            client.close()
    gc.collect()


def test_service_runs_on_the_current_loop() -> None:
    async def use() -> None:
        async with running_service(long_poll_s=5.0) as service:
            caller = Caller(service)
            assert await asyncio.to_thread(caller.new_session)
            hold = service.faults.hold(on="healthz")
            call = asyncio.create_task(asyncio.to_thread(caller.call, "healthz", r.EmptyRequest()))
            await hold.wait_held_async(1)
            assert len(await service.wait_requests_async("healthz", 1)) == 1
            hold.release()
            assert (await call).status == 200
        assert len(asyncio.all_tasks()) == 1  # this one

    asyncio.run(use())


def test_a_port_in_use_raises_in_the_caller() -> None:
    with running_service() as first:
        port = int(first.base_url.rpartition(":")[2])

        with pytest.raises(OSError, match="in use"), running_service(port=port):
            raise AssertionError("it opened")


def test_two_services_are_independent() -> None:
    with calling() as one, calling() as other:
        one.new_session()

        assert other.service.requests() == []
        assert one.service.base_url != other.service.base_url


def test_path_prefix_is_part_of_the_base_url() -> None:
    with calling(path_prefix="/services/test") as caller:
        assert caller.service.base_url.endswith("/services/test")
        assert caller.new_session()
        assert caller.service.requests()[0].path == "/api/v1/create_session"


def test_requests_are_recorded_with_path_time_and_content() -> None:
    with calling() as caller:
        first, second = caller.new_session(), caller.new_session()

        one, two = caller.service.requests("create_session")

        assert first != second
        assert (one.number, two.number) == (0, 1)
        assert one.arrived_at <= two.arrived_at
        assert one.connection != two.connection
        assert one.headers["x-api-key"] == "tml-test"
        assert (one.body_bytes > 0, one.query, one.client_left) == (True, {}, False)
        caller.service.forget_requests()
        assert caller.service.requests() == []


def test_a_request_is_recorded_only_once_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told_before: list[int] = []

    with calling() as caller:

        def reading(*given: Any) -> Any:
            told_before.append(len(caller.service.requests("asample")))
            return read_request(*given)

        sampler_id = caller.new_sampler()
        monkeypatch.setattr(testing_service, "read_request", reading)
        caller.ask("asample", asample(sampler_id, 0))

        assert told_before == [0]
        assert [one.request.seq_id for one in caller.service.requests("asample")] == [0]


def test_waiting_for_missing_requests_reports_how_many_arrived() -> None:
    with calling() as caller:
        caller.new_session()

        with pytest.raises(TimeoutError, match="1 of 2 requests to create_session"):
            caller.service.wait_requests("create_session", 2, timeout_s=0.05)


def test_importing_tinsmith_does_not_load_it() -> None:
    program = "import sys, tinsmith; assert 'tinsmith.testing' not in sys.modules"

    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_ids_and_numbers_are_the_same_each_time() -> None:
    seen = []
    for _ in range(2):
        with calling() as caller:
            seen.append([caller.new_session(), caller.new_session()])

    assert seen[0] == seen[1]


def test_importing_the_test_service_loads_no_torch_and_no_web_framework() -> None:
    program = (
        "import sys, tinsmith.testing\n"
        "heavy = {'aiohttp', 'torch', 'transformers', 'tinker', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
