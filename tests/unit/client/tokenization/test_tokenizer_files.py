from __future__ import annotations

import json
import os
import sys
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.small_tokenizer import BOS, CHAT_TEMPLATE, CONFIG, EOS, write_tokenizer
from tinsmith.client.tokenization import tokenizer_files
from tinsmith.client.tokenization.names import TokenizerSource
from tinsmith.client.tokenization.tokenizer_files import (
    SingleFlightCache,
    TokenizerParts,
    find_files,
    in_model_cache,
    read_parts,
)
from tinsmith.engine.files.hub_cache import hub_cache
from tinsmith.errors import TokenizerError

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


def test_the_hub_cache_is_read_without_contacting_the_hub(hub: Path) -> None:
    main = cached(hub, "org/model")
    tagged = cached(hub, "org/model", commit="beef", ref="v2")

    assert find_files(TokenizerSource("org/model")) == main
    assert find_files(TokenizerSource("org/model", "v2")) == tagged
    assert find_files(TokenizerSource("org/model", "beef")) == tagged


def test_the_tokenizer_of_a_local_base_model_is_read_without_the_hub(
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
def test_the_cache_location_follows_the_hub_s_environment_variables(
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


def test_the_hub_is_contacted_last_and_only_for_tokenizer_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = StubHub(write_tokenizer(tmp_path / "fetched"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)

    assert find_files(TokenizerSource("org/model", "v1")) == tmp_path / "fetched"
    [(name, revision, patterns)] = stub.calls
    assert (name, revision) == ("org/model", "v1")
    assert "tokenizer.json" in patterns
    assert not any("safetensors" in pattern or pattern == "*" for pattern in patterns)


def test_a_hub_error_becomes_our_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = OSError("offline")
    monkeypatch.setitem(sys.modules, "huggingface_hub", StubHub(refusal))

    with pytest.raises(TokenizerError, match=r"offline.*TINSMITH_TOKENIZERS") as caught:
        find_files(TokenizerSource("org/model"))

    assert caught.value.__cause__ is refusal


def test_without_huggingface_hub_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(TokenizerError, match=r"not on this machine.*TINSMITH_TOKENIZERS"):
        find_files(TokenizerSource("org/model"))


def test_a_local_path_is_never_requested_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = StubHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)

    with pytest.raises(TokenizerError, match="no tokenizer in the directory"):
        find_files(TokenizerSource(str(tmp_path / "none")))

    assert stub.calls == []


def test_the_error_for_an_older_format_suggests_kind_transformers(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {})

    with pytest.raises(TokenizerError, match='kind="transformers"'):
        find_files(TokenizerSource(str(tmp_path)))


# Reading


def test_special_tokens_are_read_as_strings_and_with_flags(tmp_path: Path) -> None:
    settings = read(write_tokenizer(tmp_path)).settings

    assert settings.special == {"bos_token": BOS, "eos_token": EOS}
    assert settings.chat_template == CHAT_TEMPLATE
    assert settings.model_max_length == 64


def test_special_tokens_map_fills_only_missing_entries(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "h", "pad_token": BOS})

    assert read(tmp_path).settings.special == {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": BOS,
    }


def test_tokens_listed_only_in_other_files_are_added(tmp_path: Path) -> None:
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


def test_template_files_take_precedence(tmp_path: Path) -> None:
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
def test_named_templates_are_read(templates: object, expected: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CONFIG | {"chat_template": templates})

    assert read(tmp_path).settings.chat_template == expected


def test_truncation_and_padding_settings_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = read(tmp_path).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))

    assert len(read(tmp_path).backend.encode("hello world").ids) == 7


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_the_error_names_a_broken_file(file: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text("{", encoding="utf-8")

    with pytest.raises(TokenizerError, match=file):
        read(tmp_path)


def test_s33_the_error_names_a_missing_package_and_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ImportError, match=r"tinsmith\[tokenizers\]"):
        tokenizer_files.load_parts(TokenizerSource(str(tmp_path)))


THREADS = 32
TIMEOUT_S = 60


class Crowd:
    """32 threads that ask for one key, and a maker that waits until all of them have come."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self._error = error
        self._arrived = threading.Semaphore(0)

    def ask(self, cache: SingleFlightCache[str, str]) -> list[Future[str]]:
        with ThreadPoolExecutor(THREADS) as pool:
            return [pool.submit(self._ask, cache) for _ in range(THREADS)]

    def _ask(self, cache: SingleFlightCache[str, str]) -> str:
        self._arrived.release()
        return cache.get("key", self._make)

    def _make(self) -> str:
        self.made += 1
        for _ in range(THREADS):
            self._arrived.acquire(timeout=TIMEOUT_S)
        threading.Event().wait(0.1)  # for the step from having arrived to waiting
        if self._error is not None:
            raise self._error
        return "made"


def test_s35_32_threads_on_first_use_make_one_value() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    crowd = Crowd()

    results = crowd.ask(cache)

    assert [result.result() for result in results] == ["made"] * THREADS
    assert crowd.made == 1


def test_s35_a_failure_reaches_all_waiters_and_is_not_cached() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    error = OSError("no such tokenizer")
    crowd = Crowd(error)

    results = crowd.ask(cache)

    assert [result.exception() for result in results] == [error] * THREADS
    assert crowd.made == 1
    assert cache.get("key", lambda: "better") == "better"


def test_s35_values_of_different_keys_are_created_in_parallel() -> None:
    """Each of two makers waits for the other to have begun."""
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    both = threading.Barrier(2)

    def make() -> str:
        both.wait(TIMEOUT_S)
        return "made"

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(cache.get, key, make) for key in ("a", "b")]

    assert [result.result() for result in results] == ["made", "made"]


def test_if_the_first_caller_is_interrupted_a_waiter_takes_over() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    begun = threading.Event()
    interrupt = threading.Event()

    def interrupted() -> str:
        begun.set()
        interrupt.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "key", interrupted)
        begun.wait(TIMEOUT_S)
        second = pool.submit(cache.get, "key", lambda: "made")
        interrupt.set()

        assert second.result(TIMEOUT_S) == "made"
        assert isinstance(first.exception(), KeyboardInterrupt)


def test_a_load_in_progress_in_the_parent_process_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a child forked in the middle of its parent's load finds it."""
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    parent = os.getpid()
    in_child: list[str] = []

    def make_in_parent() -> str:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: parent + 1)
            in_child.append(cache.get("key", lambda: "the child's"))
        return "the parent's"

    assert cache.get("key", make_in_parent) == "the parent's"
    assert in_child == ["the child's"]


def test_the_oldest_values_are_evicted() -> None:
    cache: SingleFlightCache[int, int] = SingleFlightCache(2)
    for number in range(5):
        cache.get(number, lambda number=number: number)  # type: ignore[misc]

    assert len(cache) == 2
    assert cache.get(4, lambda: -1) == 4
    assert cache.get(0, lambda: -1) == -1
