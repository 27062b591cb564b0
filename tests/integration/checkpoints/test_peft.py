"""Our adapters in `peft` and those of `peft` with us, on a small random model."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.checkpoints.format import LoraPair, StoredAdapter, read_adapter, write_adapter
from tinsmith.checkpoints.imported import import_adapter

RANK = 4
ALPHA = 6.0
TOKENS = torch.tensor([[1, 5, 7, 2, 30, 4]])


def library(name: str) -> Any:
    """Loaded when it is used: it takes seconds, and its types say too little."""
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def folder_of_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with random weights."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return library("transformers").Qwen3ForCausalLM.from_pretrained(folder).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS).logits
    assert isinstance(found, torch.Tensor)
    return found


def adapter_for(model: Any, name: str) -> StoredAdapter:
    """Random factors for every linear layer, the output layer among them."""
    random = np.random.default_rng(1)
    layers = {}
    for module, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            outputs, inputs = layer.weight.shape
            layers[module] = LoraPair(
                random.standard_normal((RANK, inputs)).astype("f4") * 0.3,
                random.standard_normal((outputs, RANK)).astype("f4") * 0.3,
            )
    assert "lm_head" in layers
    return StoredAdapter(base_model=name, rank=RANK, alpha=ALPHA, layers=layers)


def apply_by_formula(model: Any, adapter: StoredAdapter) -> None:
    """Add `alpha / rank * b @ a` to each weight."""
    for module, pair in adapter.layers.items():
        with torch.no_grad():
            added = torch.from_numpy(pair.b @ pair.a) * (adapter.alpha / adapter.rank)
            model.get_submodule(module).weight += added


def test_peft_loads_our_adapters_and_computes_the_expected_output(
    tmp_path: Path, folder_of_model: Path
) -> None:
    model = load(folder_of_model)
    without = logits(model)
    adapter = adapter_for(model, str(folder_of_model))
    write_adapter(tmp_path, adapter)
    by_hand = load(folder_of_model)
    apply_by_formula(by_hand, adapter)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = library("peft").PeftModel.from_pretrained(model, tmp_path).eval()

    # It warns of keys that it misses or does not know.
    assert not [warning for warning in told if "adapter keys" in str(warning.message)]
    torch.testing.assert_close(logits(loaded), logits(by_hand), rtol=1e-4, atol=1e-4)
    assert (logits(loaded) - without).abs().max() > 0.1


def test_adapters_saved_by_peft_can_be_imported(tmp_path: Path, folder_of_model: Path) -> None:
    peft = library("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        use_rslora=True,
    )
    model = peft.get_peft_model(load(folder_of_model), config).eval()
    source, target = tmp_path / "source", tmp_path / "target"
    model.save_pretrained(source)
    target.mkdir()

    imported = import_adapter(source, target)

    assert imported.base_model == str(folder_of_model)
    assert len(imported.layers) == 6
    by_hand = load(folder_of_model)
    apply_by_formula(by_hand, read_adapter(target))
    torch.testing.assert_close(logits(model), logits(by_hand), rtol=1e-4, atol=1e-4)
