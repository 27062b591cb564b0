"""Runs, checkpoints and sessions: looking up, paging through, taking care."""

from __future__ import annotations

import asyncio
import datetime
import gc
import itertools
import json
import logging
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.integration.client.scripted_server import Connection, Received, scripted_server
from tinsmith.client import lease as sessions
from tinsmith.client.admin import AdminClient
from tinsmith.client.management.checkpoints import AT_ONCE
from tinsmith.client.management.sessions import TraceExportError
from tinsmith.client.rest import RestClient
from tinsmith.client.retry import NO_RETRIES
from tinsmith.client.service import ServiceClient
from tinsmith.client.session import Session
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    ExperimentalWarning,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import SessionSearchRequest

WAIT_S = 60.0


@pytest.fixture
def rest(service: ScriptedService) -> RestClient:
    return RestClient(base_url=service.base_url, api_key=service.api_key)


def test_a_run_is_found_by_id_and_by_the_path_of_its_checkpoint(
    rest: RestClient, training: TrainingClient
) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    by_id = rest.get_training_run(training.model_id).result(WAIT_S)
    by_path = asyncio.run(rest.get_training_run_by_tinker_path_async(path))

    assert by_id.training_run_id == by_path.training_run_id == training.model_id
    assert [
        c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints
    ] == [path]


