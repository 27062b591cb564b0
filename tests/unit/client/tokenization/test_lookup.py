from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tinsmith.client.tokenization
from tests.unit.client.small_tokenizer import BOS, CONFIG, EOS, write_tokenizer
from tinsmith.client.tokenization import lookup as tokenizers
from tinsmith.client.tokenization import tokenizer_files
from tinsmith.client.tokenization.lookup import (
    forget_tokenizers,
    load_tokenizer,
)
from tinsmith.client.tokenization.names import TABLE_VARIABLE
from tinsmith.client.tokenization.of_model import Names, TokenizerOfModel
from tinsmith.client.tokenization.tokenizer import Tokenizer
from tinsmith.errors import TokenizerError, ValidationError
from tinsmith.types.training import GetInfoResponse, ModelData

THREADS = 32
TIMEOUT_S = 60
CHAT = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "world"}]


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    forget_tokenizers()
    yield
    forget_tokenizers()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "small")


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(str(directory), kind="tokenizers")


class CountedReads:
    """Counts how often a tokenizer's files are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._read = tokenizer_files.read_parts
        monkeypatch.setattr(tokenizer_files, "read_parts", self)

    def __call__(self, *args: Any) -> tokenizer_files.TokenizerParts:
        self.count += 1
        threading.Event().wait(0.02)
        return self._read(*args)


# The calls of a tokenizer


def test_text_round_trips_through_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world", add_special_tokens=False)

    assert tokenizer.convert_ids_to_tokens(ids) == ["hello", "Ġw", "o", "r", "l", "d"]
    assert tokenizer.tokenize("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids[0]) == "hello"
    assert tokenizer.convert_tokens_to_ids(["hello", BOS]) == [ids[0], tokenizer.bos_token_id]
    assert tokenizer.convert_tokens_to_ids("not there") is None


def test_s42_special_tokens_are_added_unless_disabled(tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("hello", add_special_tokens=False)

    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, *bare]
    assert tokenizer("hello").input_ids == [tokenizer.bos_token_id, *bare]
    assert tokenizer("hello", add_special_tokens=False).input_ids == bare
    assert tokenizer(["hello", "hello"], add_special_tokens=False)["input_ids"] == [bare, bare]
    assert tokenizer.decode(tokenizer.encode("hello")) == BOS + "hello"
    assert tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=True) == "hello"
    assert tokenizer.num_special_tokens_to_add() == 1


def test_many_texts_are_encoded_and_decoded_in_one_call(tokenizer: Tokenizer) -> None:
    encoded = tokenizer(["hello", "hello world"])

    assert [len(row) for row in encoded.attention_mask] == [2, 7]
    assert dict(encoded).keys() == {"input_ids", "attention_mask"}
    assert tokenizer.batch_decode(encoded["input_ids"], skip_special_tokens=True) == [
        "hello",
        "hello world",
    ]
    assert tokenizer([]).input_ids == []
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = encoded.token_type_ids


def test_truncation_and_padding_apply_to_one_call_only(tokenizer: Tokenizer) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    whole = tokenizer.encode("hello world")

    both = tokenizer(["hello world", "h"], truncation=True, max_length=4, padding=True)

    assert both.input_ids[0] == whole[:4]
    assert both.input_ids[1][2:] == [tokenizer.eos_token_id] * 2
    assert both.attention_mask == [[1, 1, 1, 1], [1, 1, 0, 0]]
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    left = tokenizer("hello world", truncation=True, max_length=3, padding="max_length")
    assert left.input_ids == [whole[0], *whole[-2:]]
    assert tokenizer.encode("hello world", truncation=True, max_length=2) == [whole[0], whole[-1]]
    assert tokenizer.encode("hello world") == whole


def test_arrays_are_returned_on_request(tokenizer: Tokenizer) -> None:
    array = tokenizer(["hello", "hello"], return_tensors="np").input_ids
    tensor = tokenizer.apply_chat_template(CHAT, return_tensors="pt")

    assert array.shape == (2, 2)
    assert tensor.tolist() == [tokenizer.apply_chat_template(CHAT)]
    assert tokenizer.decode(array[0]) == BOS + "hello"
    with pytest.raises(ValidationError, match="padding=True"):
        tokenizer(["hello", "a b"], return_tensors="np")
    with pytest.raises(ValidationError, match="return_tensors"):
        tokenizer("hello", return_tensors="tf")


@pytest.mark.parametrize("wrong", [None, 3, b"bytes"])
def test_input_that_is_not_text_is_rejected(wrong: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="encodes text"):
        tokenizer.encode(wrong)
    with pytest.raises(ValidationError, match="encodes text"):
        tokenizer(["fine", wrong])


def test_padding_without_a_pad_token_is_rejected_with_a_remedy(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match=r"pad_token = tokenizer\.eos_token"):
        tokenizer(["hello", "a b"], padding=True)


def test_a_tokenizer_exposes_its_vocabulary_and_special_tokens(
    tokenizer: Tokenizer, directory: Path
) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (261, 262)
    assert tokenizer.pad_token is None and tokenizer.pad_token_id is None
    assert tokenizer.unk_token is None and tokenizer.unk_token_id is None
    assert (tokenizer.vocab_size, len(tokenizer)) == (261, 263)
    assert tokenizer.get_vocab()[EOS] == 262
    assert tokenizer.get_added_vocab() == {BOS: 261, EOS: 262}
    added = tokenizer.added_tokens_decoder
    assert [(number, token.content, token.special) for number, token in added.items()] == [
        (261, BOS, True),
        (262, EOS, True),
    ]
    assert tokenizer.all_special_tokens == [BOS, EOS]
    assert tokenizer.all_special_ids == [261, 262]
    assert tokenizer.special_tokens_map == {"bos_token": BOS, "eos_token": EOS}
    assert tokenizer.name_or_path == str(directory.resolve())
    assert tokenizer.model_max_length == 64
    assert str(directory.resolve()) in repr(tokenizer)


def test_special_tokens_can_be_set_by_name_and_by_id(tokenizer: Tokenizer) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token_id = tokenizer.bos_token_id
    assert tokenizer.pad_token == BOS
    tokenizer.pad_token = None
    assert tokenizer.pad_token_id is None


# Conversations


def test_s42_a_conversation_has_exactly_one_bos(tokenizer: Tokenizer) -> None:
    text = f"{BOS}<user>hello{EOS}\n<assistant>world{EOS}\n"

    ids = tokenizer.apply_chat_template(CHAT)

    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.apply_chat_template(CHAT, return_dict=True).input_ids == ids
    opened = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert opened == text + "<assistant>"
    assert tokenizer.apply_chat_template([CHAT, CHAT]) == [ids, ids]
    assert tokenizer.apply_chat_template([CHAT], tokenize=False) == [text]


def test_a_custom_chat_template_can_be_passed_or_set(tokenizer: Tokenizer) -> None:
    template = "{{ mood }}{{ bos_token }}"

    text = tokenizer.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, mood="x", bos_token="y"
    )

    assert text == "xy"
    tokenizer.chat_template = "{{ messages | length }}"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "2"
    with pytest.raises(ValidationError, match="empty"):
        tokenizer.apply_chat_template([])


def test_s33_templates_without_jinja2_name_the_extra(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "tinsmith.client.tokenization.chat_template", raising=False)
    monkeypatch.delattr(tinsmith.client.tokenization, "chat_template", raising=False)

    with pytest.raises(ImportError, match=r"tinsmith\[tokenizers\]"):
        tokenizer.apply_chat_template(CHAT)


# Asking the service


def info(tokenizer_id: str | None, model_name: str | None = None) -> GetInfoResponse:
    data = ModelData(model_name=model_name, tokenizer_id=tokenizer_id)
    return GetInfoResponse(model_id="m", model_data=data)


class Service:
    """Answers `get_info`, and counts."""

    def __init__(self, *answers: GetInfoResponse | Names | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def get_info(self) -> GetInfoResponse | Names:
        self.asked += 1
        answer = self.answers.pop(0)
        await asyncio.sleep(0.02)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_s32_a_client_asks_the_service_once_across_threads_and_loops(directory: Path) -> None:
    service = Service(info(str(directory), "another/name"))
    of_model = TokenizerOfModel()

    async def several() -> list[Tokenizer]:
        return await asyncio.gather(*(of_model.get_async(service.get_info) for _ in range(4)))

    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(asyncio.run, several()) for _ in range(8)]
        found = [tokenizer for run in runs for tokenizer in run.result(TIMEOUT_S)]
    again = asyncio.run(of_model.get_async(service.get_info))

    assert {tokenizer.name_or_path for tokenizer in [*found, again]} == {str(directory.resolve())}
    assert service.asked == 1


def test_s32_a_failed_lookup_fails_all_waiters_and_is_retried(directory: Path) -> None:
    error = TokenizerError("gone")
    service = Service(error, (str(directory), None))
    of_model = TokenizerOfModel()

    async def scenario() -> None:
        calls = [of_model.get_async(service.get_info) for _ in range(5)]
        assert await asyncio.gather(*calls, return_exceptions=True) == [error] * 5
        assert (await of_model.get_async(service.get_info)).bos_token == BOS

    asyncio.run(scenario())
    assert service.asked == 2


def test_s32_a_cancelled_caller_does_not_fail_the_others(directory: Path) -> None:
    """Neither the one who asks nor one who waits takes the answer from the rest."""
    service = Service((str(directory), None), (str(directory), None))
    of_model = TokenizerOfModel()

    async def scenario() -> None:
        asker, waiter, patient = (
            asyncio.create_task(of_model.get_async(service.get_info)) for _ in range(3)
        )
        await asyncio.sleep(0)
        waiter.cancel()
        asker.cancel()
        assert (await patient).bos_token == BOS
        assert asker.cancelled() and waiter.cancelled()

    asyncio.run(scenario())
    assert service.asked == 2


def test_s32_without_the_server_s_tokenizer_id_the_model_name_is_looked_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_TOKENIZERS", json.dumps({"org/model": str(directory)}))
    service = Service(info(None, "org/model:x"))
    of_model = TokenizerOfModel()

    assert asyncio.run(of_model.get_async(service.get_info)).name_or_path == str(
        directory.resolve()
    )


# Weight


def test_s33_tokenizing_loads_only_the_tokenizers_package(directory: Path) -> None:
    program = f"""
