"""Engines by name, and the names of their models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest

from tinsmith.engine.files.cache import MANIFEST, ModelCache, ModelManifest
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.engine.registry import ModelSource, find_models, make_engine, read_models
from tinsmith.errors import BaseModelNotFoundError, ValidationError


def test_an_unknown_engine_is_rejected() -> None:
    """With those that there are."""
    with pytest.raises(ValidationError, match="embedded, fake"):
        make_engine("unheard-of", ["a"])


def test_an_engine_without_models_is_rejected() -> None:
    """With the option that names them."""
    with pytest.raises(ValidationError, match="--model"):
        make_engine("fake", [])


def test_the_error_of_an_engine_without_its_packages_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is loaded or fetched."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(ValidationError, match=r"needs torch.*pip install 'tinsmith\[server\]'"):
        make_engine("embedded", ["a"])


def test_an_engine_gets_its_own_process_on_request() -> None:
    """It is started when the engine is opened."""
    made = make_engine("fake", ["a"], has_own_process=True)

    assert isinstance(made, ProcessEngine)
    assert (made.name, made.pid) == ("fake", None)


def test_a_user_s_model_is_found_with_its_folder_and_tokenizer(tmp_path: Path) -> None:
    """Two names of one path are one folder."""
    (tmp_path / "config.json").write_text("{}")
    sources = read_models([f"a={tmp_path}", f"b={tmp_path}"])

    found = find_models(sources, ModelCache(tmp_path / "cache"))

    place = str(tmp_path)
    assert found == [
        ModelSource("a", place, None, place, place),
        ModelSource("b", place, "a", place, place),
    ]


@pytest.mark.parametrize("is_of_hub", [True, False])
def test_the_tokenizer_of_a_cached_model_follows_the_source_of_its_files(
    tmp_path: Path, is_of_hub: bool
) -> None:
    """The hub's by its name; that of a converted one by the folder, as there was no hub."""
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    source = {"kind": "hub", "commit": "abc"} if is_of_hub else {"kind": "pypi", "package": "p"}
    manifest = ModelManifest(name="owner/model", pulled_at=0.0, source=source, files={})
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    [found] = find_models(read_models(["x:tiny=owner/model"]), ModelCache(tmp_path))

    assert found.folder == str(folder)
    assert found.tokenizer_id == ("owner/model" if is_of_hub else str(folder))


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """Nothing is fetched for a path."""
    with pytest.raises(BaseModelNotFoundError):
        find_models(read_models([f"a={tmp_path}/gone"]), ModelCache(tmp_path))


def test_a_model_name_may_have_several_suffixes(tmp_path: Path) -> None:
    """Programs ask for `:peft:131072`, a length of the context; an ending of nothing is none."""
    [found] = read_models([f"Qwen/Qwen3-8B:peft:131072={tmp_path}"])

    assert found.name == "Qwen/Qwen3-8B:peft:131072"
    for wrong in ("a:", "a:b:", "a::b", "a:b/c"):
        with pytest.raises(ValidationError, match="is not a valid model name"):
            read_models([f"{wrong}={tmp_path}"])
