"""Which of a folder's tensors become a model, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.numerics.small_models import make_model
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.weight_files import INDEX, ONE_FILE
from tinsmith.errors import BaseModelFormatError

TOKENS = torch.arange(3, 15)


def _logits(folder: Path) -> Tensor:
    model = load_base_model(folder)
    with torch.no_grad():
        rows = model.forward(
            TOKENS, torch.arange(len(TOKENS)), PackedAttention([PackedSegment(0, 12)])
        )
        return model.head.logits(rows)


def _write(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def _zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(one) for name, one in tensors.items()}


def test_unrelated_files_beside_the_weights_are_not_read(tmp_path: Path) -> None:
    """Such as the weights in another program's form, or what an earlier save left there."""
    make_model(tmp_path)
    wanted = _logits(tmp_path)

    _write(tmp_path, "zz.safetensors", _zeros_like(load_file(tmp_path / ONE_FILE)))

    assert torch.equal(_logits(tmp_path), wanted)


def test_only_the_weight_files_named_in_the_index_are_read(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    wanted = _logits(tmp_path)
    (tmp_path / ONE_FILE).unlink()

    model.save_pretrained(tmp_path, max_shard_size="60KB")
    first = load_file(min(tmp_path.glob("*.safetensors")))
    _write(tmp_path, "model-99999-of-99999.safetensors", _zeros_like(first))

    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(_logits(tmp_path), wanted)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (tmp_path / ONE_FILE).unlink()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    missing = max(tmp_path.glob("*.safetensors"))
    missing.unlink()

    with pytest.raises(BaseModelFormatError, match=f"{missing.name}, which"):
        load_base_model(tmp_path)


def test_without_an_index_a_duplicate_tensor_is_rejected(tmp_path: Path) -> None:
    make_model(tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    (tmp_path / ONE_FILE).unlink()

    _write(tmp_path, "a.safetensors", weights)
    _write(tmp_path, "b.safetensors", {"model.norm.weight": weights["model.norm.weight"]})

    with pytest.raises(
        BaseModelFormatError, match=r"model\.norm\.weight.*which another file has too"
    ):
        load_base_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_of_a_quantised_type_are_rejected(dtype: torch.dtype, tmp_path: Path) -> None:
    """As numbers they would be read without the scales that belong to them."""
    make_model(tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"

    _write(tmp_path, ONE_FILE, {**weights, name: (weights[name] * 9).to(dtype)})

    with pytest.raises(BaseModelFormatError, match=r"up_proj.*quantised"):
        load_base_model(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_the_error_names_a_missing_tensor(family: str, tmp_path: Path) -> None:
    """`transformers` would make one up, of random numbers."""
    make_model(tmp_path, family)
    weights = load_file(tmp_path / ONE_FILE)
    del weights["model.layers.1.mlp.down_proj.weight"]

    _write(tmp_path, ONE_FILE, weights)

    with pytest.raises(BaseModelFormatError, match=r"layers\.1\.mlp\.down_proj"):
        load_base_model(tmp_path)


def test_a_bias_that_contradicts_the_configuration_is_rejected(tmp_path: Path) -> None:
    make_model(tmp_path)
    weights = load_file(tmp_path / ONE_FILE)

    _write(tmp_path, ONE_FILE, {**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)})

    with pytest.raises(BaseModelFormatError, match="attention_bias = false"):
        load_base_model(tmp_path)


def test_a_separate_output_layer_is_used_even_if_the_config_says_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `transformers` does: the setting was left behind, and the weights were trained."""
    make_model(tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    tied = _logits(tmp_path)

    _write(tmp_path, ONE_FILE, {**weights, "lm_head.weight": -weights["model.embed_tokens.weight"]})

    torch.testing.assert_close(_logits(tmp_path), -tied)
    assert "ties the output layer" in caplog.text


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    others = {
        "model.layers.0.self_attn.q_norm.weight": torch.ones(16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }

    _write(tmp_path, ONE_FILE, {**weights, **others})
    with caplog.at_level(logging.WARNING):
        load_base_model(tmp_path)

    assert "1 tensors" in caplog.text
    assert "q_norm" in caplog.text


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_pickled_weights_are_rejected_with_a_fix(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)

    (tmp_path / ONE_FILE).rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(BaseModelFormatError, match=r"pytorch_model\.bin.*save_pretrained"):
        load_base_model(tmp_path)


@pytest.mark.parametrize("places", ["[]", '{"a": 5}', '{"a": ["x"]}', '{"a": "../x.safetensors"}'])
def test_an_index_that_names_no_files_of_the_folder_is_rejected(
    tmp_path: Path, places: str
) -> None:
    make_model(tmp_path)
    (tmp_path / ONE_FILE).unlink()
    (tmp_path / INDEX).write_text(f'{{"weight_map": {places}}}')

    with pytest.raises(BaseModelFormatError, match=INDEX):
        load_base_model(tmp_path)
