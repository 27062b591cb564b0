"""`tinsmith checkpoint download` and `session export-trace`, as processes."""

from __future__ import annotations

import datetime
import json
import pathlib
import resource

import pytest

from tests.integration.cli.command import Commands
from tinsmith.cli.fetch import RANGE_BYTES
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types.checkpoints import ExternalWeightsUrlsResponse
from tinsmith.wire.exchange import to_reply

NAMES = ["adapter_config.json", "adapter_model.safetensors"]
TRAINING_NAMES = ["optimizer.safetensors", "state.json"]


def folder_of(tinsmith: Commands, path: str) -> pathlib.Path:
    name = path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    assert ":" not in name
    return tinsmith.folder / name


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def exported(training: TrainingClient) -> str:
    return training.save_weights_external("shared").result().path


def test_exported_weights_are_downloaded_into_their_own_folder(
    tinsmith: Commands, exported: str
) -> None:
    ended = tinsmith.run("checkpoint", "download", exported, "-f", "json")

    folder = folder_of(tinsmith, exported)
    assert ended.status == 0, ended.err
    assert names_in(folder) == NAMES
    assert json.loads((folder / NAMES[0]).read_text())["r"] == 4
    assert ended.json == {
        "checkpoint_path": exported,
        "destination": folder.name,
        "file_size_bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def test_a_training_checkpoint_is_downloaded_as_an_archive_without_a_session(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    sessions = len(service.requests("create_session"))

    ended = tinsmith.run("checkpoint", "download", checkpoint, "-o", "models")

    folder = tinsmith.folder / "models" / folder_of(tinsmith, checkpoint).name
    assert ended.status == 0, ended.err
    assert f"Downloaded to    models/{folder.name}" in ended.out
    assert set(names_in(folder)) == {*NAMES, *TRAINING_NAMES}
    assert len(service.requests("create_session")) == sessions


def test_a_sampler_checkpoint_can_be_downloaded_if_the_service_archives_it(
    tinsmith: Commands, training: TrainingClient
) -> None:
    path = training.save_weights_for_sampler("drawn").result().path

    ended = tinsmith.run("checkpoint", "download", path)

    assert ended.status == 0, ended.err
    assert names_in(folder_of(tinsmith, path)) == NAMES


def test_a_sampler_checkpoint_without_an_archive_is_rejected_with_a_fix(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    path = training.save_weights_for_sampler("drawn").result().path
    service.faults.add(on="get_checkpoint_archive_url", times=None, status=404)

    ended = tinsmith.run("checkpoint", "download", path, "-f", "json")

    assert ended.status == 1
    assert "offers no archive" in ended.error["message"]
    assert "training checkpoint" in ended.error["remedy"]


def test_without_archives_a_temporary_export_is_made_and_deleted(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    service.faults.add(on="get_checkpoint_archive_url", times=None, status=404)

    ended = tinsmith.run("checkpoint", "download", checkpoint)

    assert ended.status == 0, ended.err
    assert names_in(folder_of(tinsmith, checkpoint)) == NAMES
    saved = service.requests("save_weights_external")
    assert [asked.request.ttl_seconds for asked in saved] == [3600]
    deleted = [asked.request.checkpoint_id for asked in service.requests("delete_checkpoint")]
    assert deleted == ["external_weights/download"]
    assert len(service.requests("set_checkpoint_ttl")) == 1


def test_failing_to_delete_an_export_is_reported_but_not_a_failure(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    service.faults.add(on="get_checkpoint_archive_url", times=None, status=404)
    service.faults.add(on="delete_checkpoint", times=None, status=403)

    ended = tinsmith.run("checkpoint", "download", checkpoint, "-f", "json")

    assert ended.status == 0
    assert ended.json["checkpoint_path"] == checkpoint
    assert "expires in 3600 s" in json.loads(ended.err)["warning"]


def test_the_session_of_an_export_is_finished(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    service.faults.add(on="get_checkpoint_archive_url", times=None, status=404)
    service.faults.add(on="download", times=None, status=404)

    ended = tinsmith.run("checkpoint", "download", checkpoint)

    assert ended.status == 1
    finished = service.requests("finish_session")
    assert [type(asked.request.reason).__name__ for asked in finished] == [
        "ClientSessionFinishErrored"
    ]
    assert len(service.requests("delete_checkpoint")) == 1


def test_a_checkpoint_that_does_not_exist_is_reported(tinsmith: Commands, checkpoint: str) -> None:
    ended = tinsmith.run("checkpoint", "download", f"{checkpoint}-not", "-f", "json")

    assert ended.status == 1
    assert ended.error["type"] == "NotFoundError"
    assert not list(tinsmith.folder.glob("*first-not"))


def test_an_existing_folder_is_replaced_only_with_force(tinsmith: Commands, exported: str) -> None:
    folder = folder_of(tinsmith, exported)
    folder.mkdir()
    (folder / "mine").write_text("keep me")

    refused = tinsmith.run("checkpoint", "download", exported)
    kept = names_in(folder)
    forced = tinsmith.run("checkpoint", "download", exported, "--force")

    assert (refused.status, kept) == (1, ["mine"])
    assert "--force" in refused.err
    assert forced.status == 0
    assert names_in(folder) == NAMES


def test_a_folder_is_replaced_only_once_the_new_one_is_complete(
    tinsmith: Commands, exported: str, service: ScriptedService
) -> None:
    folder = folder_of(tinsmith, exported)
    folder.mkdir()
    (folder / "mine").write_text("keep me")
    service.faults.add(on="download", times=None, status=404)

    ended = tinsmith.run("checkpoint", "download", exported, "--force")

    assert ended.status == 1
    assert names_in(folder) == ["mine"]


def test_ctrl_c_keeps_partial_downloads_but_nothing_under_the_final_name(
    tinsmith: Commands, exported: str, service: ScriptedService
) -> None:
    big = NAMES[1]
    hold = service.faults.hold(
        on="download",
        when=lambda asked: asked.path.endswith(big) and asked.headers["range"] != "bytes=0-0",
    )
    process = tinsmith.start("checkpoint", "download", exported)
    hold.wait_held(1)

    ended = tinsmith.interrupted(process)

    folder = folder_of(tinsmith, exported)
    assert (ended.status, ended.out) == (130, "")
    assert "Traceback" not in ended.err
    assert not folder.exists()
    assert folder.with_name(f"{folder.name}.partial").is_dir()

    service.faults.clear()
    service.forget_requests()
    again = tinsmith.run("checkpoint", "download", exported)

    assert again.status == 0, again.err
    assert names_in(folder) == NAMES
    assert not folder.with_name(f"{folder.name}.partial").exists()


def test_a_killed_download_resumes_with_its_next_piece(
    tinsmith: Commands, service: ScriptedService
) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        path = training.save_weights_external("large").result().path
    files = {NAMES[0]: b"{}", NAMES[1]: b"begins" + bytes(RANGE_BYTES)}  # two pieces
    urls = {name: service.downloads.put(f"large/{name}", files[name]) for name in NAMES}
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    signed = to_reply(ExternalWeightsUrlsResponse(urls=urls, expires=expires))
    service.answers["get_external_weights_urls"] = lambda _: signed
    second = f"bytes={RANGE_BYTES}-"
    hold = service.faults.hold(
        on="download", when=lambda asked: asked.headers["range"].startswith(second)
    )
    process = tinsmith.start("checkpoint", "download", path, "--connections", "1")
    hold.wait_held(1)
    process.kill()
    process.communicate()
    service.faults.clear()
    service.forget_requests()

    ended = tinsmith.run("checkpoint", "download", path, "--connections", "1")

    assert ended.status == 0, ended.err
    parts = [a.headers["range"] for a in service.requests("download") if a.path.endswith(NAMES[1])]
    assert len(parts) == 2
    assert parts[0] == "bytes=0-0"
    assert parts[1].startswith(second)
    weights = (folder_of(tinsmith, path) / NAMES[1]).read_bytes()
    assert weights.endswith(bytes(RANGE_BYTES))


def test_ctrl_c_during_an_export_deletes_it_and_ends_the_session(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    service.faults.add(on="get_checkpoint_archive_url", times=None, status=404)
    hold = service.faults.hold(on="download")
    process = tinsmith.start("checkpoint", "download", checkpoint, "--no-resume")
    hold.wait_held(1)

    ended = tinsmith.interrupted(process)

    assert ended.status == 130
    assert len(service.requests("delete_checkpoint")) == 1
    reasons = [type(asked.request.reason).__name__ for asked in service.requests("finish_session")]
    assert reasons == ["ClientSessionFinishInterrupted"]
    assert [path.name for path in tinsmith.folder.iterdir()] == ["home"]


def test_downloading_a_missing_checkpoint_leaves_nothing_behind(tinsmith: Commands) -> None:
    ended = tinsmith.run("checkpoint", "download", "tinker://none/weights/none")

    assert ended.status == 1
    assert not list(tinsmith.folder.glob("*.partial"))


def test_a_full_disk_is_reported_immediately(tinsmith: Commands, service: ScriptedService) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=256)
        path = training.save_weights_external("large").result().path
    limit = (4000, 4000)  # as large as any file may get

    ended = tinsmith.run(
        *("checkpoint", "download", path, "-f", "json"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )

    assert ended.status == 1
    assert ": File too large" in ended.error["message"]
    assert "free disk space" in ended.error["remedy"]
    asked = [one for one in service.requests("download") if one.path.endswith(NAMES[1])]
    assert len(asked) == 2  # for the size, and for the file, which is not tried again


@pytest.mark.parametrize("name", ["../../evil", "/tmp/tinsmith-evil"])
def test_files_that_would_be_written_outside_the_folder_are_rejected(
    tinsmith: Commands, exported: str, service: ScriptedService, name: str
) -> None:
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    url = service.downloads.put("evil", b"evil")
    service.faults.add(
        on="get_external_weights_urls",
        status=200,
        body={"urls": {name: url}, "expires": expires.isoformat()},
    )

    ended = tinsmith.run("checkpoint", "download", exported, "-f", "json")

    assert ended.status == 1
    assert "unsafe file name" in ended.error["message"]
    assert not list(tinsmith.folder.parent.rglob("*evil*"))


def test_a_broken_archive_is_not_kept(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    url = service.downloads.put("broken.tar", b"this is no archive" * 100)
    service.faults.add(
        on="get_checkpoint_archive_url",
        status=200,
        body={"url": url, "expires": expires.isoformat()},
    )

    broken = tinsmith.run("checkpoint", "download", checkpoint)
    again = tinsmith.run("checkpoint", "download", checkpoint)

    assert broken.status == 1
    assert "cannot extract the archive" in broken.err
    assert again.status == 0, again.err


def test_downloads_work_with_old_services_that_redirect_to_an_archive(
    tmp_path: pathlib.Path,
) -> None:
    with running_service(archive_redirects=True, downloads_in_parts=False) as service:
        tinsmith = Commands(service, tmp_path)
        with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
            path = (
                client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
                .save_state("a")
                .result()
                .path
            )

        ended = tinsmith.run("checkpoint", "download", path)

    assert ended.status == 0, ended.err
    assert set(names_in(folder_of(tinsmith, path))) == {*NAMES, *TRAINING_NAMES}


def test_a_trace_is_written_to_a_file(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    session_id = training.model_id.split(":")[0]

    plain = tinsmith.run("session", "export-trace", session_id, "-f", "json")
    named = tinsmith.run("session", "export-trace", session_id, "-o", "trace.bin")
    (tinsmith.folder / "traces").mkdir()
    within = tinsmith.run("session", "export-trace", session_id, "-o", "traces/")
    address = tinsmith.run("session", "export-trace", session_id, "--url-only")

    assert plain.status == 0, plain.err
    trace = tinsmith.folder / f"{session_id}.pftrace"
    assert plain.json == {
        "session_id": session_id,
        "destination": trace.name,
        "file_size_bytes": trace.stat().st_size,
    }
    assert named.status == within.status == 0
    assert (tinsmith.folder / "traces" / trace.name).read_bytes() == trace.read_bytes()
    assert (tinsmith.folder / "trace.bin").read_bytes() == trace.read_bytes()
    assert address.out.strip().startswith(service.base_url)
    assert not list(tinsmith.folder.glob("*.partial"))


def test_an_export_that_never_finishes_times_out(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    session_id = training.model_id.split(":")[0]
    service.faults.add(
        on="export_session_trace", times=None, status=200, body={"status": "pending"}
    )

    ended = tinsmith.run("session", "export-trace", session_id, "--timeout", "0.5", "-f", "json")

    assert ended.status == 1
    assert ended.error["type"] == "APITimeoutError"
    assert "--timeout" in ended.error["remedy"]
