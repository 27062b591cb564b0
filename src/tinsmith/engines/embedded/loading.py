"""Base models onto the device, computed in a type that it has hardware for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tinsmith.engines.embedded.settings import Device, Dtype, EmbeddedModel
from tinsmith.errors import BaseModelFormatError, ValidationError
from tinsmith.model.load_weights import load_transformer
from tinsmith.model.transformer import Transformer


class Types(NamedTuple):
    """Those of a base model."""

    held: torch.dtype
    """Its matrices."""
    computed: torch.dtype


def chosen_device(wanted: Device) -> str:
    """The device that is asked for, or the best that there is.

    Raises:
        ValidationError: It is not there.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValidationError("device is cuda; PyTorch finds none on this machine")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def chosen_types(wanted: Dtype, device: str) -> Types:
    """The type that is asked for; or bfloat16 where there is hardware for it, and else float32.

    Without such hardware products in bfloat16 take twenty times as long as in float32. Weights
    that are asked for in bfloat16 are held in it there, and computed with in float32.

    It is not measured which is faster: the same machine must choose the same when it is busy, or
    what is computed again after a crash would come out otherwise.
    """
    has_bfloat16 = device == "cuda" or (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    if wanted == "float32" or (wanted == "auto" and not has_bfloat16):
        return Types(torch.float32, torch.float32)
    return Types(torch.bfloat16, torch.bfloat16 if has_bfloat16 else torch.float32)


def load_models(
    models: Sequence[EmbeddedModel], types: Types, device: str
) -> dict[str, Transformer]:
    """Each model by its name; those of one folder are loaded once.

    Raises:
        BaseModelError: A model cannot be loaded.
    """
    # PyTorch looks once, when it first takes much memory: vectors then come in huge pages, which
    # are made in a quarter of the time. A step of SmolLM2's adapters takes a quarter less with it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    loaded: dict[Path, Transformer] = {}
    found: dict[str, Transformer] = {}
    for one in models:
        folder = one.folder.resolve()
        if folder not in loaded:
            try:
                loaded[folder] = load_transformer(
                    folder, dtype=types.computed, held_in=types.held, device=device
                )
            except BaseModelFormatError as exc:  # several may be given, and it names the kind alone
                told = f"the model {one.name}: {exc.args[0]}"
                raise BaseModelFormatError(told, remedy=exc.remedy) from exc
        found[one.name] = loaded[folder]
    return found
