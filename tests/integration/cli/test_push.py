"""`tinsmith checkpoint push-hf`, with the real package and a small hub."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from tests.integration.cli.command import Commands
from tests.integration.cli.small_hub import SmallHub
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService

RECIPIENT = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with SmallHub() as hub:
        yield hub


@pytest.fixture
def tinsmith(service: ScriptedService, tmp_path: pathlib.Path, hub: SmallHub) -> Commands:
    """The command, signed in at the small hub."""
    commands = Commands(service, tmp_path)
    commands.environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_good",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return commands


def test_an_adapter_is_uploaded_privately_with_a_model_card(
    tinsmith: Commands, checkpoint: str, hub: SmallHub
) -> None:
    ended = tinsmith.run("checkpoint", "push-hf", checkpoint, "-f", "json")

    assert ended.status == 0, ended.err
    run = checkpoint.removeprefix("tinker://").partition("/")[0].replace(":", "-")
    name = f"somebody/tinker-Qwen3-8B-{run}"
    assert ended.json == {
        "checkpoint_path": checkpoint,
        "repo_id": name,
        "revision": "weights-first",
        "public": False,
    }
    assert hub.is_private == {name: True}
    assert hub.branches == ["weights-first"]
    assert set(hub.files) >= {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"]
    card = hub.files["README.md"].decode()
    assert f"tinker_path: {checkpoint}" in card
    assert "base_model: Qwen/Qwen3-8B" in card
    assert "| rank | 4 |" in card


def test_upload_options_take_effect(tinsmith: Commands, checkpoint: str, hub: SmallHub) -> None:
    ended = tinsmith.run(
        *("checkpoint", "push-hf", checkpoint, "-r", "team/mine", "--public", "--no-model-card"),
        *("--ignore-pattern", "*.safetensors", "--commit-message", "as trained"),
    )

    assert ended.status == 0, ended.err
    assert hub.is_private == {"team/mine": False}
    assert hub.branches == []
    assert set(hub.files) == {"adapter_config.json", "state.json"}
    assert hub.messages == ["as trained"]


@pytest.mark.parametrize(
    ("given", "published"),
    [("/srv/models/mine", "Qwen/Qwen3-8B"), ("somebody/else", "somebody/else")],
)
def test_local_folder_names_are_not_published(
    tinsmith: Commands, checkpoint: str, hub: SmallHub, given: str, published: str
) -> None:
    ended = tinsmith.run("checkpoint", "push-hf", checkpoint, "--base-model", given)

    assert ended.status == 0, ended.err
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == published


def test_a_repository_of_another_checkpoint_is_not_overwritten(
    tinsmith: Commands, checkpoint: str, hub: SmallHub
) -> None:
    hub.readme = b"---\ntinker_path: tinker://other/weights/x\n---\n"

    ended = tinsmith.run("checkpoint", "push-hf", checkpoint, "-r", "team/mine", "-f", "json")

    assert ended.status == 1
    assert "tinker://other/weights/x" in ended.error["message"]
    assert "--repo" in ended.error["remedy"]
    assert hub.files == {}


def test_encrypted_weights_cannot_be_pushed(
    tinsmith: Commands, training: TrainingClient, hub: SmallHub
) -> None:
    saving = training.save_weights_external(
        "secret",
        age_encryption_recipients=[
            "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
        ],
    )

    ended = tinsmith.run("checkpoint", "push-hf", saving.result().path)

    assert ended.status == 1
    assert "encryption" in ended.err
    assert hub.is_private == {}


def test_without_a_login_nothing_is_downloaded(
    tinsmith: Commands, checkpoint: str, service: ScriptedService
) -> None:
    ended = tinsmith.run("checkpoint", "push-hf", checkpoint, environment={"HF_TOKEN": "hf_bad"})

    assert ended.status == 1
    assert "hf auth login" in ended.err
    assert "hf_bad" not in ended.err
    assert service.requests("download") == []


def test_without_huggingface_hub_the_error_says_what_to_install(
    tinsmith: Commands, checkpoint: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not here')")

    # The working directory comes first on the path of `python -m`.
    ended = tinsmith.run("checkpoint", "push-hf", checkpoint)

    assert ended.status == 1
    assert "pip install huggingface_hub" in ended.err
