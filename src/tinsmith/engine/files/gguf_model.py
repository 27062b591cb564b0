"""Convert a GGUF file of the llama architecture to a plain Hugging Face folder.

The weights are written as bfloat16, in which the models are published: the folder is half as large
as in float32, and the rounding error is below the noise of llama.cpp's own arithmetic on quantised
weights (docs/models.md has the figures). float32 preserves the GGUF's values exactly.

The tokenizer is converted to the files that `tokenizers` and `transformers` read. GGUF spells the
vocabulary and merges of a byte-level BPE as `tokenizer.json` does, but stores only the name of the
pre-tokenizer. `_CUTS` maps the supported names; others are refused, since a wrong pre-tokenizer
gives ids that are almost right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tinsmith.checkpoints.safetensors_file import TensorEntry, encode_header
from tinsmith.engine.files.gguf_weights import bfloat16_bits, read_weights, weight_shapes
from tinsmith.errors import BaseModelFormatError

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

# GGUF's `tokenizer.ggml.pre`, and the equivalent pre-tokenizer.
_CUTS: dict[str, Any] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
    },
    "gpt-2": _BYTES,
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""GGUF's token types. Byte and unused tokens occur only in other kinds of vocabularies."""


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer.json`.

    Args:
        fields: The GGUF file's fields.

    Raises:
        BaseModelFormatError: This kind of tokenizer is not supported.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    cut = fields.get("tokenizer.ggml.pre")
    if fields.get("tokenizer.ggml.model") != "gpt2" or cut not in _CUTS:
        raise BaseModelFormatError(
            f"the GGUF file's tokenizer is {fields.get('tokenizer.ggml.model')!r:.40} with "
            f"{cut!r:.40}; only gpt2 with {', '.join(_CUTS)} is supported"
        )
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BaseModelFormatError(
            "the GGUF file's vocabulary has a duplicate token, or one without a type"
        )
    if not set(kinds) <= {_NORMAL, _CONTROL, _USER_DEFINED}:
        raise BaseModelFormatError("the GGUF file's vocabulary has tokens of unknown types")
    return bpe_tokenizer(
        tokens,
        [_pair(merge) for merge in fields["tokenizer.ggml.merges"]],
        added=[
            (number, token, kind == _CONTROL)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != _NORMAL
        ],
        pre_tokenizer=_CUTS[cut],
        decoder={**_BYTES, "add_prefix_space": True},
    )


def bpe_tokenizer(
    tokens: Sequence[str],
    merges: Sequence[Sequence[str]],
    *,
    added: Iterable[tuple[int, str, bool]],
    **steps: Any,
) -> dict[str, Any]:
    """The content of `tokenizer.json` for a BPE tokenizer.

    Args:
        tokens: The vocabulary, in the order of the ids.
        merges: The pairs that are merged, in order.
        added: Tokens that are found before the text is cut: the id, and whether it is special.
        steps: `pre_tokenizer`, `post_processor` and `decoder`; none by default.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": is_special}
            for number, token, is_special in added
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **steps,
        "model": {
            "type": "BPE",
            **dict.fromkeys(nothing),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": list(merges),
        },
    }


def tokenizer_config(fields: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, including the chat template."""
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


def _pair(merge: str) -> list[str]:
    # Byte-level spelling contains no spaces, so the only space separates the two tokens.
    pair = merge.split(" ")
    if len(pair) != 2:
        raise BaseModelFormatError(f"the GGUF file has the invalid merge {merge!r:.80}")
    return pair


DType = Literal["bfloat16", "float32"]

_INSTALL = "run `pip install 'tinsmith[server]'`"


def convert_gguf(file: Path, folder: Path, *, dtype: DType = "bfloat16") -> None:
    """Write the model of a GGUF file into an existing folder that has no model files yet.

    One weight at a time is in memory. The files are not synced to disk.

    Raises:
        BaseModelFormatError: It is not a GGUF file, or its model is not supported.
        OSError: A file could not be read or written.
    """
    try:
        from gguf import GGUFReader
    except ImportError as exc:
        raise BaseModelFormatError(
            "reading a GGUF file requires the package gguf", remedy=_INSTALL
        ) from exc
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeError) as exc:
        raise BaseModelFormatError(f"{file.name} is not a GGUF file: {exc}") from exc
    try:
        config = model_config(
            fields, is_tied=all(t.name != "output.weight" for t in reader.tensors)
        )
        texts = {
            "config.json": {**config, "dtype": dtype},
            "generation_config.json": _generation_config(config),
            "tokenizer.json": tokenizer_json(fields),
            "tokenizer_config.json": tokenizer_config(fields, config["max_position_embeddings"]),
        }
    except KeyError as exc:
        raise BaseModelFormatError(f"{file.name} has no field {exc}") from exc
    for name, content in texts.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    _write_weights(reader, config, folder / "model.safetensors", dtype)


def model_config(fields: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """The content of `config.json`, without the dtype.

    Args:
        fields: The GGUF file's fields.
        is_tied: Whether the output layer shares its weights with the embedding.

    Raises:
        BaseModelFormatError: The architecture or the RoPE settings are not supported.
        KeyError: A field is missing.
    """
    if fields.get("general.architecture") != "llama":
        raise BaseModelFormatError(
            f"the GGUF file has architecture {fields.get('general.architecture')!r:.40}; "
            "only llama is supported"
        )
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    odd = sorted(name for name in fields if name.startswith(("llama.rope.scaling", "llama.expert")))
    if odd or fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise BaseModelFormatError(
            f"the GGUF file has unsupported settings: {odd or 'partial RoPE'}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores it as float32: 1e-05 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": is_tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_weights(reader: Any, config: Mapping[str, Any], file: Path, dtype: DType) -> None:
    kind, item_bytes = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, shape in weight_shapes(config).items():
        begin, end = end, end + math.prod(shape) * item_bytes
        entries[name] = TensorEntry(kind, shape, (begin, end))
    with file.open("xb") as out:
        out.write(encode_header(entries, {"format": "pt"}))  # `transformers` requires it
        for _, numbers in read_weights(reader, config):
            as_written = bfloat16_bits(numbers) if dtype == "bfloat16" else numbers
            little = as_written.astype(as_written.dtype.newbyteorder("<"), copy=False)
            out.write(little.tobytes())
