"""Small random models of several families, in folders as the hub has them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Llama-threefold": {"num_attention_heads": 6},
    "Llama-scaled": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Mistral": {"sliding_window": 7},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {**_MIXTURE, "norm_topk_prob": True},
    "Qwen2Moe": {**_MIXTURE, "shared_expert_intermediate_size": 56},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Gemma": {},
    "Gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 24},
    "Gemma3": {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
}
"""By name, what each is made with; a suffix after `-` is ours."""
OTHERS: dict[str, dict[str, Any]] = {
    "Phi3": {"head_dim": 12, "sliding_window": 7},
    "Olmo2": {},
    "GPTNeoX": {},
    "Starcoder2": {"head_dim": 12, "sliding_window": 7},
    "Granite": {
        "head_dim": 12,
        "logits_scaling": 3.0,
        "embedding_multiplier": 5.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
    },
    "Cohere2": {"sliding_window": 7, "sliding_window_pattern": 2, "logit_scale": 0.3},
    "GPT2": {},
    "Olmoe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2},
    "Olmo-clipped": {"head_dim": 12, "clip_qkv": 0.1},
}
"""Those that `transformers` computes."""


def make_model(folder: Path, family: str = "Llama", **settings: Any) -> Any:
    """Write a random model to the folder, and give it as `transformers` has it."""
    import transformers

    name = family.partition("-")[0]
    config_class = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
    model_class = getattr(transformers, _MODELS.get(name, f"{name}ForCausalLM"))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(**{**_SIZES, **{**FAMILIES, **OTHERS}.get(family, {}), **settings})
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases begin as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
    return model


def change_config(folder: Path, without: Iterable[str] = (), **values: Any) -> None:
    """Rewrite a model's `config.json`, as an older or another program would have had it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kept = {key: value for key, value in config.items() if key not in set(without)}
    path.write_text(json.dumps({**kept, **values}))


_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma3n": "Gemma3nTextConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel"}
