"""`tinsmith checkpoint delete`: what it deletes, what it asks, and what it says of it."""

from __future__ import annotations

import datetime

import pytest

from tests.integration.cli.command import Commands
from tinsmith.cli.checkpoint_delete import CONCURRENCY
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService


@pytest.fixture
def paths(training: TrainingClient) -> list[str]:
    """Three training checkpoints and one for a sampler."""
    saved = [training.save_state(f"s{n}").result().path for n in range(3)]
    return [*saved, training.save_weights_for_sampler("d").result().path]


def left(tinsmith: Commands) -> int:
    return len(tinsmith.run("checkpoint", "list", "-f", "json").json["checkpoints"])


def test_named_checkpoints_are_deleted(tinsmith: Commands, paths: list[str]) -> None:
    ended = tinsmith.run("checkpoint", "delete", paths[0], paths[1], paths[0], "--yes")

    assert (ended.status, ended.out) == (0, "Deleted 2 checkpoints\n")
    assert left(tinsmith) == 2


@pytest.mark.parametrize("kind", ["sampler", "sampler_weights"])
def test_checkpoints_of_a_run_are_deleted_by_type(
    tinsmith: Commands, training: TrainingClient, paths: list[str], kind: str
) -> None:
    ended = tinsmith.run(
        "checkpoint", "delete", "--run-id", training.model_id, "--type", kind, "-y", "-f", "json"
    )

    assert ended.json == {"deleted_count": 1, "failed": [], "unknown": []}
    listed = tinsmith.run("checkpoint", "list", "-f", "json").json["checkpoints"]
    assert paths[3] not in {one["tinker_path"] for one in listed}


def test_checkpoints_of_a_run_are_chosen_by_time(
    tinsmith: Commands, training: TrainingClient, paths: list[str]
) -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    run = ("checkpoint", "delete", "--run-id", training.model_id, "-y")

    none = tinsmith.run(*run, "--after", soon.isoformat())
    every = tinsmith.run(*run, "--before", soon.isoformat(), "--after", "2020-01-01")

    assert (none.status, none.out) == (0, "Nothing to delete\n")
    assert every.out == "Deleted 4 checkpoints\n"
    assert left(tinsmith) == 0
    assert len(paths) == 4


def test_a_dry_run_lists_and_deletes_nothing(
    tinsmith: Commands, training: TrainingClient, paths: list[str], service: ScriptedService
) -> None:
    run = ("checkpoint", "delete", "--run-id", training.model_id, "--dry-run")

    shown, plain = tinsmith.run(*run), tinsmith.run(*run, "-f", "json")

    assert shown.status == 0
    assert shown.out.startswith("Would delete 4 checkpoints\n")
    assert "Total size: " in shown.out
    assert all(path in shown.out for path in paths)
    assert {one["tinker_path"] for one in plain.json["would_delete"]} == set(paths)
    assert service.requests("delete_checkpoint") == []


@pytest.mark.parametrize(
    ("answer", "status", "remaining"), [("y\n", 0, 0), ("n\n", 1, 4), ("", 1, 4)]
)
def test_delete_asks_for_confirmation_and_treats_no_answer_as_no(
    tinsmith: Commands,
    training: TrainingClient,
    paths: list[str],
    answer: str,
    status: int,
    remaining: int,
) -> None:
    ended = tinsmith.run("checkpoint", "delete", "--run-id", training.model_id, text=answer)

    assert ended.status == status
    assert "Continue? [y/N]" in ended.err
    assert all(path in ended.err for path in paths)
    assert left(tinsmith) == remaining
    assert ("nothing was deleted" in ended.err) == bool(status)


def test_a_failed_deletion_is_reported_and_fails_the_command(
    tinsmith: Commands, training: TrainingClient, paths: list[str], service: ScriptedService
) -> None:
    service.faults.add(
        on="delete_checkpoint",
        times=None,
        status=403,
        body={"detail": "not yours"},
        when=lambda asked: asked.request.checkpoint_id == "weights/s1",
    )

    ended = tinsmith.run("checkpoint", "delete", "--run-id", training.model_id, "-y", "-f", "json")

    assert ended.status == 1
    assert ended.json == {
        "deleted_count": 3,
        "failed": [{"tinker_path": paths[1], "error": "permission denied: not yours (403)"}],
        "unknown": [],
    }
    assert ended.error["message"] == "failed to delete 1 of 4 checkpoints"


def test_a_deletion_whose_reply_was_lost_is_not_a_failure(
    tinsmith: Commands, training: TrainingClient, paths: list[str], service: ScriptedService
) -> None:
    # The service does not know the second try for the first, and says that nothing is there.
    for fault in ({"lose_reply": True}, {"nth": 2, "status": 404}):
        service.faults.add(
            on="delete_checkpoint",
            when=lambda asked: asked.request.checkpoint_id == "weights/s0",
            **fault,
        )

    ended = tinsmith.run("checkpoint", "delete", "--run-id", training.model_id, "-y")

    assert (ended.status, ended.out) == (0, f"Deleted {len(paths)} checkpoints\n")
    assert 404 in [asked.status for asked in service.requests("delete_checkpoint")]


def test_a_named_checkpoint_that_does_not_exist_is_a_failure(
    tinsmith: Commands, paths: list[str]
) -> None:
    wrong = f"{paths[0]}-misspelt"

    ended = tinsmith.run("checkpoint", "delete", wrong, paths[1], "-y", "-f", "json")

    assert ended.status == 1
    assert ended.json["deleted_count"] == 1
    assert [failed["tinker_path"] for failed in ended.json["failed"]] == [wrong]


def test_deletes_share_a_few_connections(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(3 * CONCURRENCY):
        training.save_state(f"many-{number}").result()

    ended = tinsmith.run("checkpoint", "delete", "--run-id", training.model_id, "-y")

    asked = service.requests("delete_checkpoint")
    assert ended.out == f"Deleted {3 * CONCURRENCY} checkpoints\n"
    assert len({one.connection for one in asked}) <= CONCURRENCY


def test_ctrl_c_reports_which_checkpoints_were_deleted_and_which_are_unknown(
    tinsmith: Commands, training: TrainingClient, paths: list[str], service: ScriptedService
) -> None:
    hold = service.faults.hold(
        on="delete_checkpoint", when=lambda asked: asked.request.checkpoint_id == "weights/s1"
    )
    process = tinsmith.start("checkpoint", "delete", "--run-id", training.model_id, "-y", "-fjson")
    service.wait_requests("delete_checkpoint", 4)
    hold.wait_held(1)

    ended = tinsmith.interrupted(process)

    assert ended.status == 130
    assert paths[1] in ended.json["unknown"]
    assert ended.json["deleted_count"] + len(ended.json["unknown"]) == 4
