"""Merged models, against the base model with its adapter as `peft` computes it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.small_models import make_model
from tinsmith.checkpoints.format import OUTPUT_LAYER, LoraPair, StoredAdapter, write_adapter
from tinsmith.checkpoints.safetensors_file import read_header, read_tensors
from tinsmith.engine.files.merged import CARD, merge_adapter
from tinsmith.engine.model.weight_files import INDEX
from tinsmith.errors import BaseModelFormatError, CheckpointFormatError

TOKENS = torch.tensor([[5, 17, 3, 250, 8]])
RANK, ALPHA = 3, 12.0


def an_adapter(base: Path, layers: list[str], size: float = 0.2) -> StoredAdapter:
    """Random factors for these layers, of the sizes that the base model has."""
    entries = {
        name: entry
        for file in base.glob("*.safetensors")
        for name, entry in read_header(file).tensors.items()
    }
    random = np.random.default_rng(1)
    pairs = {}
    for layer in layers:
        is_tied = layer == OUTPUT_LAYER and "lm_head.weight" not in entries
        name = "model.embed_tokens.weight" if is_tied else f"{layer}.weight"
        outputs, inputs = entries[name].shape
        pairs[layer] = LoraPair(
            random.normal(0, size, (RANK, inputs)).astype(np.float32),
            random.normal(0, size, (outputs, RANK)).astype(np.float32),
        )
    return StoredAdapter(base_model="base", rank=RANK, alpha=ALPHA, layers=pairs)


def some_layers() -> list[str]:
    return [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
        OUTPUT_LAYER,
    ]


def loaded(folder: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def with_peft(base: Path, adapter: StoredAdapter, folder: Path) -> Any:
    import peft

    folder.mkdir()
    write_adapter(folder, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(loaded(base), folder)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
        return logits


@pytest.mark.parametrize("shard", [None, "60KB"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_merged_model_equals_the_base_model_with_its_adapter(
    tmp_path: Path, family: str, shard: str | None
) -> None:
    """Also where the output layer is shared with the embedding, and in several files."""
    base, merged = tmp_path / "base", tmp_path / "merged"
    make_model(base, family)
    if shard is not None:
        whole = loaded(base)
        for file in base.glob("*.safetensors"):
            file.unlink()
        whole.save_pretrained(base, max_shard_size=shard)
        assert len(list(base.glob("*.safetensors"))) > 1
    (base / CARD).write_text("of the base")
    (base / "tokenizer.json").write_text("{}")
    merged.mkdir()
    adapter = an_adapter(base, some_layers())

    merge_adapter(base, adapter, merged, card="of the merged model")

    expected = logits_of(with_peft(base, adapter, tmp_path / "adapter"))
    assert (expected - logits_of(loaded(base))).abs().max() > 0.5  # the adapter does something
    torch.testing.assert_close(logits_of(loaded(merged)), expected, rtol=1e-4, atol=1e-4)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
    assert (merged / "tokenizer.json").read_text() == "{}"
    assert (merged / CARD).read_text() == "of the merged model"
    assert (merged / INDEX).exists() == (shard is not None)


def test_of_duplicate_weights_the_loaded_ones_are_merged(tmp_path: Path) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    make_model(base)
    whole = loaded(base)
    one_file = (base / "model.safetensors").read_bytes()
    for weight in whole.parameters():
        weight.data.mul_(2.0)
    whole.save_pretrained(base, max_shard_size="60KB")
    (base / "model.safetensors").write_bytes(one_file)
    merged.mkdir()
    adapter = an_adapter(base, ["model.layers.0.self_attn.q_proj"], size=0.0)

    merge_adapter(base, adapter, merged)

    assert (base / INDEX).exists()
    torch.testing.assert_close(logits_of(loaded(merged)), logits_of(loaded(base)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merged_weights_keep_the_dtype_of_the_base_model(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    make_model(base).to(dtype).save_pretrained(base)
    merged.mkdir()
    layers = ["model.layers.0.self_attn.q_proj"]
    adapter = an_adapter(base, layers)

    merge_adapter(base, adapter, merged)

    before, after = (loaded_tensors(folder) for folder in (base, merged))
    [name] = [name for name in after if not torch.equal(before[name], after[name])]
    pair = adapter.layers[layers[0]]
    added = torch.from_numpy(pair.b @ pair.a) * (ALPHA / RANK)
    assert name == f"{layers[0]}.weight"
    assert after[name].dtype == dtype
    assert torch.equal(after[name], (before[name].float() + added).to(dtype))
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True


def loaded_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_an_adapter_of_another_model_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    base, other, merged = tmp_path / "base", tmp_path / "other", tmp_path / "merged"
    make_model(base)
    make_model(other, hidden_size=32)
    merged.mkdir()

    with pytest.raises(CheckpointFormatError, match=r"q_proj is \[64, 48\]"):
        merge_adapter(base, an_adapter(other, some_layers()), merged)
    renamed = an_adapter(base, some_layers())
    renamed.layers["model.layers.9.mlp.up_proj"] = renamed.layers.pop(some_layers()[0])
    with pytest.raises(CheckpointFormatError, match=r"no layer model\.layers\.9"):
        merge_adapter(base, renamed, merged)
    assert list(merged.iterdir()) == []


def test_values_that_overflow_the_dtype_are_rejected(tmp_path: Path) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    make_model(base).to(torch.float16).save_pretrained(base)
    merged.mkdir()

    with pytest.raises(CheckpointFormatError, match="cannot represent"):
        merge_adapter(base, an_adapter(base, some_layers(), size=1e4), merged)


def test_a_folder_without_safetensors_is_rejected_as_a_base_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    adapter = StoredAdapter(base_model="b", rank=1, alpha=1.0, layers={})

    with pytest.raises(BaseModelFormatError, match="safetensors"):
        merge_adapter(tmp_path, adapter, tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(BaseModelFormatError, match="outside of its folder"):
        merge_adapter(tmp_path, adapter, tmp_path)


def test_merging_changes_nothing_else_of_the_base_model(tmp_path: Path) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    make_model(base)
    merged.mkdir()

    merge_adapter(base, an_adapter(base, ["model.layers.0.mlp.up_proj"]), merged)

    before, after = (
        read_tensors(base / "model.safetensors"),
        read_tensors(merged / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]


def test_a_model_with_transposed_weights_is_not_merged(tmp_path: Path) -> None:
    """A square one would come out wrong without a word."""
    make_model(tmp_path / "base", "GPT2")
    (tmp_path / "merged").mkdir()
    adapter = an_adapter(tmp_path / "base", ["transformer.h.0.attn.c_proj"])

    with pytest.raises(BaseModelFormatError, match="gpt2"):
        merge_adapter(tmp_path / "base", adapter, tmp_path / "merged")

    assert not list((tmp_path / "merged").iterdir())
