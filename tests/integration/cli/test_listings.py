"""Runs, checkpoints and models, as tables and as JSON."""

from __future__ import annotations

import datetime

import pytest

from tests.integration.cli.command import Commands
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService


def test_runs_are_listed_with_the_requested_columns(
    tinsmith: Commands, training: TrainingClient
) -> None:
    training.save_state("first").result()

    ended = tinsmith.run("run", "list", "-c", "id,lora,checkpoint")

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "1 training run",
        "",
        f"Run ID{' ' * (len(training.model_id) - 6)}  LoRA    Last Checkpoint",
        f"{training.model_id}  Rank 4  weights/first",
    ]


def test_a_run_in_json_has_every_field_and_missing_values_are_null(
    tinsmith: Commands, training: TrainingClient
) -> None:
    listed = tinsmith.run("run", "list", "--format", "json").json["runs"]
    shown = tinsmith.run("--format=json", "run", "info", training.model_id).json

    assert listed == [shown]
    assert shown["training_run_id"] == training.model_id
    assert shown["last_checkpoint"] is None
    assert shown["user_metadata"] == {"purpose": "a test"}


def test_times_in_json_are_iso(tinsmith: Commands, checkpoint: str) -> None:
    shown = tinsmith.run("checkpoint", "info", checkpoint, "-f", "json").json

    assert "T" in shown["time"]
    moment = datetime.datetime.fromisoformat(shown["time"])
    assert abs(datetime.datetime.now(datetime.UTC) - moment) < datetime.timedelta(hours=1)
    assert shown["expires_at"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("-f", "json", "run", "list"),
        ("run", "--format", "json", "list"),
        ("run", "list", "--format=json"),
        ("run", "list", "--limit", "5", "-fjson"),
    ],
)
def test_the_format_option_may_appear_anywhere(tinsmith: Commands, words: tuple[str, ...]) -> None:
    ended = tinsmith.run(*words)

    assert ended.json == {"runs": []}


def test_s38_a_listing_fetches_no_more_than_its_limit(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(5):
        training.save_state(f"number-{number}").result()

    ended = tinsmith.run("checkpoint", "list", "--limit", "2", "-f", "json")

    assert [one["checkpoint_id"] for one in ended.json["checkpoints"]] == [
        "weights/number-4",
        "weights/number-3",
    ]
    assert [asked.request.limit for asked in service.requests("list_user_checkpoints")] == [2]


def test_s38_a_full_listing_is_fetched_in_pages_of_a_thousand(
    tinsmith: Commands, training: TrainingClient, service: ScriptedService
) -> None:
    for number in range(25):
        training.save_state(f"number-{number}").result()

    ended = tinsmith.run("checkpoint", "list", "--limit", "0", "-f", "json")

    assert len(ended.json["checkpoints"]) == 25
    assert [asked.request.limit for asked in service.requests("list_user_checkpoints")] == [1000]


def test_a_title_says_how_many_are_not_shown(tinsmith: Commands, training: TrainingClient) -> None:
    for number in range(3):
        training.save_state(f"number-{number}").result()

    ended = tinsmith.run("checkpoint", "list", "--limit", "1")

    assert ended.out.splitlines()[0] == "1 checkpoint (2 more; use --limit to show them)"


def test_a_limit_larger_than_an_int64_is_accepted(tinsmith: Commands) -> None:
    ended = tinsmith.run("run", "list", "--limit", str(10**20), "-f", "json")

    assert ended.status == 0, ended.err


def test_all_checkpoints_of_a_run_are_listed_whatever_the_limit(
    tinsmith: Commands, training: TrainingClient
) -> None:
    for number in range(3):
        training.save_state(f"number-{number}").result()
    run_id = training.model_id

    ended = tinsmith.run("checkpoint", "list", "--run-id", run_id, "--limit", "1", "-f", "json")

    assert ended.json["run_id"] == run_id
    assert len(ended.json["checkpoints"]) == 3


def test_paths_are_never_truncated_without_a_terminal(tinsmith: Commands, checkpoint: str) -> None:
    ended = tinsmith.run("checkpoint", "list", environment={"COLUMNS": "20"})

    assert checkpoint in ended.out


def test_a_checkpoint_is_shown_with_the_adapter_of_its_run(
    tinsmith: Commands, checkpoint: str
) -> None:
    shown = tinsmith.run("checkpoint", "info", checkpoint)
    plain = tinsmith.run("checkpoint", "info", checkpoint, "-f", "json").json

    assert "Rank 4" in shown.out
    assert "Expires          Never" in shown.out
    assert (plain["is_lora"], plain["lora_rank"]) == (True, 4)


def test_a_missing_checkpoint_is_an_error_with_a_remedy(
    tinsmith: Commands, checkpoint: str
) -> None:
    ended = tinsmith.run("checkpoint", "info", f"{checkpoint}-not", "-f", "json")

    assert (ended.status, ended.out) == (1, "")
    assert "weights/first-not" in ended.error["message"]
    assert "tinsmith checkpoint list" in ended.error["remedy"]


def test_models_are_found_by_a_case_insensitive_substring(tinsmith: Commands) -> None:
    ended = tinsmith.run("model", "list", "QWEN", "-f", "json")

    assert [model["model_name"] for model in ended.json["models"]] == ["Qwen/Qwen3-8B"]


def test_an_unknown_model_name_is_a_failure(tinsmith: Commands) -> None:
    ended = tinsmith.run("model", "list", "no-such-model")

    assert (ended.status, ended.out) == (1, "")
    assert "no-such-model" in ended.err
    assert "tinsmith model list" in ended.err


@pytest.mark.parametrize("verb", ["publish", "unpublish"])
def test_publishing_says_what_was_done(
    tinsmith: Commands, checkpoint: str, verb: str, service: ScriptedService
) -> None:
    shown = tinsmith.run("checkpoint", verb, checkpoint)
    plain = tinsmith.run("checkpoint", verb, checkpoint, "-f", "json").json

    state = "public" if verb == "publish" else "private"
    assert shown.out == f"{checkpoint} is now {state}\n"
    assert plain == {"checkpoint_path": checkpoint, "public": verb == "publish"}
    assert len(service.requests(f"{verb}_checkpoint")) == 2


def test_setting_a_time_to_live_says_what_was_done(tinsmith: Commands, checkpoint: str) -> None:
    shown = tinsmith.run("checkpoint", "set-ttl", checkpoint, "--ttl", "7200")
    expires = tinsmith.run("checkpoint", "info", checkpoint, "-f", "json").json["expires_at"]
    removed = tinsmith.run("checkpoint", "set-ttl", checkpoint, "--remove", "-f", "json")

    assert shown.out == f"{checkpoint} expires in 7200 seconds\n"
    assert expires is not None
    assert removed.json == {"checkpoint_path": checkpoint, "ttl_seconds": None}
