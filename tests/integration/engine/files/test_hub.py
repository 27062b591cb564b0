"""`tinsmith model` against a hub on this machine; as processes, since an endpoint is read once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.files.small_hub import COMMIT, SmallHub, small_hub
from tinsmith.engine.files.hub_cache import cached_model
from tinsmith.service.run.model_fetching import fetched_models
from tinsmith.service.run.service_settings import ServiceSettings

WEIGHTS = os.urandom(400_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "LICENSE": b"do as you like",
    # None of these is wanted.
    "modeling_evil.py": b"print('gotcha')",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": WEIGHTS,
    "onnx/model.json": b"{}",
    ".gitattributes": b"",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "LICENSE"}


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with small_hub(FILES, {"model.safetensors", "consolidated.safetensors"}) as hub:
        yield hub


def tinsmith(
    hub_url: str, home: Path, *words: str, format_: str = "json", **environment: str
) -> tuple[int, Any, str]:
    """Run a command; its status, its JSON or text, and what it said of errors."""
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith", "model", *words, "-f", format_],
        env={
            **os.environ,
            "HOME": str(home),
            "TINSMITH_HOME": str(home),
            "HF_ENDPOINT": hub_url,
            "HF_HOME": str(home / "hf"),
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    said = json.loads(done.stdout or "null") if format_ == "json" else done.stdout
    return done.returncode, said, done.stderr


def test_a_model_is_pulled_listed_checked_and_removed(hub: SmallHub, tmp_path: Path) -> None:
    status, pulled, said = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")
    assert (status, said) == (0, "")
    folder = tmp_path / "models" / "tiny" / "llama"
    assert pulled["folder"] == str(folder)
    assert pulled["source"] == {"kind": "hub", "repository": "tiny/llama", "commit": COMMIT}
    assert {path.name for path in folder.iterdir()} == {*WANTED, "tinsmith-model.json"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS

    _, listed, _ = tinsmith(hub.url, tmp_path, "local", "--check")
    assert [(model["name"], model["damaged_files"]) for model in listed["models"]] == [
        ("tiny/llama", [])
    ]
    (folder / "config.json").write_bytes(b"{}")
    status, listed, _ = tinsmith(hub.url, tmp_path, "local", "--check")
    assert (status, listed["models"][0]["damaged_files"]) == (1, ["config.json"])

    status, removed, _ = tinsmith(hub.url, tmp_path, "remove", "tiny/llama")
    assert (status, removed["name"]) == (0, "tiny/llama")
    assert tinsmith(hub.url, tmp_path, "local")[1] == {"models": []}
    status, _, said = tinsmith(hub.url, tmp_path, "remove", "tiny/llama")
    assert (status, json.loads(said)["error"]["type"]) == (1, "BaseModelNotFoundError")


def test_a_model_is_fetched_once_for_all_data_folders(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    _, pulled, _ = tinsmith(hub.url, tmp_path, "pull", "tiny/llama", TINSMITH_SERVE_DATA=first)
    fetched = len(hub.fetched)

    status, again, said = tinsmith(
        hub.url, tmp_path, "pull", "tiny/llama", TINSMITH_SERVE_DATA=second
    )
    monkeypatch.setenv("TINSMITH_HOME", str(tmp_path))
    served = ServiceSettings(data=Path(second), models=("tiny/llama",))
    [found] = asyncio.run(fetched_models(served, lambda _: None))

    assert (status, said) == (0, "")
    assert again["folder"] == pulled["folder"] == str(tmp_path / "models" / "tiny" / "llama")
    assert found.folder == pulled["folder"]
    assert len(hub.fetched) == fetched


def test_a_model_in_the_data_folder_is_used(hub: SmallHub, tmp_path: Path) -> None:
    """From before there was a cache for all of a user's; and so it is listed and removed."""
    data = str(tmp_path / "data")
    _, own, _ = tinsmith(hub.url, tmp_path, "pull", "tiny/llama", "--data", data)
    fetched = len(hub.fetched)

    _, again, _ = tinsmith(hub.url, tmp_path, "pull", "tiny/llama", TINSMITH_SERVE_DATA=data)
    _, listed, _ = tinsmith(hub.url, tmp_path, "local", TINSMITH_SERVE_DATA=data)
    status, _, _ = tinsmith(hub.url, tmp_path, "remove", "tiny/llama", TINSMITH_SERVE_DATA=data)

    assert own["folder"] == str(tmp_path / "data" / "models" / "tiny" / "llama")
    assert again["folder"] == own["folder"]
    assert [model["folder"] for model in listed["models"]] == [own["folder"]]
    assert len(hub.fetched) == fetched
    assert status == 0
    assert not Path(own["folder"]).exists()


