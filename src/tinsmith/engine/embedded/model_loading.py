"""Loads base models to a device, in a dtype that it has hardware for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tinsmith.engine.embedded.embedded_settings import Dtype, EmbeddedModel
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import BaseModelFormatError, ValidationError


class ModelDtypes(NamedTuple):
    """The dtypes of a base model."""

    held: torch.dtype
    """Storage of the matrices."""
    computed: torch.dtype


def choose_device(wanted: str) -> str:
    """The requested device, or the best available one.

    Raises:
        ValidationError: The requested device is not available.
    """
    has_cuda = torch.cuda.is_available()
    if not wanted.startswith("cuda"):
        return "cuda" if has_cuda and wanted != "cpu" else "cpu"
    if not has_cuda:
        raise ValidationError(f"device is {wanted}, but PyTorch finds no CUDA device")
    number = int(wanted.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise ValidationError(
            f"device is {wanted}, but PyTorch finds {torch.cuda.device_count()} CUDA devices"
        )
    return wanted


def choose_dtypes(wanted: Dtype, device: str) -> ModelDtypes:
    """The requested dtype; by default bfloat16 with hardware support, and else float32.

    Without hardware support bfloat16 matmuls are twenty times slower than float32. Requested
    bfloat16 weights are then stored in bfloat16 and computed in float32.

    The choice is not based on a measurement: a busy machine must choose the same, or the replay
    after a crash would not be bit-identical.
    """
    has_bfloat16 = device.startswith("cuda") or (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    if wanted == "float32" or (wanted == "auto" and not has_bfloat16):
        return ModelDtypes(torch.float32, torch.float32)
    return ModelDtypes(torch.bfloat16, torch.bfloat16 if has_bfloat16 else torch.float32)


def load_models(
    models: Sequence[EmbeddedModel], dtypes: ModelDtypes, device: str
) -> dict[str, Transformer]:
    """All models by name; models with the same folder are loaded once.

    Raises:
        BaseModelError: A model cannot be loaded.
    """
    # PyTorch reads this once, at its first large allocation: vectors then come in huge pages, which
    # are allocated in a quarter of the time. An optimizer step of a SmolLM2 adapter saves a
    # quarter.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    loaded: dict[Path, Transformer] = {}
    found: dict[str, Transformer] = {}
    for one in models:
        folder = one.folder.resolve()
        if folder not in loaded:
            try:
                loaded[folder] = load_base_model(
                    folder, dtype=dtypes.computed, held_in=dtypes.held, device=device
                )
            except BaseModelFormatError as exc:  # add the name: the error has only the class
                message = f"the model {one.name}: {exc.args[0]}"
                raise BaseModelFormatError(message, remedy=exc.remedy) from exc
        found[one.name] = loaded[folder]
    return found