import json, sys
import tinsmith
from tinsmith.client.tokenization.lookup import load_tokenizer
before = [name for name in ("tokenizers", "jinja2") if name in sys.modules]
tokenizer = load_tokenizer({str(directory)!r})
tokenizer.apply_chat_template([{{"role": "user", "content": "hello"}}])
heavy = ("transformers", "torch", "numpy", "huggingface_hub", "pydantic")
print(json.dumps(before + [name for name in heavy if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert json.loads(done.stdout) == []


# The key of the cache


def test_s34_two_names_of_one_tokenizer_share_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = CountedReads(monkeypatch)
    table = {"org/a": str(directory), "org/b": str(directory)}

    first = load_tokenizer("org/a:tiny", table=table)
    second = load_tokenizer("org/b", table=table)
    third = load_tokenizer("some/name", tokenizer_id=str(directory))

    assert reads.count == 1
    assert first.native() is second.native() is third.native()


def test_s34_two_revisions_of_one_tokenizer_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for revision, length in (("v1", 10), ("v2", 20)):
        snapshot = tmp_path / "models--org--model" / "snapshots" / revision
        write_tokenizer(snapshot, CONFIG | {"model_max_length": length})

    found = [load_tokenizer("org/model", revision=revision) for revision in ("v1", "v2", "v1")]

    assert [tokenizer.model_max_length for tokenizer in found] == [10, 20, 10]
    assert found[0].native() is found[2].native() is not found[1].native()


def test_s34_a_tokenizer_of_transformers_is_another_entry(directory: Path) -> None:
    ours = load_tokenizer(str(directory))
    theirs = load_tokenizer(str(directory), kind="transformers")

    assert type(theirs).__module__.startswith("transformers")
    assert load_tokenizer(str(directory), kind="transformers") is theirs
    assert theirs.encode("hello world") == ours.encode("hello world")


def test_transformers_runs_remote_code_only_where_the_table_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    asked: list[tuple[str, dict[str, object]]] = []

    class Stub:
        @staticmethod
        def from_pretrained(name: str, **options: object) -> object:
            asked.append((name, options))
            return object()

    monkeypatch.setattr(transformers, "AutoTokenizer", Stub)
    load_tokenizer("moonshotai/Kimi-K3:long")
    load_tokenizer("org/model", kind="transformers")

    pin = "f831ab66814297da540d832a5235f8e904f29d06"
    assert asked == [
        ("moonshotai/Kimi-K3", {"use_fast": True, "revision": pin, "trust_remote_code": True}),
        ("org/model", {"use_fast": True}),
    ]


def test_a_missing_or_failing_transformers_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match="transformers could not load"):
        load_tokenizer(str(tmp_path), kind="transformers")

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        load_tokenizer("moonshotai/Kimi-K3")


# First use


@pytest.mark.usefixtures("eager_switching")
def test_s35_32_threads_on_first_use_read_the_files_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = CountedReads(monkeypatch)
    barrier = threading.Barrier(THREADS)

    def use() -> list[int]:
        barrier.wait(TIMEOUT_S)
        return load_tokenizer(str(directory), kind="tokenizers").encode("hello")

    with ThreadPoolExecutor(THREADS) as pool:
        results = [pool.submit(use) for _ in range(THREADS)]

    assert {tuple(result.result()) for result in results} == {(261, 259)}
    assert reads.count == 1


def test_s35_loading_does_not_block_the_callers_loop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are not read before the loop has taken a turn."""
    read = tokenizer_files.read_parts
    reading, turned = threading.Event(), threading.Event()

    def read_when_turned(*args: Any) -> tokenizer_files.TokenizerParts:
        reading.set()
        assert turned.wait(TIMEOUT_S)
        return read(*args)

    monkeypatch.setattr(tokenizer_files, "read_parts", read_when_turned)

    async def scenario() -> list[Tokenizer]:
        loads = asyncio.gather(
            *(asyncio.to_thread(load_tokenizer, str(directory)) for _ in range(4))
        )
        assert await asyncio.to_thread(reading.wait, TIMEOUT_S)
        turned.set()
        return await loads

    assert [found.bos_token for found in asyncio.run(scenario())] == [BOS] * 4


# Threads, forks, processes


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("copy_per_thread", [False, True])
def test_s36_32_threads_encode_to_the_same_ids_as_one(
    directory: Path, copy_per_thread: bool
) -> None:
    tokenizer = load_tokenizer(str(directory), copy_per_thread=copy_per_thread)
    texts = [f"hello world {number} {BOS} ü" for number in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    barrier = threading.Barrier(THREADS)

    def encode_all() -> list[list[int]]:
        barrier.wait(TIMEOUT_S)
        return [tokenizer.encode(text) for text in texts]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [pool.submit(encode_all) for _ in range(THREADS)]

    assert all(result.result() == expected for result in results)


FORKING = """
import os, sys, threading, time
from tinsmith.client.tokenization.lookup import load_tokenizer

directory = sys.argv[1]
tokenizer = load_tokenizer(directory)
many = ["hello world " * 50] * 64
expected = tokenizer(many).input_ids  # on the native threads
stop = threading.Event()

def busy():
    while not stop.is_set():
        tokenizer.encode("hello world " * 50)
        tokenizer(many)
        tokenizer.add_tokens(["<new>"])

threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(10):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        same = tokenizer(many).input_ids == expected
        same &= load_tokenizer(directory)(many).input_ids == expected
        same &= tokenizer.add_tokens(["<child>"]) == 1
        os._exit(0 if same else 1)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            os._exit(2)
        time.sleep(0.005)
    if ended[1] != 0:
        os._exit(3)
stop.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_s36_a_forked_child_encodes_without_deadlock(directory: Path) -> None:
    """Forked while other threads encode, one text and many, and add tokens."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_s36_a_tokenizer_is_pickled_by_its_id(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens(["<tool>"])
    tokenizer.pad_token = EOS
    carried = pickle.dumps(tokenizer)
    program = (
        "import pickle, sys\n"
        "tokenizer = pickle.loads(sys.stdin.buffer.read())\n"
        "print(tokenizer.encode('hello<tool>'), tokenizer.pad_token)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], input=carried, capture_output=True, check=True
    )

    assert b"hell" not in carried
    assert done.stdout.decode().strip() == f"{tokenizer.encode('hello<tool>')} {EOS}"


def test_s36_an_unchanged_tokenizer_pickles_to_a_few_hundred_bytes(tokenizer: Tokenizer) -> None:
    carried = pickle.dumps(tokenizer)

    assert len(carried) < 1000
    assert pickle.loads(carried).native() is tokenizer.native()


# Changes


def test_s37_changes_are_visible_only_to_their_own_handle(directory: Path) -> None:
    mine, other = load_tokenizer(str(directory)), load_tokenizer(str(directory))
    before = other.encode("a<tool>b")

    assert mine.add_tokens(["<tool>", "<call>"]) == 2
    assert mine.add_tokens("<tool>") == 0
    assert mine.add_special_tokens({"pad_token": "<pad>"}) == 1
    assert mine.add_special_tokens({"additional_special_tokens": ["<x>"]}) == 1
    mine.backend_tokenizer.enable_truncation(3)
    mine.backend_tokenizer.enable_padding(length=3)
    mine.padding_side = "left"
    mine.chat_template = "mine"

    fresh = load_tokenizer(str(directory))
    assert mine.encode("<tool>bcd") == [261, 263, 65]
    assert (mine.pad_token, mine.pad_token_id, len(mine)) == ("<pad>", 265, 267)
    assert mine.all_special_ids == [261, 262, 265, 266]
    for handle in (other, fresh):
        assert handle.encode("a<tool>b") == before
        assert (handle.pad_token, len(handle), handle.padding_side) == (None, 263, "right")
        assert handle.chat_template != "mine"


def test_s37_an_unknown_special_token_name_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="tool_token"):
        tokenizer.add_special_tokens({"tool_token": "<tool>"})
    with pytest.raises(ValidationError, match="left or right"):
        tokenizer.padding_side = "middle"


@pytest.mark.usefixtures("eager_switching")
def test_s37_a_handle_may_be_changed_while_others_encode_with_it(tokenizer: Tokenizer) -> None:
    """Nobody finds the native tokenizer borrowed, and no change is lost."""
    stop = threading.Event()
    expected = tokenizer.encode("hello world")

    def encode() -> bool:
        same = True
        while not stop.is_set():
            same &= tokenizer.encode("hello world") == expected
        return same

    with ThreadPoolExecutor(12) as pool:
        readers = [pool.submit(encode) for _ in range(8)]
        writers = [pool.submit(tokenizer.add_tokens, [f"<{n}>"]) for n in range(20)]
        added = [writer.result(TIMEOUT_S) for writer in writers]
        stop.set()

    assert added == [1] * 20
    assert all(reader.result() for reader in readers)
    assert len(tokenizer) == 263 + 20


def test_s37_each_thread_may_have_its_own_copy(directory: Path) -> None:
    tokenizer = load_tokenizer(str(directory), copy_per_thread=True)
    shared = load_tokenizer(str(directory))

    def change() -> tuple[object, list[int]]:
        tokenizer.backend_tokenizer.enable_truncation(2)
        return tokenizer.native(), tokenizer.encode("hello world")

    with ThreadPoolExecutor(1) as pool:
        there, cut = pool.submit(change).result(TIMEOUT_S)

    assert cut == shared.encode("hello world")[:2]
    assert tokenizer.encode("hello world") == shared.encode("hello world")
    assert tokenizer.native() is tokenizer.native()
    assert len({id(there), id(tokenizer.native()), id(shared.native())}) == 3
    tokenizer.add_tokens(["<tool>"])
    assert tokenizer.encode("<tool>") == [261, 263]
    assert pickle.loads(pickle.dumps(tokenizer)).native() is not shared.native()


def test_after_forget_tokenizers_the_files_are_read_again(directory: Path) -> None:
    assert load_tokenizer(str(directory)).model_max_length == 64
    write_tokenizer(directory, CONFIG | {"model_max_length": 7})

    assert load_tokenizer(str(directory)).model_max_length == 64
    tokenizers.forget_tokenizers()
    assert load_tokenizer(str(directory)).model_max_length == 7


def test_a_thinking_machines_tokenizer_is_loaded_from_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def get_tinker_tokenizer(tokenizer_id: str) -> object | None:
        asked.append(tokenizer_id)
        return None if tokenizer_id == "TML/unknown" else theirs

    theirs = object()
    package = types.ModuleType("tml_tokenizers.tinker_tokenizers")
    monkeypatch.setattr(package, "get_tinker_tokenizer", get_tinker_tokenizer, raising=False)
    monkeypatch.setitem(sys.modules, "tml_tokenizers", types.ModuleType("tml_tokenizers"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(tokenizers, "_load_with_transformers", lambda source: source.id)

    found = [load_tokenizer(name) for name in ("TML/one", "TML/one:x", "thinkingmachines/two")]
    unknown: Any = load_tokenizer("TML/unknown")

    assert found == [theirs] * 3
    assert asked == ["TML/one", "thinkingmachines/two", "TML/unknown"]
    assert unknown == "TML/unknown"


def test_without_that_package_the_error_names_it_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tml_tokenizers", None)

    with pytest.raises(TokenizerError, match=f"tml_tokenizers.*{TABLE_VARIABLE}"):
        load_tokenizer("TML/one")
    with pytest.raises(RuntimeError):
        load_tokenizer("a name", tokenizer_id="thinkingmachines/one")