def test_a_model_in_the_huggingface_hub_cache_is_used(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before it is whole: one file of weights is missing at first."""
    repository = tmp_path / "hf" / "hub" / "models--tiny--llama"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
        (snapshot / name).write_bytes(b"{}")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("HOME", "TINSMITH_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert cached_model("tiny/llama") is None
    (snapshot / "model-2.safetensors").write_bytes(b"{}")

    status, pulled, _ = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")
    served = ServiceSettings(data=tmp_path / "data", models=("mine=tiny/llama",))
    [found] = asyncio.run(fetched_models(served, lambda _: None))

    assert (status, pulled["folder"]) == (0, str(snapshot))
    assert pulled["source"] == {"kind": "hub", "repository": "tiny/llama", "commit": COMMIT}
    assert (found.folder, found.tokenizer) == (str(snapshot), "tiny/llama")
    assert hub.fetched == []


def test_removing_the_leftovers_of_an_interrupted_pull_is_reported(
    hub: SmallHub, tmp_path: Path
) -> None:
    """Nothing but an empty folder is nothing to remove: it said that 0 B were free again."""
    work = tmp_path / "models" / ".work" / "tiny--llama" / "pypi"
    work.mkdir(parents=True)

    status, _, said = tinsmith(hub.url, tmp_path, "remove", "tiny/llama")
    work.mkdir(parents=True)
    (work / "half").write_bytes(b"x" * 2048)
    _, told, _ = tinsmith(hub.url, tmp_path, "remove", "tiny/llama", format_="table")

    assert (status, json.loads(said)["error"]["type"]) == (1, "BaseModelNotFoundError")
    assert told == "Deleted the partial download of tiny/llama (2.0 KB)\n"
    assert not work.exists()


def test_a_cached_model_of_another_revision_or_source_is_not_reused(
    hub: SmallHub, tmp_path: Path
) -> None:
    """Another revision, or another source, is fetched in its place only if that is said."""
    tinsmith(hub.url, tmp_path, "pull", "tiny/llama")

    status, _, said = tinsmith(hub.url, tmp_path, "pull", "tiny/llama", "--revision", "main")
    assert (status, json.loads(said)["error"]["remedy"]) == (
        1,
        "use --force to replace it",
    )
    assert tinsmith(hub.url, tmp_path, "pull", "tiny/llama", "--revision", COMMIT[:9])[0] == 0

    status, pulled, _ = tinsmith(
        hub.url, tmp_path, "pull", "tiny/llama", "--revision", "main", "--force"
    )
    assert (status, pulled["source"]["revision"]) == (0, "main")
    assert tinsmith(hub.url, tmp_path, "pull", "tiny/llama", "--revision", "main")[0] == 0
    assert tinsmith(hub.url, tmp_path, "pull", "tiny/llama", "--source", "hub")[0] == 0


def test_an_empty_model_name_is_rejected(hub: SmallHub, tmp_path: Path) -> None:
    status, _, said = tinsmith(hub.url, tmp_path, "pull", "")

    assert (status, json.loads(said)["error"]["type"]) == (1, "ValidationError")
    assert hub.fetched == []


def test_a_download_resumes_after_a_broken_connection(hub: SmallHub, tmp_path: Path) -> None:
    hub.breaks_off = "model.safetensors"

    status, _, _ = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")

    assert status == 0
    kept = tmp_path / "models" / "tiny" / "llama" / "model.safetensors"
    assert kept.read_bytes() == WEIGHTS
    assert len([name for name in hub.fetched if name.startswith("model.safetensors")]) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_digest_is_rejected_and_fetched_again(
    hub: SmallHub, tmp_path: Path, name: str
) -> None:
    right = hub.files[name]
    hub.files[name] = right[:-1] + bytes([right[-1] ^ 1])

    status, _, said = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")
    assert status == 1
    assert json.loads(said)["error"]["type"] == "BaseModelDamagedError"
    assert not (tmp_path / "models" / "tiny").exists()

    hub.files[name] = right
    assert tinsmith(hub.url, tmp_path, "pull", "tiny/llama")[0] == 0
    assert (tmp_path / "models" / "tiny" / "llama" / name).read_bytes() == right


def test_a_model_that_the_hub_does_not_have_is_not_found(hub: SmallHub, tmp_path: Path) -> None:
    status, _, said = tinsmith(hub.url, tmp_path, "pull", "no/such")

    assert status == 1
    assert json.loads(said)["error"]["type"] == "BaseModelNotFoundError"


def test_a_repository_without_safetensors_is_rejected(hub: SmallHub, tmp_path: Path) -> None:
    hub.promised = {"config.json": FILES["config.json"], "pytorch_model.bin": b"a pickle"}

    status, _, said = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")

    assert status == 1
    assert json.loads(said)["error"]["type"] == "BaseModelFormatError"
    assert hub.fetched == []


def test_quantised_weights_are_rejected_before_they_are_fetched(
    hub: SmallHub, tmp_path: Path
) -> None:
    hub.config["quantization_config"] = {"quant_method": "fp8"}

    status, _, said = tinsmith(hub.url, tmp_path, "pull", "tiny/llama")

    error = json.loads(said)["error"]
    assert (status, error["type"]) == (1, "BaseModelFormatError")
    assert "quantised (fp8)" in error["message"]
    assert hub.fetched == []


def test_without_a_network_the_error_names_the_alternatives(tmp_path: Path) -> None:
    status, _, said = tinsmith("http://127.0.0.1:9", tmp_path, "pull", "tiny/llama")

    error = json.loads(said)["error"]
    assert (status, error["type"]) == (1, "BaseModelUnavailableError")
    assert str(tmp_path / "models" / "tiny" / "llama") in error["remedy"]
    assert "path of the model's folder" in error["remedy"]
