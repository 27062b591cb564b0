"""A llama of a few thousand numbers, random, as a GGUF file and as the weights it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.files.gguf_weights import weight_shapes

Weights = dict[str, NDArray[np.float32]]

HEADS, KEY_HEADS, HEAD_DIM, HIDDEN, INNER, BLOCKS = 4, 2, 16, 64, 96, 2
BYTES = [chr(n) for n in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = ["<|end|>", "<|user|>", *BYTES, "he", "Ġt", "Ġthe", "12"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def random_weights(*, is_tied: bool = True) -> Weights:
    """Weights as `transformers` has them."""
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": BLOCKS,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": is_tied,
    }
    numbers = np.random.default_rng(5)
    return {
        name: numbers.normal(0.0, 0.3, shape).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }


def pairs_from_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The order of llama.cpp, one row after the other: 0, half, 1, half + 1, … in each head."""
    size = len(rows) // heads
    order = [
        head * size + i + offset
        for head in range(heads)
        for i in range(size // 2)
        for offset in (0, size // 2)
    ]
    return rows[order]


def write_gguf(
    file: Path,
    weights: Weights,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
) -> None:
    """Write the weights as llama.cpp has them; matrices in the given type, norms in float32.

    Args:
        file: Where to.
        weights: As `transformers` has them.
        kind: Of the matrices.
        fields: Texts that replace or are added to those of the file.
    """
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(20000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    texts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", **(fields or {})}
    for name, text in texts.items():
        writer.add_string(name, text)
    for name, numbers in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
        rows = numbers if heads is None else pairs_from_halves(numbers, heads)
        if numbers.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), rows)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """What llama.cpp calls a weight of `transformers`; a name that is in neither stays."""
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}.weight"
    return f"{GGUF_NAMES.get('.'.join(parts), '.'.join(parts))}.weight"
