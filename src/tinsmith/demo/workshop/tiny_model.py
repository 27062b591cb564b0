"""A tiny random model and its tokenizer, as a stand-in for a large one.

The result is a complete Hugging Face folder: a two-layer Llama model with random weights, and a
tokenizer with one token per byte and per special token of the chat template. The model knows no
language, but it can be trained like any other. The same template gives the same bytes.

Imports numpy when called.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.safetensors_file import write_tensors
from tinsmith.demo.workshop.chat_templates import ChatTemplate
from tinsmith.engine.files.gguf_model import bpe_tokenizer
from tinsmith.engine.files.gguf_weights import weight_shapes

BYTES = 256
WEIGHT_STD = 0.05
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


def write_tiny_model(folder: Path, chat: ChatTemplate) -> None:
    """Write the model into an empty folder.

    Raises:
        OSError: A file could not be written.
    """
    import numpy as np

    ids = {token: BYTES + index for index, token in enumerate(chat.tokens)}
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
    random = np.random.default_rng(zlib.crc32("".join(chat.tokens).encode()))
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0.0, WEIGHT_STD, shape).astype(np.float32)
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


def _tokenizer(chat: ChatTemplate, ids: dict[str, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    return bpe_tokenizer(
        _byte_letters(),
        [],
        added=[(number, token, _is_special(token)) for token, number in ids.items()],
        pre_tokenizer=byte_level,
        post_processor=None if chat.begin is None else _prepend(chat.begin, ids[chat.begin]),
        decoder=byte_level,
    )


def _is_special(token: str) -> bool:
    """Whether `skip_special_tokens` drops the token; thinking and tool tags are kept."""
    return not re.fullmatch(r"</?[a-z_]+>", token)


def _prepend(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _byte_letters() -> list[str]:
    """The character for each byte in `tokenizer.json`: the byte itself if it is printable."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(BYTES)]


def _tokenizer_config(chat: ChatTemplate) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "bos_token": chat.begin,
        "eos_token": chat.end,
        "pad_token": chat.pad,
        "chat_template": chat.template,
    }
