"""Runs, checkpoints and sessions: looking up, paging through, taking care."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import APIStatusError, NotFoundError, ValidationError
from tinsmith.testing import ScriptedService
from tinsmith.types import SessionSearchRequest

WAIT_S = 30.0


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


def test_a_checkpoint_can_be_published_kept_and_deleted(
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


def test_s38_all_items_come_once_over_pages(
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


def test_s38_runs_and_sessions_are_listed_whole(rest: RestClient, client: ServiceClient) -> None:
    made = [client.create_lora_training_client("m", rank=2).model_id for _ in range(5)]

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

    gone = rest.delete_checkpoints(training.model_id, checkpoint_type="sampler")

    left = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert len(gone) == 2
    assert [checkpoint.checkpoint_id for checkpoint in left] == ["weights/keep"]


def test_sessions_are_looked_up_and_searched(rest: RestClient, training: TrainingClient) -> None:
    session_id = rest.list_sessions().result(WAIT_S).sessions[0]

    held = rest.get_session(session_id).result(WAIT_S)
    found = rest.search_sessions(SessionSearchRequest(session_id=session_id)).result(WAIT_S)

    assert held.training_run_ids == [training.model_id]
    assert [summary.session_id for summary in found.sessions] == [session_id]


def test_a_run_of_nobody_is_not_found(rest: RestClient) -> None:
    with pytest.raises(NotFoundError):
        rest.get_training_run("nobody:train:0").result(WAIT_S)


def test_only_external_weights_have_files_to_fetch(rest: RestClient) -> None:
    with pytest.raises(ValidationError, match="save_weights_external"):
        _ = rest.get_external_weights_urls("tinker://run/weights/c1")


def test_management_calls_name_their_sdk_and_method(
    rest: RestClient, service: ScriptedService
) -> None:
    rest.list_training_runs().result(WAIT_S)

    headers = service.requests("list_training_runs")[0].headers
    assert headers["x-sdk-method"] == "list_training_runs"
    assert headers["x-sdk-version"]