def test_a_checkpoint_can_be_published_given_a_ttl_and_deleted(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(WAIT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(WAIT_S)
    rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)

    assert rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints == []
    ttls = [received.request.ttl_seconds for received in service.requests("set_checkpoint_ttl")]
    assert ttls == [7200, None]


def test_s38_taking_one_of_many_makes_one_request(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(7):
        training.save_state(f"c{number}").result(WAIT_S)

    first = next(rest.iter_checkpoints(page_size=3))

    assert first.checkpoint_id
    assert len(service.requests("list_user_checkpoints")) == 1


def test_s38_every_item_is_returned_once_across_pages(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(7):
        training.save_state(f"c{number}").result(WAIT_S)

    async def gathered() -> list[str]:
        return [c.checkpoint_id async for c in rest.iter_checkpoints(page_size=3)]

    in_thread = [checkpoint.checkpoint_id for checkpoint in rest.iter_checkpoints(page_size=3)]

    assert sorted(in_thread) == [f"weights/c{number}" for number in range(7)]
    assert asyncio.run(gathered()) == in_thread
    assert len(service.requests("list_user_checkpoints")) == 6


def test_s38_an_error_in_a_later_page_comes_after_the_items_before_it(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(5):
        training.save_state(f"c{number}").result(WAIT_S)
    service.faults.add("list_user_checkpoints", nth=2, status=422)
    pages = rest.iter_checkpoints(page_size=3)

    taken = list(itertools.islice(pages, 3))

    assert len(taken) == 3
    with pytest.raises(APIStatusError):
        next(pages)


def test_s38_runs_and_sessions_are_listed_completely(
    rest: RestClient, client: ServiceClient
) -> None:
    made = [client.create_lora_training_client("Qwen/Qwen3-8B", rank=2).model_id for _ in range(5)]

    runs = [run.training_run_id for run in rest.iter_training_runs(page_size=2)]
    sessions = list(rest.iter_sessions(page_size=1))

    assert sorted(runs) == sorted(made)
    assert len(sessions) == 1


def test_s38_no_page_is_larger_than_a_thousand(rest: RestClient) -> None:
    with pytest.raises(ValidationError, match="1000"):
        rest.iter_checkpoints(page_size=1001)


def test_a_run_s_checkpoints_are_deleted_by_type(
    rest: RestClient, training: TrainingClient
) -> None:
    training.save_state("keep").result(WAIT_S)
    training.save_weights_for_sampler("drop1").result(WAIT_S)
    training.save_weights_for_sampler("drop2").result(WAIT_S)

    report = rest.delete_checkpoints(training.model_id, checkpoint_type="sampler").result(WAIT_S)

    left = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert len(report.deleted) == 2
    assert report.failed == []
    assert [checkpoint.checkpoint_id for checkpoint in left] == ["weights/keep"]


def test_sessions_are_looked_up_and_searched(rest: RestClient, training: TrainingClient) -> None:
    session_id = rest.list_sessions().result(WAIT_S).sessions[0]

    held = rest.get_session(session_id).result(WAIT_S)
    with pytest.warns(ExperimentalWarning):
        found = rest.search_sessions(SessionSearchRequest(session_id=session_id)).result(WAIT_S)

    assert held.training_run_ids == [training.model_id]
    assert [summary.session_id for summary in found.sessions] == [session_id]


def test_an_unknown_run_is_not_found(rest: RestClient) -> None:
    with pytest.raises(NotFoundError):
        rest.get_training_run("nobody:train:0").result(WAIT_S)


def test_only_external_weights_have_file_urls(rest: RestClient) -> None:
    with pytest.raises(ValidationError, match="save_weights_external"):
        _ = rest.get_external_weights_urls("tinker://run/weights/c1")


def test_management_calls_name_their_sdk_and_method(
    rest: RestClient, service: ScriptedService
) -> None:
    rest.list_training_runs().result(WAIT_S)

    headers = service.requests("list_training_runs")[0].headers
    assert headers["x-sdk-method"] == "list_training_runs"
    assert headers["x-sdk-version"]


def test_clients_with_one_base_url_and_key_fetch_the_config_once(service: ScriptedService) -> None:
    first = RestClient(base_url=service.base_url, api_key=service.api_key)
    second = RestClient(base_url=service.base_url, api_key=service.api_key)

    first.list_sessions().result(WAIT_S)
    second.list_sessions().result(WAIT_S)

    assert len(service.requests("client_config")) == 1
    assert service.requests("create_session") == []


@pytest.mark.parametrize(
    "setting",
    [
        {"retry": NO_RETRIES},
        {"default_headers_overrides": {"X-Team": "red"}},
        {"project_id": "project-2"},
        {"proxy": "http://proxy:3128"},
        {"ca_file": "/etc/authorities.pem"},
        {"unix_socket": "/run/other"},
        {"tags": ["a"]},
        {"limiter_scope": "client"},
    ],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.parametrize("cls", [RestClient, AdminClient])
def test_s39_clients_with_different_settings_share_nothing(
    cls: type[RestClient | AdminClient], setting: dict[str, Any]
) -> None:
    plain, other, again = (
        cls(base_url="http://local", api_key="tml-a", **given) for given in ({}, setting, setting)
    )

    assert other.holder is again.holder
    assert other.holder is not plain.holder


def test_a_service_behind_a_socket_gets_custom_headers(
    tmp_path: pathlib.Path,
) -> None:
    async def scenario() -> None:
        path = str(tmp_path / "s")
        async with scripted_server(answer_listings, unix_socket=path) as server:
            rest = RestClient(
                base_url="http://tinsmith.local",
                api_key="tml-test",
                unix_socket=path,
                default_headers_overrides={"X-Team": "blue"},
            )

            found = await rest.list_sessions_async(limit=3)

            assert found.sessions == ["0", "1", "2"]
            assert {one.headers["x-team"] for one in server.received} == {"blue"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "setting", [{"retry": NO_RETRIES}, {"proxy": "http://proxy"}, {"api_key": "tml-b"}]
)
def test_extra_settings_next_to_a_service_client_are_rejected_not_ignored(
    client: ServiceClient, setting: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match="holder"):
        RestClient(client.holder, **setting)


def test_the_error_names_an_unknown_setting() -> None:
    with pytest.raises(TypeError, match="unknown argument of AdminClient: proxi"):
        AdminClient(base_url="http://local", api_key="tml-a", proxi="http://proxy")


def test_clients_with_different_keys_share_nothing(service: ScriptedService) -> None:
    good = RestClient(base_url=service.base_url, api_key=service.api_key)
    bad = RestClient(base_url=service.base_url, api_key="tml-other")

    good.list_sessions().result(WAIT_S)

    with pytest.raises(AuthenticationError):
        bad.list_sessions().result(WAIT_S)


def test_only_checkpoints_that_match_are_deleted(
    rest: RestClient, training: TrainingClient
) -> None:
    training.save_state("old").result(WAIT_S)
    middle = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints[0].time
    training.save_state("new").result(WAIT_S)

    planned = rest.delete_checkpoints(after=middle, dry_run=True).result(WAIT_S)
    untouched = len(rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints)
    report = asyncio.run(rest.delete_checkpoints_async(after=middle))

    assert [c.checkpoint_id for c in planned.deleted] == ["weights/new"]
    assert planned.is_dry_run
    assert untouched == 2
    assert [c.checkpoint_id for c in report.deleted] == ["weights/new"]
    left = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert [c.checkpoint_id for c in left] == ["weights/old"]


def test_times_without_an_offset_are_taken_as_utc(
    rest: RestClient, training: TrainingClient
) -> None:
    training.save_state("c1").result(WAIT_S)
    tomorrow = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    tomorrow += datetime.timedelta(days=1)

    none = rest.delete_checkpoints(after=tomorrow).result(WAIT_S)
    planned = rest.delete_checkpoints(before=tomorrow, dry_run=True).result(WAIT_S)

    assert none.deleted == []
    assert len(planned.deleted) == 1


def test_delete_checkpoints_without_a_filter_is_rejected(
    rest: RestClient, service: ScriptedService
) -> None:
    with pytest.raises(ValidationError, match="every checkpoint"):
        _ = rest.delete_checkpoints()

    assert service.requests() == []


def test_a_failed_deletion_is_reported_and_does_not_stop_the_others(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(4):
        training.save_state(f"c{number}").result(WAIT_S)
    service.faults.add(
        "delete_checkpoint",
        times=None,
        status=403,
        when=lambda received: received.request.checkpoint_id == "weights/c2",
    )

    report = rest.delete_checkpoints(training.model_id).result(WAIT_S)

    assert sorted(c.checkpoint_id for c in report.deleted) == [
        "weights/c0",
        "weights/c1",
        "weights/c3",
    ]
    assert [f.checkpoint.checkpoint_id for f in report.failed] == ["weights/c2"]
    assert isinstance(report.failed[0].error, PermissionDeniedError)


@pytest.mark.parametrize("is_forgetful", [False, True])
def test_a_deletion_whose_reply_was_lost_counts_as_done(
    rest: RestClient, training: TrainingClient, service: ScriptedService, is_forgetful: bool
) -> None:
    """Whether or not the service knows that it is the same deletion again."""
    training.save_state("c1").result(WAIT_S)
    service.faults.add("delete_checkpoint", lose_reply=True)
    if is_forgetful:
        service.faults.add("delete_checkpoint", nth=2, status=404)

    report = rest.delete_checkpoints(training.model_id).result(WAIT_S)

    assert [c.checkpoint_id for c in report.deleted] == ["weights/c1"]
    assert report.failed == []
    statuses = [received.status for received in service.requests("delete_checkpoint")]
    assert statuses == [None, 404 if is_forgetful else 204]


def test_a_single_deletion_whose_reply_was_lost_succeeds(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_state("c1").result(WAIT_S).path
    service.faults.add("delete_checkpoint", lose_reply=True)

    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)

    keys = [r.headers["x-idempotency-key"] for r in service.requests("delete_checkpoint")]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    with pytest.raises(NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)


LISTED = 3500


async def answer_listings(request: Received, connection: Connection) -> None:
    """A service with 3,500 of everything."""
    parts = urlsplit(request.target)
    asked = dict(parse_qsl(parts.query))
    offset, limit = int(asked.get("offset", 0)), int(asked.get("limit", 0))
    numbers = range(offset, min(offset + limit, LISTED))
    cursor = {"offset": offset, "limit": limit, "total_count": LISTED}
    time = "2026-01-01T00:00:00Z"
    bodies: dict[str, Any] = {
        "sessions": {"sessions": [str(n) for n in numbers], "cursor": cursor},
        "checkpoints": {
            "checkpoints": [
                {
                    "checkpoint_id": f"weights/{n}",
                    "checkpoint_type": "training",
                    "time": time,
                    "tinker_path": f"tinker://r/weights/{n}",
                }
                for n in numbers
            ],
            "cursor": cursor,
        },
        "training_runs": {
            "training_runs": [
                {
                    "training_run_id": str(n),
                    "base_model": "Qwen/Qwen3-8B",
                    "model_owner": "o",
                    "is_lora": True,
                    "last_request_time": time,
                }
                for n in numbers
            ],
            "cursor": cursor,
        },
    }
    body = json.dumps(bodies.get(parts.path.rsplit("/", 1)[-1], {})).encode()
    await connection.reply(body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("name", ["iter_sessions", "iter_checkpoints", "iter_training_runs"])
def test_s38_a_listing_of_3500_uses_the_fewest_possible_requests(name: str) -> None:
    async def scenario() -> None:
        async with scripted_server(answer_listings) as server:
            rest = RestClient(base_url=server.url, api_key="tml-test")

            def listed() -> list[Received]:
                return [one for one in server.received if "limit=" in one.target]

            await anext(getattr(rest, name)())
            assert len(listed()) == 1
            assert "limit=1000" in listed()[0].target

            everything = [repr(item) async for item in getattr(rest, name)()]
            assert len(everything) == len(set(everything)) == LISTED
            assert len(listed()) == 1 + 4

            in_thread = await asyncio.to_thread(lambda: list(getattr(rest, name)()))
            assert [repr(item) for item in in_thread] == everything

    asyncio.run(scenario())


def test_s38_sessions_are_all_listed_without_a_total_and_with_short_pages() -> None:
    async def answer(request: Received, connection: Connection) -> None:
        asked = dict(parse_qsl(urlsplit(request.target).query))
        offset = int(asked.get("offset", 0))
        body = {"sessions": [str(n) for n in range(offset, min(offset + 100, 250))]}
        await connection.reply(
            json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )

    async def scenario() -> None:
        async with scripted_server(answer) as server:
            rest = RestClient(base_url=server.url, api_key="tml-test")

            found = [session async for session in rest.iter_sessions()]

            assert found == [str(n) for n in range(250)]

    asyncio.run(scenario())


def test_a_checkpoint_is_copied_into_a_project(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    copied = rest.copy_weights(
        path, "project-2", ttl_seconds=7200, weights_access_token="tml-other-account"
    ).result(WAIT_S)

    assert copied != path
    assert rest.get_weights_info_by_tinker_path(copied).result(WAIT_S).is_lora
    asked = service.requests("copy_weights")[0]
    assert asked.headers["x-tinker-weights-access-token"] == "tml-other-account"
    assert asked.request.destination_project_id == "project-2"


def test_a_repeated_copy_request_makes_one_copy(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_state("c1").result(WAIT_S).path
    service.faults.add("copy_weights", times=2, status=503, after_work=True)
    before = len(list(rest.iter_training_runs()))

    asyncio.run(rest.copy_weights_async(path, "project-2"))

    assert len(list(rest.iter_training_runs())) == before + 1
    keys = {received.headers["x-idempotency-key"] for received in service.requests("copy_weights")}
    assert len(keys) == 1


def test_a_copy_needs_a_project(
    rest: RestClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="TINKER_PROJECT_ID"):
        _ = rest.copy_weights("tinker://run/weights/c1")

    monkeypatch.setenv("TINKER_PROJECT_ID", "project-of-mine")
    mine = RestClient(base_url=service.base_url, api_key=service.api_key)
    with pytest.raises(NotFoundError):
        mine.copy_weights("tinker://run/weights/c1").result(WAIT_S)
    assert service.requests("copy_weights")[0].request.destination_project_id == "project-of-mine"


def test_waiting_for_a_trace_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinsmith")
    with (
        running_service(trace_polls=2) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
        rest = RestClient(base_url=service.base_url, api_key=service.api_key)
        session_id = next(rest.iter_sessions())

        url = rest.export_session_trace(session_id, poll_every_s=0.01).result(WAIT_S)

        assert urllib.request.urlopen(url).status == 200
        assert len(service.requests("export_session_trace")) == 3
    told = [message for message in caplog.messages if "trace" in message]
    assert len(told) == 1
    assert session_id in told[0]


def test_a_trace_that_never_arrives_times_out() -> None:
    with (
        running_service(trace_polls=10**9) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
        rest = RestClient(base_url=service.base_url, api_key=service.api_key)

        with pytest.raises(APITimeoutError):
            rest.export_session_trace(next(rest.iter_sessions()), timeout=0.2).result(WAIT_S)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ({"status": "failed", "error": "no spans"}, TraceExportError, "no spans"),
        ({"status": "failed"}, RuntimeError, "no reason given"),
        ({"status": "ready"}, APIResponseValidationError, "no address"),
        ({"status": "lost"}, APIResponseValidationError, "lost"),
    ],
)
def test_a_trace_that_cannot_be_made_says_why(
    rest: RestClient,
    service: ScriptedService,
    body: dict[str, str],
    error: type[Exception],
    says: str,
) -> None:
    service.faults.add("export_session_trace", status=200, body=body)

    with pytest.raises(error, match=says):
        rest.export_session_trace("session-0").result(WAIT_S)


@pytest.mark.parametrize("archive_redirects", [False, True])
def test_an_archive_url_is_found_with_and_without_a_redirect(archive_redirects: bool) -> None:
    with (
        running_service(archive_redirects=archive_redirects) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        path = training.save_weights_for_sampler("c1").result(WAIT_S).path
        rest = RestClient(base_url=service.base_url, api_key=service.api_key)

        by_id = rest.get_checkpoint_archive_url(training.model_id, "sampler_weights/c1")
        by_path = asyncio.run(rest.get_checkpoint_archive_url_from_tinker_path_async(path))

        assert by_path.expires > datetime.datetime.now(datetime.UTC)
        contents = []
        for found in (by_id.result(WAIT_S), by_path):
            with urllib.request.urlopen(found.url) as fetched:
                contents.append(fetched.read())
        assert contents[0] == contents[1] != b""


def test_an_archive_url_without_an_expiry_gets_a_default_one(
    rest: RestClient, service: ScriptedService
) -> None:
    service.faults.add(
        "get_checkpoint_archive_url",
        status=302,
        headers={"Location": "https://h/a", "Expires": "-"},
    )

    found = rest.get_checkpoint_archive_url("run", "weights/c1").result(WAIT_S)

    assert found.url == "https://h/a"
    assert found.expires > datetime.datetime.now(datetime.UTC)


def test_whoami_with_a_plain_key_raises(rest: RestClient) -> None:
    with pytest.raises(RuntimeError, match="does not identify an account"):
        rest.whoami().result(WAIT_S)


def test_whoami_with_a_token_names_its_owner() -> None:
    with running_service(pjwt_auth_enabled=True) as service:
        rest = RestClient(base_url=service.base_url, api_key=service.api_key)

        me = asyncio.run(rest.whoami_async())

    assert (me.user_urn, me.org_urn) == ("tml:user:default", "tml:organization:default")
    assert me.email


def test_calls_by_path_name_their_own_method(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    rest.get_training_run_by_tinker_path(path).result(WAIT_S)
    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)

    named = [received.headers.get("x-sdk-method") for received in service.requests()]
    assert [name for name in named if name is not None] == [
        "get_training_run_by_tinker_path",
        "publish_checkpoint_from_tinker_path",
        "delete_checkpoint_from_tinker_path",
    ]


def test_a_call_that_exceeds_its_timeout_fails(rest: RestClient, service: ScriptedService) -> None:
    with service.faults.hold("list_sessions"):
        with pytest.raises(APITimeoutError, match="list_sessions"):
            rest.list_sessions(timeout=0.2).result(WAIT_S)
        with pytest.raises(APITimeoutError):
            next(rest.iter_sessions(timeout=0.2))
        with pytest.raises(APITimeoutError):
            asyncio.run(rest.list_sessions_async(timeout=0.2))


def test_a_rest_client_of_a_service_client_rejects_its_own_credentials(
    client: ServiceClient,
) -> None:
    with pytest.warns(FutureWarning, match="RestClient"):
        rest = client.create_rest_client()

    assert rest.list_sessions().result(WAIT_S).sessions == []
    with pytest.raises(ValidationError):
        RestClient(rest._lease, api_key="tml-other")


def test_each_client_has_its_own_retry_budget(service: ScriptedService) -> None:
    hasty = RestClient(base_url=service.base_url, api_key=service.api_key, retry=NO_RETRIES)
    patient = RestClient(base_url=service.base_url, api_key=service.api_key)
    hasty.list_sessions().result(WAIT_S)
    service.faults.add("list_sessions", times=2, status=503)

    with pytest.raises(InternalServerError):
        hasty.list_sessions().result(WAIT_S)

    assert patient.list_sessions().result(WAIT_S).sessions == []


def test_a_closed_port_is_reported_within_seconds(unused_address: str) -> None:
    rest = RestClient(base_url=unused_address, api_key="tml-test")

    with pytest.raises(APIConnectionError, match="check the base URL"):
        rest.list_sessions().result(WAIT_S)


@pytest.fixture
def unused_address() -> Iterator[str]:
    with socket.socket() as bound:  # bound, and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_shared_connections_are_closed_with_the_last_client(service: ScriptedService) -> None:
    def open_here() -> list[Session]:
        gc.collect()
        return [s for s in sessions._open_sessions if s.settings.base_url == service.base_url]

    first = RestClient(base_url=service.base_url, api_key=service.api_key)
    second = RestClient(base_url=service.base_url, api_key=service.api_key)
    first.list_sessions().result(WAIT_S)
    kept = open_here()[0]
    del first
    assert second.list_sessions().result(WAIT_S).sessions == []
    assert open_here() == [kept]

    del second
    deadline = time.monotonic() + WAIT_S
    while not kept.is_closing:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_does_not_use_its_parent_s_connections(service: ScriptedService) -> None:
    program = f"""
import os
from tinsmith.client.rest import RestClient
from tinsmith.client.retry import NO_RETRIES
def rest():
    return RestClient(base_url={service.base_url!r}, api_key={service.api_key!r})
parents = rest()
parents.list_sessions().result(30)
child = os.fork()
if child == 0:
    assert rest().list_sessions().result(30).sessions == []
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
parents.list_sessions().result(30)
"""
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)

    assert result.returncode == 0
    connections = {received.connection for received in service.requests("list_sessions")}
    assert len(service.requests("list_sessions")) == 3
    assert len(connections) == 2


def test_concurrent_deletions_are_limited(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(AT_ONCE + 4):
        training.save_state(f"c{number}").result(WAIT_S)

    with service.faults.hold("delete_checkpoint") as held:
        deleting = rest.delete_checkpoints(training.model_id)
        held.wait_held(AT_ONCE)
    report = deleting.result(WAIT_S)

    assert held.most_held == AT_ONCE
    assert len(report.deleted) == AT_ONCE + 4


def test_a_listing_that_fails_deletes_nothing(
    rest: RestClient, training: TrainingClient, service: ScriptedService
) -> None:
    training.save_state("c1").result(WAIT_S)
    service.faults.add("list_user_checkpoints", status=403)

    with pytest.raises(PermissionDeniedError):
        rest.delete_checkpoints(checkpoint_type="training").result(WAIT_S)

    assert service.requests("delete_checkpoint") == []
