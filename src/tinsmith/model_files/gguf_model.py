"""A GGUF file of the llama architecture, made into a plain Hugging Face folder.

The numbers are written in bfloat16, which is what the models are published in: the folder is half
as large as in float32, and rounding costs less than the noise that llama.cpp's own arithmetic has
on quantised weights (docs/models.md has the figures). float32 keeps the GGUF's values exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tinsmith.checkpoints.safetensors_file import TensorEntry, encode_header
from tinsmith.errors import BaseModelFormatError
from tinsmith.model_files.gguf_tokenizer import tokenizer_config, tokenizer_json
from tinsmith.model_files.gguf_weights import bfloat16_bits, read_weights, weight_shapes

DType = Literal["bfloat16", "float32"]

_INSTALL = "pip install 'tinsmith[server]' brings the gguf package"


def convert_gguf(file: Path, folder: Path, *, dtype: DType = "bfloat16") -> None:
    """Write the model of a GGUF file into a folder that is there and has none of its files.

    One weight at a time is in memory. The files are not synced to disk.

    Raises:
        BaseModelFormatError: It is no GGUF file, or of a model that is not known here.
        OSError: A file could not be read or written.
    """
    try:
        from gguf import GGUFReader
    except ImportError as exc:
        raise BaseModelFormatError("a GGUF file cannot be read here", remedy=_INSTALL) from exc
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
    """The content of `config.json`, without the type of the numbers.

    Args:
        fields: The GGUF file's fields.
        is_tied: Whether the output layer is the embedding.

    Raises:
        BaseModelFormatError: It is a model of another architecture, or has settings of rotary
            embeddings that are not known here.
        KeyError: A field is missing.
    """
    if fields.get("general.architecture") != "llama":
        raise BaseModelFormatError(
            f"the GGUF file is of architecture {fields.get('general.architecture')!r:.40}; "
            "known is llama"
        )
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    odd = sorted(name for name in fields if name.startswith(("llama.rope.scaling", "llama.expert")))
    if odd or fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise BaseModelFormatError(
            f"the GGUF file has settings that are not known here: {odd or 'partial rotation'}"
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
        # Kept as float32 in GGUF: 1e-05 comes back as 9.999999747378752e-06.
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
        out.write(encode_header(entries, {"format": "pt"}))  # which `transformers` asks for
        for _, numbers in read_weights(reader, config):
            as_written = bfloat16_bits(numbers) if dtype == "bfloat16" else numbers
            little = as_written.astype(as_written.dtype.newbyteorder("<"), copy=False)
            out.write(little.tobytes())
