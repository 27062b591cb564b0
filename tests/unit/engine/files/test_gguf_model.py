"""A GGUF file becomes a folder that says the same: numbers, settings and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.unit.engine.files.tiny_gguf import (
    BLOCKS,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    TOKENS,
    Weights,
    pairs_from_halves,
    random_weights,
    write_gguf,
)
from tinsmith.engine.files.gguf_model import DType, convert_gguf
from tinsmith.engine.files.gguf_weights import bfloat16_bits, halves_from_pairs
from tinsmith.errors import BaseModelFormatError

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def converted(
    tmp_path: Path,
    weights: Weights,
    *,
    dtype: DType = "float32",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    write_gguf(tmp_path / "model.gguf", weights, kind=kind)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder, dtype=dtype)
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
def test_float32_weights_round_trip_bit_for_bit(tmp_path: Path, is_tied: bool) -> None:
    weights = random_weights(is_tied=is_tied)

    found = load_file(converted(tmp_path, weights) / "model.safetensors")

    assert found.keys() == weights.keys()
    for name, numbers in weights.items():
        np.testing.assert_array_equal(found[name], numbers, err_msg=name)


def test_bfloat16_is_rounded_as_torch_rounds_it(tmp_path: Path) -> None:
    weights = random_weights()

    folder = converted(tmp_path, weights, dtype="bfloat16")

    found = load_torch_file(folder / "model.safetensors")
    for name, numbers in weights.items():
        assert torch.equal(found[name], torch.from_numpy(numbers).bfloat16()), name


def test_rounding_agrees_with_torch_on_ties_and_at_the_edges() -> None:
    bits = np.arange(0, 1 << 32, 65_521 * 3, dtype=np.uint32)
    ties = (np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16) | 0x8000
    numbers = np.concatenate([bits, ties]).view(np.float32)
    numbers = np.ascontiguousarray(numbers[np.isfinite(numbers)])

    rounded = bfloat16_bits(numbers)

    expected = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize(("kind", "bits"), [(Q4_1, 4), (Q8_0, 8)])
def test_quantised_weights_are_within_half_a_step(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, bits: int
) -> None:
    """Of the range of a block of 32 numbers; Q8_0 has its range on both sides of zero."""
    weights = random_weights()

    found = load_file(converted(tmp_path, weights, kind=kind) / "model.safetensors")

    for name, numbers in weights.items():
        blocks, got = numbers.reshape(-1, 32), found[name].reshape(-1, 32)
        widest = blocks.max(-1) - blocks.min(-1) if bits == 4 else 2 * np.abs(blocks).max(-1)
        # The step and the least are float16: a thousandth more.
        step = widest / (2**bits - 1 - (bits == 8))
        assert (np.abs(blocks - got).max(-1) <= 0.5 * step + 2e-3 * np.abs(blocks).max(-1)).all()
        assert numbers.ndim == 1 or not np.array_equal(found[name], numbers)


def test_converting_the_rope_layout_permutes_rows_and_is_reversible() -> None:
    rows = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)

    paired = pairs_from_halves(rows, 2)

    assert paired[:4, 0].tolist() == [0.0, 12.0, 3.0, 15.0]  # rows 0, 4, 1, 5
    np.testing.assert_array_equal(halves_from_pairs(paired, 2), rows)
    assert not np.array_equal(halves_from_pairs(paired, 1), rows)


def test_transformers_computes_the_same_logits_from_the_converted_model(tmp_path: Path) -> None:
    """Settings too: the base of the rotation, heads that share keys, the tied output."""
    weights = random_weights()
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        tie_word_embeddings=True,
    )
    llama: Any = LlamaForCausalLM  # its calls have no types
    expected = llama(config).eval()
    tensors = {name: torch.from_numpy(numbers) for name, numbers in weights.items()}
    expected.load_state_dict(tensors, strict=False)
    ids = torch.arange(40).remainder(len(TOKENS)).unsqueeze(0)

    model = LlamaForCausalLM.from_pretrained(converted(tmp_path, weights), dtype=torch.float32)

    assert model.config.max_position_embeddings == 128
    assert model.config.rms_norm_eps == 1e-5
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 0)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=1e-5)


def test_the_converted_tokenizer_round_trips_text(tmp_path: Path) -> None:
    folder = converted(tmp_path, random_weights())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    encoded = tokenizer.encode("the the12<|end|>\n")

    # `12` has a token, but digits are cut before merging.
    assert encoded.tokens == ["t", "he", "Ġthe", "1", "2", "<|end|>", "Ċ"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "the the12<|end|>\n"
    assert tokenizer.decode(encoded.ids) == "the the12\n"


def test_transformers_reads_the_special_tokens_and_the_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, random_weights()))

    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)

    assert text == "<|user|>hi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|user|>", "<|end|>")
    assert tokenizer("hi")["input_ids"] == [TOKENS.index("h"), TOKENS.index("i")]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer.ggml.model": "llama"}, "only gpt2"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling"),
    ],
)
def test_unknown_tokenizers_and_rope_scaling_are_rejected(
    tmp_path: Path, fields: dict[str, str], told: str
) -> None:
    write_gguf(tmp_path / "model.gguf", random_weights(), fields=fields)

    with pytest.raises(BaseModelFormatError, match=told):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("change", ["missing", "more", "shape", "nan"])
def test_weights_that_do_not_fit_are_rejected(tmp_path: Path, change: str) -> None:
    weights = random_weights()
    if change == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif change == "more":
        weights["rope_freqs.weight"] = np.ones(8, np.float32)
    elif change == "shape":
        weights["model.norm.weight"] = np.ones(32, np.float32)
    else:
        weights["model.norm.weight"][3] = np.nan
    write_gguf(tmp_path / "model.gguf", weights)

    with pytest.raises(BaseModelFormatError):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\3\4" + b"x" * 400, b"GGUF\3\0\0\0" * 8])
def test_a_file_that_is_not_gguf_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(BaseModelFormatError, match=r"model\.gguf"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_the_config_names_the_dtype(tmp_path: Path) -> None:
    folder = converted(tmp_path, random_weights(), dtype="bfloat16")

    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
