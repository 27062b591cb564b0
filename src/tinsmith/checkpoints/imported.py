"""Adapters made elsewhere, as checkpoints of ours.

A folder that `peft` wrote is read, checked, and written in our form: float32, PEFT's names. What
our engines could not train on as it was meant is refused with the reason. Nothing is unpickled.

Whether the layers are those of the base model is for the engine to see, when it loads them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.checkpoints.disk import disk_errors
from tinsmith.checkpoints.format import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    OUTPUT_LAYER,
    Layout,
    LoraPair,
    PeftConfig,
    StoredAdapter,
    is_extra,
    layer_of,
    lora_config_of,
    read_adapter,
    read_json,
    tensor_name,
    write_adapter,
)
from tinsmith.checkpoints.safetensors_file import read_header
from tinsmith.errors import CheckpointFormatError, shown
from tinsmith.types.training import LoraConfig

WEIGHTS_BYTES_MAX = 64 << 30
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
# Settings of PEFT that change what an adapter computes. Empty or false they are no matter.
_NOT_SUPPORTED = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication",
    "fan_in_fan_out", "lora_bias", "target_parameters", "trainable_token_indices", "use_qalora",
    "alora_invocation_tokens", "arrow_config", "megatron_config", "use_bdlora", "velora_config",
)  # fmt: skip


def import_adapter(
    source: Path,
    folder: Path,
    *,
    base_model: str | None = None,
    max_bytes: int = WEIGHTS_BYTES_MAX,
) -> StoredAdapter:
    """Write an adapter that `peft` saved into a folder, such as that of a `Staging`.

    Args:
        source: The folder with `adapter_config.json` and `adapter_model.safetensors`.
        folder: Where the files of the checkpoint go.
        base_model: What the service calls the base model; None takes the adapter's word for it.
        max_bytes: Larger weights are refused; they are held in memory.

    Returns:
        What was written.

    Raises:
        CheckpointFormatError: It is not a plain LoRA adapter of a language model.
        CheckpointUnavailableError: A folder cannot be read or written.
    """
    adapter = read_foreign(source, base_model=base_model, max_bytes=max_bytes)
    write_adapter(folder, adapter)
    return adapter


def read_foreign(
    source: Path, *, base_model: str | None = None, max_bytes: int = WEIGHTS_BYTES_MAX
) -> StoredAdapter:
    """Read an adapter that `peft` saved and check it; the same errors as `import_adapter`."""
    with disk_errors(f"{source} cannot be read"):
        _check_files(source, max_bytes)
        config = read_json(source / ADAPTER_CONFIG, dict[str, Any])
        if config.get("modules_to_save") == [OUTPUT_LAYER] and _has_output_factors(source):
            del config["modules_to_save"]  # it says the same as the factors, which are there too
    _check_settings(config)
    adapter = read_adapter(source)
    name = base_model or adapter.base_model
    if not name:
        raise CheckpointFormatError(
            f"{ADAPTER_CONFIG} names no base model", remedy="pass the one it was trained on"
        )
    # Rank-stabilized LoRA differs in the factor alone: alpha / sqrt(rank) instead of alpha / rank.
    scale = math.sqrt(adapter.rank) if config.get("use_rslora") else 1.0
    return msgspec.structs.replace(
        adapter,
        base_model=name,
        alpha=adapter.alpha * scale,
        layers={module: _as_float32(module, pair) for module, pair in adapter.layers.items()},
    )


def read_foreign_config(source: Path) -> tuple[str, LoraConfig]:
    """The base model and the LoRA configuration of an adapter that `peft` saved.

    Reads no weights, only their names. The base model is empty if the files name none. The same
    errors as `import_adapter`.
    """
    with disk_errors(f"{source} cannot be read"):
        _check_files(source, WEIGHTS_BYTES_MAX)
        config = read_json(source / ADAPTER_CONFIG, PeftConfig)
        names = [name for name in read_header(source / ADAPTER_MODEL).tensors if not is_extra(name)]
    lora = lora_config_of(config.r, {layer_of(name)[0] for name in names})
    return config.base_model_name_or_path or "", lora


def _check_files(source: Path, max_bytes: int) -> None:
    if not source.is_dir():
        raise CheckpointFormatError(f"{source} is not a folder")
    weights = source / ADAPTER_MODEL
    if not weights.is_file():
        pickled = next((name for name in _PICKLES if (source / name).exists()), None)
        if pickled is not None:
            raise CheckpointFormatError(
                f"its weights are in {pickled}, which could execute code when loaded",
                remedy="if you trust it, load it with peft and save it again with "
                "save_pretrained(…), which writes adapter_model.safetensors",
            )
        raise CheckpointFormatError(f"{ADAPTER_MODEL} is missing")
    size_bytes = weights.stat().st_size
    if size_bytes > max_bytes:
        raise CheckpointFormatError(
            f"{ADAPTER_MODEL} has {size_bytes} bytes; the maximum is {max_bytes}"
        )


def _has_output_factors(source: Path) -> bool:
    names = read_header(source / ADAPTER_MODEL).tensors
    return tensor_name(OUTPUT_LAYER, "A", Layout.PEFT) in names


def _check_settings(config: dict[str, Any]) -> None:
    for field, allowed in {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none", None),
    }.items():
        if config.get(field) not in allowed:
            raise CheckpointFormatError(
                f"{ADAPTER_CONFIG}: {field} is {shown(config.get(field))}",
                remedy=f"only {allowed[0]} can be imported",
            )
    for field in _NOT_SUPPORTED:
        if config.get(field):
            raise CheckpointFormatError(
                f"{ADAPTER_CONFIG}: {field} is {shown(config[field])}, which is not supported",
                remedy="convert the adapter to plain LoRA, or train it again",
            )


def _as_float32(module: str, pair: LoraPair) -> LoraPair:
    import numpy as np

    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
        a, b = pair.a.astype(np.float32), pair.b.astype(np.float32)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointFormatError(f"layer {module} contains NaN or infinity")
    return LoraPair(a, b)
