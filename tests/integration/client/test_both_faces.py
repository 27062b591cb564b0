"""Every management call has two faces, which send the same and give the same kind of answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client.admin import AdminClient
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService
from tinsmith.types import CheckpointSearchRequest, LoraConfig, SessionSearchRequest

WAIT_S = 60.0
BASE_MODEL = "Qwen/Qwen3-8B"
FORTNIGHT = ("2026-01-01T00:00:00Z", "2026-01-15T00:00:00Z")
INTRODUCTIONS = {"client_config", "client_dynamic_config"}


class There:
    """What the service has, for the calls to name."""

    def __init__(self, training: TrainingClient) -> None:
        self.run = training.model_id
        self.session = training.holder.get_session_id()
        self.path = training.save_state("c1").result(WAIT_S).path
        self.checkpoint = self.path.split("/", 3)[-1]
        self.external = training.save_weights_external("e1").result(WAIT_S).path
        sampler = training.save_weights_and_get_sampling_client()
        self.sampler = sampler._sampler.sampling_session_id


Arguments = Callable[[There], tuple[Any, ...]]
ADMIN: dict[str, Arguments] = {
    "get_audit_log": lambda _: ("checkpoints",),
    "get_billing_usage": lambda _: FORTNIGHT,
    "get_current_checkpoint_storage_usage": lambda _: (None,),
}
REST: dict[str, Arguments] = {
    **ADMIN,
    "assign_session_project": lambda there: (there.session, "p1"),
    "copy_weights": lambda there: (there.path, "p1"),
    "delete_checkpoint": lambda there: (there.run, there.checkpoint),
    "delete_checkpoint_from_tinker_path": lambda there: (there.path,),
    "delete_checkpoints": lambda there: (there.run, "training", None, None, True),
    "external_weights_upload_start": lambda _: (BASE_MODEL, LoraConfig(rank=8)),
    "export_session_trace": lambda there: (there.session,),
    "get_checkpoint_archive_url": lambda there: (there.run, there.checkpoint),
    "get_checkpoint_archive_url_from_tinker_path": lambda there: (there.path,),
    "get_external_weights_urls": lambda there: (there.external,),
    "get_sampler": lambda there: (there.sampler,),
    "get_session": lambda there: (there.session,),
    "get_training_run": lambda there: (there.run,),
    "get_training_run_by_tinker_path": lambda there: (there.path,),
    "get_weights_info_by_tinker_path": lambda there: (there.path,),
    "list_checkpoints": lambda there: (there.run,),
    "list_sessions": lambda _: (5, 0),
    "list_training_runs": lambda _: (5, 0),
    "list_user_checkpoints": lambda _: (5, 0),
    "publish_checkpoint_from_tinker_path": lambda there: (there.path,),
    "search_checkpoints": lambda _: (CheckpointSearchRequest(),),
    "search_sessions": lambda _: (SessionSearchRequest(),),
    "set_checkpoint_ttl_from_tinker_path": lambda there: (there.path, 3600),
    "unpublish_checkpoint_from_tinker_path": lambda there: (there.path,),
}
WITHOUT_REQUEST = {"whoami"}
"""Answered from the token alone; `test_rest.py` has it."""
NEEDS_FILES = {"external_weights_upload_finish"}
"""Makes a checkpoint of files that were sent; `test_uploads.py` has it."""
CASES = [(RestClient, name) for name in REST] + [(AdminClient, name) for name in ADMIN]


@pytest.mark.parametrize(("kind", "table"), [(RestClient, REST), (AdminClient, ADMIN)])
def test_no_sync_async_pair_is_left_out(kind: type, table: dict[str, Arguments]) -> None:
    twins = {name.removesuffix("_async") for name in dir(kind) if name.endswith("_async")}

    assert twins - WITHOUT_REQUEST - NEEDS_FILES == set(table)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # some are deprecated or experimental
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_sync_and_async_calls_send_the_same_and_return_the_same_type(
    kind: type[RestClient | AdminClient],
    name: str,
    service: ScriptedService,
    training: TrainingClient,
) -> None:
    client = kind(base_url=service.base_url, api_key=service.api_key)
    arguments = REST[name](There(training))

    service.forget_requests()
    blocking = getattr(client, name)(*arguments).result(WAIT_S)
    first = _asked(service)
    training.save_state("c1", overwrite=True).result(WAIT_S)  # some of them delete it
    awaited = asyncio.run(_awaited(client, name, arguments))
    second = _asked(service)[len(first) :]

    assert first
    assert second == first
    assert type(awaited) is type(blocking)


async def _awaited(client: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    return await getattr(client, f"{name}_async")(*arguments)


def _asked(service: ScriptedService) -> list[tuple[str | None, Any, str | None]]:
    """What the client asked for, its introductions and heartbeats aside."""
    return [
        (received.endpoint, received.request, received.headers["x-sdk-method"])
        for received in service.requests()
        if "x-sdk-method" in received.headers and received.endpoint not in INTRODUCTIONS
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # to load into a model is deprecated
@pytest.mark.parametrize("name", ["load_state", "load_state_with_optimizer"])
def test_sync_and_async_loading_send_the_same_requests(
    name: str, service: ScriptedService, training: TrainingClient
) -> None:
    saved = training.save_state("c1").result(WAIT_S).path

    async def awaited() -> Any:
        future = await getattr(training, f"{name}_async")(saved)
        return await future

    service.forget_requests()
    blocking = getattr(training, name)(saved).result(WAIT_S)
    sent = len(_numbered(service))
    answer = asyncio.run(awaited())

    first, second = _numbered(service)[:sent], _numbered(service)[sent:]
    assert first
    assert second == first
    assert type(answer) is type(blocking)


def test_save_weights_external_async_returns_a_path(training: TrainingClient) -> None:
    async def save() -> str:
        future = await training.save_weights_external_async("e1")
        return (await future).path

    assert asyncio.run(save()).endswith("/e1")


def test_models_are_created_from_a_checkpoint_and_unloaded_by_async_calls(
    client: ServiceClient, service: ScriptedService, training: TrainingClient
) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    async def use() -> tuple[str, str]:
        second = await client.create_training_client_from_state_async(path)
        await (await second.unload_model_async())
        third = await client.create_training_client_from_state_async(path)
        await client.unload_model_async(third.model_id)
        return second.model_id, third.model_id

    made = asyncio.run(use())

    assert [one.request.model_id for one in service.requests("unload_model")] == list(made)
    assert all(one.request.optimizer is False for one in service.requests("load_weights"))


def _numbered(service: ScriptedService) -> list[tuple[str | None, Any]]:
    """The model's calls without their numbers."""
    return [
        (received.endpoint, received.request.model_copy(update={"seq_id": 0}))
        for received in service.requests()
        if getattr(received.request, "seq_id", None) is not None
    ]
