"""Small adapters to save."""

from __future__ import annotations

import numpy as np

from tinsmith.checkpoints.format import LoraPair, StoredAdapter


def an_adapter(rank: int = 4, seed: int = 0) -> StoredAdapter:
    """An attention layer, a feed-forward layer and the output layer, with random numbers."""
    random = np.random.default_rng(seed)

    def pair(outputs: int, inputs: int) -> LoraPair:
        return LoraPair(
            random.standard_normal((rank, inputs)).astype("f4"),
            random.standard_normal((outputs, rank)).astype("f4"),
        )

    layers = {
        "model.layers.0.self_attn.q_proj": pair(8, 16),
        "model.layers.0.mlp.gate_proj": pair(24, 16),
        "lm_head": pair(32, 16),
    }
    return StoredAdapter(base_model="Qwen/Qwen3-8B:tiny", rank=rank, alpha=32.0, layers=layers)


def same_layers(one: StoredAdapter, other: StoredAdapter) -> None:
    """Assert that both have the same numbers."""
    assert one.layers.keys() == other.layers.keys()
    for module, pair in one.layers.items():
        np.testing.assert_array_equal(pair.a, other.layers[module].a)
        np.testing.assert_array_equal(pair.b, other.layers[module].b)
