"""The weights of a GGUF file of the llama architecture, under the names of `transformers`.

The `gguf` package dequantises the tensors. The two formats differ in the names, and in the order of
rows in the query and key projections: llama.cpp applies RoPE to neighbouring rows of a head,
`transformers` to row i and row i + half. This module reorders the rows accordingly.

Every tensor must be known, and every known tensor must be present: a file with more tensors is of a
model that this module does not understand, and its conversion would run and give wrong results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tinsmith.errors import BaseModelFormatError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.weight")


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a llama model, by its name in `transformers`.

    Args:
        config: The fields of its `config.json`.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    in_block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    vocabulary = (config["vocab_size"], hidden)
    shapes = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocabulary
    for block in range(config["num_hidden_layers"]):
        for name, shape in in_block.items():
            shapes[f"model.layers.{block}.{name}.weight"] = shape
    return shapes


def read_weights(reader: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, Floats]]:
    """The weights in float32, one at a time, in the order of `weight_shapes`.

    Args:
        reader: A `gguf.GGUFReader`.
        config: The fields of the model's `config.json`.

    Raises:
        BaseModelFormatError: A tensor is missing or unknown, or has another shape or type.
    """
    found = {transformers_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = weight_shapes(config)
    if found.keys() != shapes.keys():
        odd = sorted(found.keys() ^ shapes.keys())
        raise BaseModelFormatError(
            f"the GGUF file's tensors do not match its settings: {', '.join(odd[:5])}"
        )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, shape in shapes.items():
        numbers = _plain_numbers(found[name])
        if numbers.shape != shape:
            raise BaseModelFormatError(f"{name} has shape {numbers.shape}; expected {shape}")
        head_count = heads.get(name.split(".")[-2])
        yield name, numbers if head_count is None else halves_from_pairs(numbers, head_count)


def transformers_name(name: str) -> str:
    """The name in `transformers` for a tensor of a GGUF file.

    Raises:
        BaseModelFormatError: A llama model has no such tensor.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _IN_BLOCK:
        raise BaseModelFormatError(f"the GGUF file has the unknown tensor {name!r:.80}")
    return f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}.weight"


def halves_from_pairs(rows: Floats, head_count: int) -> Floats:
    """Reorder the rows of each head from 0, half, 1, half + 1, … to 0, 1, …, half, half + 1, …."""
    by_head = rows.reshape(head_count, -1, 2, rows.shape[1])
    return by_head.swapaxes(1, 2).reshape(rows.shape)


def bfloat16_bits(numbers: Floats) -> NDArray[np.uint16]:
    """The bits of finite float32 numbers rounded to bfloat16 (to nearest, ties to even)."""
    import numpy as np

    bits = numbers.view(np.uint32)
    # The upper 16 bits remain: adding this carries into them above a tie, and at a tie if odd.
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + carry) >> np.uint32(16)).astype(np.uint16)


def _plain_numbers(tensor: Any) -> Floats:
    import numpy as np
    from gguf.quants import dequantize

    try:
        numbers: Floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as exc:
        raise BaseModelFormatError(
            f"{tensor.name} has the unsupported type {tensor.tensor_type.name}"
        ) from exc
    if not np.isfinite(numbers).all():
        raise BaseModelFormatError(f"{tensor.name} contains NaN or infinity")
    return np.ascontiguousarray(numbers)
