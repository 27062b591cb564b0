"""How each public method of `RestClient` is called; the functions have the methods' names."""

from __future__ import annotations

import datetime
import urllib.request
from typing import Any

from tests.compatibility.caller import Caller
from tests.compatibility.calls import admin_client
from tests.compatibility.calls.service_client import check_telemetry
from tests.compatibility.stage import BASE_MODEL, PROJECT, Stage, download, settled

FAR = datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)


def _checkpoint(stage: Stage, path: str) -> Any:
    """As the service lists it; None if it does not."""
    listed = settled(stage.rest.list_checkpoints(stage.run_id)).checkpoints
    return next((entry for entry in listed if entry.tinker_path == path), None)


def _parts(path: str) -> tuple[str, str]:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return run, checkpoint


# Training runs


def get_training_run(stage: Stage, call: Caller) -> None:
    _check_run(stage, call(stage.rest, stage.run_id))
    _check_run(stage, call(stage.rest, stage.run_id, access_scope="accessible"))


def get_training_run_by_tinker_path(stage: Stage, call: Caller) -> None:
    _check_run(stage, call(stage.rest, stage.state))


def _check_run(stage: Stage, run: Any) -> None:
    assert (run.training_run_id, run.base_model) == (stage.run_id, BASE_MODEL)


def list_training_runs(stage: Stage, call: Caller) -> None:
    assert stage.run_id in [
        run.training_run_id for run in call(stage.rest, limit=1000, offset=0).training_runs
    ]
    assert call(stage.rest, limit=1, offset=0, access_scope="accessible").training_runs


def get_weights_info_by_tinker_path(stage: Stage, call: Caller) -> None:
    info = call(stage.rest, stage.state)

    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 8)


# Checkpoints


