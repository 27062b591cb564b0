"""Base models onto the device, in the type that this machine computes fastest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tinsmith.engines.embedded.settings import Device, Dtype, EmbeddedModel
from tinsmith.errors import ValidationError
from tinsmith.model.load_weights import load_transformer
from tinsmith.model.transformer import Transformer

CLEARLY_FASTER = 1.3
"""How much faster bfloat16 has to be: it keeps under three digits."""
_MEASURED_SIZE = 512
_MEASURED_TIMES = 5


def chosen_device(wanted: Device) -> str:
    """The device that is asked for, or the best that there is.

    Raises:
        ValidationError: It is not there.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValidationError("device is cuda; PyTorch finds none on this machine")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def chosen_dtype(wanted: Dtype, device: str) -> torch.dtype:
    """The type that is asked for; or bfloat16 where it is clearly faster, and else float32."""
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device == "cuda":
        return torch.bfloat16
    gain = _seconds(torch.float32) / _seconds(torch.bfloat16)
    return torch.bfloat16 if gain > CLEARLY_FASTER else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    """What a product of matrices takes at best; tens of milliseconds in all."""
    matrix = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_MEASURED_TIMES):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - started)
    return best


def load_models(
    models: Sequence[EmbeddedModel], dtype: torch.dtype, device: str
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
            loaded[folder] = load_transformer(folder, dtype=dtype, device=device)
        found[one.name] = loaded[folder]
    return found
