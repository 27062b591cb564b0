"""The weights of a GGUF file of the llama architecture, under the names of `transformers`.

Quantised tensors become plain numbers, by the `gguf` package. Two things differ between the forms:
the names, and the order of rows in the query and key projections. llama.cpp turns pairs of
neighbouring rows of a head, `transformers` turns row i with row i + half; GGUF files have the rows
of each head in the first order, and here they are put into the second.

Every tensor must be known and every known one must be there: a file with more is a model that this
module does not understand, and would be converted to something that runs and is wrong.
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
        BaseModelFormatError: A tensor is missing, unknown, or of another shape or kind.
    """
    found = {transformers_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = weight_shapes(config)
    if found.keys() != shapes.keys():
        odd = sorted(found.keys() ^ shapes.keys())
        raise BaseModelFormatError(
            f"the GGUF file's tensors are not those of its settings: {', '.join(odd[:5])}"
        )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, shape in shapes.items():
        numbers = _plain_numbers(found[name])
        if numbers.shape != shape:
            raise BaseModelFormatError(f"{name} is of shape {numbers.shape}; {shape} was expected")
        head_count = heads.get(name.split(".")[-2])
        yield name, numbers if head_count is None else halves_from_pairs(numbers, head_count)


def transformers_name(name: str) -> str:
    """What `transformers` calls a tensor of a GGUF file.

    Raises:
        BaseModelFormatError: A llama model has no such tensor.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _IN_BLOCK:
        raise BaseModelFormatError(f"the GGUF file has a tensor {name!r:.80}, which is not known")
    return f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}.weight"


def halves_from_pairs(rows: Floats, head_count: int) -> Floats:
    """Reorder the rows of each head from 0, half, 1, half + 1, … to 0, 1, …, half, half + 1, …."""
    by_head = rows.reshape(head_count, -1, 2, rows.shape[1])
    return by_head.swapaxes(1, 2).reshape(rows.shape)


def bfloat16_bits(numbers: Floats) -> NDArray[np.uint16]:
    """Finite float32 numbers rounded to the nearest bfloat16, ties to even, as their bits."""
    import numpy as np

    bits = numbers.view(np.uint32)
    # The upper half is what stays; below a tie nothing carries into it, above a tie one does.
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + carry) >> np.uint32(16)).astype(np.uint16)


def _plain_numbers(tensor: Any) -> Floats:
    import numpy as np
    from gguf.quants import dequantize

    try:
        numbers: Floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as exc:
        raise BaseModelFormatError(
            f"{tensor.name} is of type {tensor.tensor_type.name}, which cannot be read"
        ) from exc
    if not np.isfinite(numbers).all():
        raise BaseModelFormatError(f"{tensor.name} holds numbers that are not finite")
    return np.ascontiguousarray(numbers)
