"""The tokenizer of a GGUF file, as the files that `tokenizers` and `transformers` read.

GGUF has the vocabulary and the merges of a byte-level BPE in the same spelling as `tokenizer.json`,
and only a name for the way in which text is cut before merging. The ways known here are in
`_CUTS`; a name that is not there is refused, since a wrong cut gives ids that are almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.errors import BaseModelFormatError

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

# GGUF's `tokenizer.ggml.pre`, and the pre-tokenizer that does the same.
_CUTS: dict[str, Any] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
    },
    "gpt-2": _BYTES,
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of tokens in GGUF; bytes and unused ones belong to other kinds of vocabularies."""


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer.json`.

    Args:
        fields: The GGUF file's fields.

    Raises:
        BaseModelFormatError: It is a kind of tokenizer that is not known here.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    cut = fields.get("tokenizer.ggml.pre")
    if fields.get("tokenizer.ggml.model") != "gpt2" or cut not in _CUTS:
        raise BaseModelFormatError(
            f"the GGUF file's tokenizer is {fields.get('tokenizer.ggml.model')!r:.40} with "
            f"{cut!r:.40}; known is gpt2 with {', '.join(_CUTS)}"
        )
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BaseModelFormatError("the GGUF file's vocabulary has a token twice, or without kind")
    if not set(kinds) <= {_NORMAL, _CONTROL, _USER_DEFINED}:
        raise BaseModelFormatError("the GGUF file's vocabulary has tokens of unknown kinds")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(number, token, is_special=kind == _CONTROL)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != _NORMAL
        ],
        "normalizer": None,
        "pre_tokenizer": _CUTS[cut],
        "post_processor": None,
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [_pair(merge) for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, the chat template included."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[f"{role}_token"] = tokens[number]
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def _added(number: int, token: str, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def _pair(merge: str) -> list[str]:
    # Byte-level spelling has no spaces of its own, so that one space parts the two.
    pair = merge.split(" ")
    if len(pair) != 2:
        raise BaseModelFormatError(f"the GGUF file has a merge {merge!r:.80}")
    return pair
