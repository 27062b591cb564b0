from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.small_tokenizer import BOS, CHAT_TEMPLATE, CONFIG, EOS, write_tokenizer
from tinsmith.client.tokenization import files as tokenizer_files
from tinsmith.client.tokenization.files import (
    TokenizerParts,
    find_files,
    in_model_cache,
    read_parts,
)
from tinsmith.client.tokenization.names import TokenizerSource
from tinsmith.errors import TokenizerError
from tinsmith.model_files.hub_cache import hub_cache

COMMIT = "c0ffee"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, found by `HF_HOME`."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


def read(directory: Path) -> TokenizerParts:
    return read_parts(TokenizerSource(str(directory)), directory)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


# Finding


def cached(hub: Path, name: str, commit: str = COMMIT, ref: str | None = "main") -> Path:
    repository = hub / ("models--" + name.replace("/", "--"))
    if ref is not None:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit, encoding="utf-8")
    return write_tokenizer(repository / "snapshots" / commit)


def test_the_hubs_cache_is_read_without_the_hub(hub: Path) -> None:
    main = cached(hub, "org/model")
    tagged = cached(hub, "org/model", commit="beef", ref="v2")

    assert find_files(TokenizerSource("org/model")) == main
    assert find_files(TokenizerSource("org/model", "v2")) == tagged
    assert find_files(TokenizerSource("org/model", "beef")) == tagged


def test_the_tokenizer_of_a_base_model_on_this_machine_is_read_without_the_hub(
    hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINSMITH_HOME", str(tmp_path / "home"))
    kept = write_tokenizer(tmp_path / "home" / "models" / "org" / "model")
    write_tokenizer(tmp_path / "home" / "outside")

    assert find_files(TokenizerSource("org/model")) == kept
    assert in_model_cache(TokenizerSource("org/model", "v2")) is None
    assert in_model_cache(TokenizerSource("org/../../../outside")) is None
    newer = cached(hub, "org/model")
    assert find_files(TokenizerSource("org/model")) == newer


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_is_where_the_hubs_variables_say(
    variable: str, below: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if variable.startswith("XDG"):
        monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))

    assert hub_cache() == tmp_path / "elsewhere" / below


class StubHub(types.ModuleType):
    """Stands for the hub's library."""

    def __init__(self, answer: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.answer = answer
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append((repo_id, revision, allow_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_the_hub_is_asked_last_and_for_the_tokenizers_files_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = StubHub(write_tokenizer(tmp_path / "fetched"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)

    assert find_files(TokenizerSource("org/model", "v1")) == tmp_path / "fetched"
    [(name, revision, patterns)] = stub.calls
    assert (name, revision) == ("org/model", "v1")
    assert "tokenizer.json" in patterns
    assert not any("safetensors" in pattern or pattern == "*" for pattern in patterns)


def test_what_the_hub_refuses_is_our_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = OSError("offline")
    monkeypatch.setitem(sys.modules, "huggingface_hub", StubHub(refusal))

    with pytest.raises(TokenizerError, match=r"offline.*TINSMITH_TOKENIZERS") as caught:
        find_files(TokenizerSource("org/model"))

    assert caught.value.__cause__ is refusal


def test_without_the_hubs_library_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(TokenizerError, match=r"not on this machine.*TINSMITH_TOKENIZERS"):
        find_files(TokenizerSource("org/model"))


def test_a_path_is_never_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub = StubHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)

    with pytest.raises(TokenizerError, match="no tokenizer in the directory"):
        find_files(TokenizerSource(str(tmp_path / "none")))

    assert stub.calls == []


def test_an_older_format_names_the_other_kind(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {})

    with pytest.raises(TokenizerError, match='kind="transformers"'):
        find_files(TokenizerSource(str(tmp_path)))


# Reading


def test_special_tokens_are_read_bare_and_with_their_flags(tmp_path: Path) -> None:
    settings = read(write_tokenizer(tmp_path)).settings

    assert settings.special == {"bos_token": BOS, "eos_token": EOS}
    assert settings.chat_template == CHAT_TEMPLATE
    assert settings.model_max_length == 64


def test_the_older_map_fills_gaps_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "h", "pad_token": BOS})

    assert read(tmp_path).settings.special == {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": BOS,
    }


def test_tokens_that_only_the_other_files_know_are_added(tmp_path: Path) -> None:
    """In the order of their ids, and marked special where a file says so."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        "264": {"content": "<tool>", "special": True, **flags},
        "263": {"content": "<think>", "special": False, **flags},
    }
    config = CONFIG | {"added_tokens_decoder": listed, "additional_special_tokens": ["<extra>"]}
    write_tokenizer(tmp_path, config)
    write_json(tmp_path / "added_tokens.json", {"<older>": 265})

    parts = read(tmp_path)

    added = {
        number: (token.content, token.special)
        for number, token in parts.backend.get_added_tokens_decoder().items()
        if number > 262
    }
    assert added == {
        263: ("<think>", False),
        264: ("<tool>", True),
        265: ("<older>", False),
        266: ("<extra>", True),
    }
    assert parts.settings.additional_special == ("<extra>",)


def test_templates_in_files_come_first(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    assert read(tmp_path).settings.chat_template == "from a file"

    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("for tools", encoding="utf-8")
    assert read(tmp_path).settings.chat_template == {
        "default": "from a file",
        "tool_use": "for tools",
    }


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ([{"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], {"rag": "r"}),
        (None, None),
    ],
)
def test_templates_with_names_are_read(templates: object, expected: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CONFIG | {"chat_template": templates})

    assert read(tmp_path).settings.chat_template == expected


def test_settings_left_in_the_file_do_not_cut_or_pad(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = read(tmp_path).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))

    assert len(read(tmp_path).backend.encode("hello world").ids) == 7


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(file: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text("{", encoding="utf-8")

    with pytest.raises(TokenizerError, match=file):
        read(tmp_path)


def test_s33_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ImportError, match=r"tinsmith\[tokenizers\]"):
        tokenizer_files.load_parts(TokenizerSource(str(tmp_path)))