def list_checkpoints(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    listed = call(stage.rest, stage.run_id).checkpoints

    assert path in [entry.tinker_path for entry in listed]


def list_user_checkpoints(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    answer = call(stage.rest, limit=1000)

    assert path in [entry.tinker_path for entry in answer.checkpoints]
    assert answer.cursor.total_count >= len(answer.checkpoints)


def delete_checkpoint(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    call(stage.rest, *_parts(path))

    assert _checkpoint(stage, path) is None


def delete_checkpoint_from_tinker_path(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    call(stage.rest, path)

    assert _checkpoint(stage, path) is None


def publish_checkpoint_from_tinker_path(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    call(stage.rest, path)

    assert _checkpoint(stage, path).public


def unpublish_checkpoint_from_tinker_path(stage: Stage, call: Caller) -> None:
    path = stage.new_state()
    settled(stage.rest.publish_checkpoint_from_tinker_path(path))

    call(stage.rest, path)

    assert not _checkpoint(stage, path).public


def set_checkpoint_ttl_from_tinker_path(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    call(stage.rest, path, 7200)
    # The oldest release with this method does not read when a checkpoint expires.
    expires = getattr(_checkpoint(stage, path), "expires_at", FAR)
    call(stage.rest, path, None)

    assert expires is not None
    assert getattr(_checkpoint(stage, path), "expires_at", None) is None


def get_checkpoint_archive_url(stage: Stage, call: Caller) -> None:
    assert download(call(stage.rest, *_parts(stage.sampler_weights)).url)


def get_checkpoint_archive_url_from_tinker_path(stage: Stage, call: Caller) -> None:
    assert download(call(stage.rest, stage.sampler_weights).url)


def get_external_weights_urls(stage: Stage, call: Caller) -> None:
    urls = call(stage.rest, stage.external_weights).urls

    assert "adapter_config.json" in [name.rpartition("/")[2] for name in urls]
    for url in urls.values():
        assert download(url)


def search_checkpoints(stage: Stage, call: Caller) -> None:
    name = stage.new_name()
    path = settled(stage.trainer.save_state(name, user_metadata={"name": name})).path
    request = stage.types.CheckpointSearchRequest(user_metadata={"name": name})

    found = call(stage.rest, request)

    assert [(one.tinker_path, one.base_model) for one in found.checkpoints] == [(path, BASE_MODEL)]
    assert found.next_cursor is None


def external_weights_upload_start(stage: Stage, call: Caller) -> None:
    started = call(stage.rest, base_model=BASE_MODEL, lora_config=stage.types.LoraConfig(rank=8))

    assert sorted(started.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    assert started.expires > datetime.datetime.now(datetime.UTC)


def external_weights_upload_finish(stage: Stage, call: Caller) -> None:
    files = settled(stage.rest.get_external_weights_urls(stage.external_weights)).urls
    lora = stage.types.LoraConfig(rank=8)
    started = settled(stage.rest.external_weights_upload_start(BASE_MODEL, lora))
    for name, url in started.urls.items():
        body = urllib.request.Request(url, data=download(files[name]), method="PUT")
        urllib.request.urlopen(body).close()

    path = call(stage.rest, started.upload_id).tinker_path

    assert settled(stage.rest.get_weights_info_by_tinker_path(path)).lora_rank == 8


def copy_weights(stage: Stage, call: Caller) -> None:
    path = call(stage.rest, stage.state, PROJECT, weights_access_token=stage.api_key)

    assert path.startswith("tinker://") and path != stage.state


# Sessions and samplers


def get_session(stage: Stage, call: Caller) -> None:
    assert stage.run_id in call(stage.rest, stage.session_id).training_run_ids


def list_sessions(stage: Stage, call: Caller) -> None:
    session_id = stage.session_id

    assert session_id in call(stage.rest, limit=1000).sessions


def search_sessions(stage: Stage, call: Caller) -> None:
    request = stage.types.SessionSearchRequest(session_id=stage.session_id)

    found = call(stage.rest, request).sessions

    assert [session.session_id for session in found] == [stage.session_id]


def assign_session_project(stage: Stage, call: Caller) -> None:
    call(stage.rest, stage.session_id, PROJECT)


def export_session_trace(stage: Stage, call: Caller) -> None:
    stage.sampler  # noqa: B018 - so that there is something to trace

    assert download(call(stage.rest, stage.session_id))


def get_sampler(stage: Stage, call: Caller) -> None:
    stage.sampler  # noqa: B018 - so that the session has one
    sampler_id = settled(stage.rest.get_session(stage.session_id)).sampler_ids[0]

    sampler = call(stage.rest, sampler_id)

    assert (sampler.sampler_id, sampler.base_model) == (sampler_id, BASE_MODEL)


# The account


def whoami(stage: Stage, call: Caller) -> None:
    assert call(stage.rest).user_urn


def get_audit_log(stage: Stage, call: Caller) -> None:
    admin_client.check_audit_log(stage, call, stage.rest)


def get_billing_usage(stage: Stage, call: Caller) -> None:
    admin_client.check_billing_usage(stage, call, stage.rest)


def get_current_checkpoint_storage_usage(stage: Stage, call: Caller) -> None:
    admin_client.check_storage_usage(stage, call, stage.rest)


def get_telemetry(stage: Stage, call: Caller) -> None:
    check_telemetry(stage, call(stage.rest))


# Of our client alone


def delete_checkpoints(stage: Stage, call: Caller) -> None:
    stage.state  # noqa: B018 - so that there is something to delete

    report = call(stage.rest, stage.run_id, dry_run=True)

    assert report is not None and _checkpoint(stage, stage.state) is not None


def iter_checkpoints(stage: Stage, call: Caller) -> None:
    path = stage.new_state()

    assert path in [entry.tinker_path for entry in call(stage.rest)]


def iter_sessions(stage: Stage, call: Caller) -> None:
    session_id = stage.session_id

    assert session_id in list(call(stage.rest))


def iter_training_runs(stage: Stage, call: Caller) -> None:
    run_id = stage.run_id

    assert run_id in [run.training_run_id for run in call(stage.rest)]


def holder(stage: Stage, call: Caller) -> None:
    assert call(stage.rest) is not None
