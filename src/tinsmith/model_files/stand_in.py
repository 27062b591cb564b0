"""A small random model with a tokenizer of its own, to stand where a large one would be.

It is a whole Hugging Face folder, made of nothing: two layers of random numbers, and a tokenizer
that has a token for each byte and for each mark of a chat. It knows no language, and can be trained
like any other model. The same name gives the same bytes.

Loads numpy when it is made.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.safetensors_file import write_tensors
from tinsmith.model_files.chats import Chat
from tinsmith.model_files.gguf_weights import weight_shapes

BYTES = 256
SPREAD = 0.05
"""Of the random weights."""
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def make_stand_in(folder: Path, chat: Chat) -> None:
    """Write the model into a folder that is empty.

    Raises:
        OSError: A file could not be written.
    """
    import numpy as np

    ids = {mark: BYTES + index for index, mark in enumerate(chat.marks)}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        **_SIZES,
        "vocab_size": BYTES + len(ids),
        "bos_token_id": ids[chat.begin or chat.pad],
        "eos_token_id": ids[chat.end],
        "pad_token_id": ids[chat.pad],
    }
    random = np.random.default_rng(zlib.crc32("".join(chat.marks).encode()))
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0.0, SPREAD, shape).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    for file, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": ids[chat.end]},
        "tokenizer.json": _tokenizer(chat, ids),
        "tokenizer_config.json": _tokenizer_config(chat),
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / file).write_text(text + "\n", encoding="utf-8")


def _tokenizer(chat: Chat, ids: dict[str, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {
            "id": number,
            "content": mark,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": _is_special(mark),
        }
        for mark, number in ids.items()
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None if chat.begin is None else _beginning(chat.begin, ids[chat.begin]),
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: number for number, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _is_special(mark: str) -> bool:
    """Whether a text without its special tokens lacks it; tags of thoughts and tools stay."""
    return not re.fullmatch(r"</?[a-z_]+>", mark)


def _beginning(mark: str, number: int) -> dict[str, Any]:
    """Puts a mark before every text."""
    first = {"SpecialToken": {"id": mark, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {mark: {"id": mark, "ids": [number], "tokens": [mark]}},
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in `tokenizer.json`: itself where it can be printed."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(BYTES)]


def _tokenizer_config(chat: Chat) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "bos_token": chat.begin,
        "eos_token": chat.end,
        "pad_token": chat.pad,
        "chat_template": chat.template,
    }
