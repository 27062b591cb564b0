from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.client.tokenization.names import TABLE_VARIABLE, TokenizerSource, resolve
from tinsmith.errors import TokenizerError, ValidationError

LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
KIMI_PINS = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}


@pytest.fixture(autouse=True)
def _an_empty_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:tiny", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:peft:131072", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B/variant", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", LLAMA_3),
        ("meta-llama/Llama-3.2-1B:x", LLAMA_3),
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        ("gpt2", "gpt2"),
    ],
)
def test_model_names_resolve_to_their_tokenizers(name: str, expected: str) -> None:
    assert resolve(name) == TokenizerSource(expected)


@pytest.mark.parametrize(("name", "revision"), KIMI_PINS.items())
def test_kimi_models_run_the_pinned_revision_of_their_own_code(name: str, revision: str) -> None:
    expected = TokenizerSource(name, revision, "transformers", trust_remote_code=True)

    assert resolve(name + ":long") == expected
    assert resolve("another name", tokenizer_id=name) == expected


def test_a_text_only_kimi_uses_the_tokenizer_of_the_full_model() -> None:
    assert resolve("moonshotai/Kimi-K2.5-Text-Only") == resolve("moonshotai/Kimi-K2.5")


@pytest.mark.parametrize("name", ["TML/one", "thinkingmachines/one:x", "thinkingmachines/one/x"])
def test_thinking_machines_tokenizers_come_from_a_package(name: str) -> None:
    assert resolve(name).kind == "tml_tokenizers"
    assert resolve(name).id in ("TML/one", "thinkingmachines/one")
    assert resolve("a name", tokenizer_id="TML/one") == resolve("TML/one")


def test_private_tokenizers_can_be_mapped_to_public_ones() -> None:
    source = resolve("TML/secret", table={"TML/*": "org/public"})

    assert (source.id, source.kind) == ("org/public", "tokenizers")


@pytest.mark.parametrize("name", [None, ""])
def test_a_model_without_a_name_is_rejected(name: str | None) -> None:
    with pytest.raises(TokenizerError, match="no name"):
        resolve(name)


def test_s32_the_server_s_tokenizer_id_takes_precedence_over_our_table() -> None:
    assert resolve("meta-llama/Llama-3.1-8B", "org/real").id == "org/real"
    assert resolve("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B:x").id == "meta-llama/Llama-3.1-8B"


def test_s32_the_server_s_id_beats_a_user_entry_for_the_name_but_not_the_id() -> None:
    assert resolve("org/model", "org/real", table={"org/model": "mine/a"}).id == "org/real"
    assert resolve("org/model", "org/real", table={"org/real": "mine/b"}).id == "mine/b"


def test_a_folder_named_by_the_server_is_used_only_if_it_exists_locally(tmp_path: Path) -> None:
    """Elsewhere the model's name is looked up: the folder is on the server's machine."""
    write_tokenizer(tmp_path / "here")
    own = {"org/model": "org/mine"}

    assert resolve("org/model", str(tmp_path / "here")).id == str(tmp_path / "here")
    assert resolve("org/model", str(tmp_path / "there")) == resolve("org/model")
    assert resolve("org/model", str(tmp_path / "here"), table=own).id == "org/mine"
    assert resolve("m", "/there", table={**own, "/there": "org/its"}).id == "org/its"


def test_s32_users_override_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument comes before the environment, and that before ours; a file is read too."""
    name = "meta-llama/Llama-3.1-8B"
    monkeypatch.setenv(TABLE_VARIABLE, json.dumps({"meta-llama/*": "from/environment"}))

    assert resolve(name).id == "from/environment"
    assert resolve(name, table={name: "from/argument"}).id == "from/argument"

    file = tmp_path / "tokenizers.json"
    file.write_text(json.dumps({name: {"id": "from/file", "revision": "v2"}}), encoding="utf-8")
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    assert resolve(name) == TokenizerSource("from/file", "v2")


def test_a_user_entry_may_override_only_the_revision() -> None:
    table = {"moonshotai/Kimi-K3": {"revision": "other"}}

    assert resolve("moonshotai/Kimi-K3", table=table).revision == "other"
    assert resolve("moonshotai/Kimi-K3", table=table, revision="asked").revision == "asked"


def test_an_exact_entry_comes_before_a_pattern() -> None:
    assert resolve("org/a", table={"org/*": "any/thing", "org/a": "just/this"}).id == "just/this"


@pytest.mark.parametrize(
    "text", ["{", "[]", "/no/such/file", '{"a/b": 3}', '{"a/b": {"revison": "x"}}']
)
def test_an_unreadable_table_is_reported(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TABLE_VARIABLE, text)

    with pytest.raises(ValidationError, match=r"TINSMITH_TOKENIZERS|a/b"):
        resolve("a/b")


def test_a_directory_with_the_full_name_takes_precedence(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "Qwen" / "Qwen3-8B:tiny")

    source = resolve("Qwen/Qwen3-8B:tiny", table={"Qwen/*": "not/this"}, revision="v1")

    assert source == TokenizerSource(str(directory.resolve()))


def test_a_directory_of_the_name_before_the_colon_is_found(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "meta-llama" / "Llama-3-8B")

    assert resolve("meta-llama/Llama-3-8B:tiny").id == str(directory.resolve())


def test_an_entry_may_name_a_directory(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "mine")

    assert resolve("org/model", table={"org/model": str(directory)}).id == str(directory.resolve())


def test_a_directory_without_a_tokenizer_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)

    assert resolve("Qwen/Qwen3-8B").id == "Qwen/Qwen3-8B"


def test_remote_tokenizer_code_runs_only_at_the_pinned_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "moonshotai/Kimi-K2.6"
    pinned = resolve(name)
    assert pinned.trust_remote_code
    assert resolve(name, revision=pinned.revision) == pinned

    elsewhere = [
        resolve(name, revision="main"),
        resolve(name, table={name: {"revision": "main"}}),
    ]
    by_hand = {name: {"revision": "main", "trust_remote_code": True}}
    assert resolve(name, table=by_hand).trust_remote_code
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    elsewhere.append(resolve(f"{name}:peft:131072"))

    assert [one.trust_remote_code for one in elsewhere] == [False] * 3
