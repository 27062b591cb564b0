"""Adapters of the fake engine as files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tinsmith.engines.base import AdapterSpec, Saved
from tinsmith.engines.fake.arithmetic import Array, Tensors, fresh_weights
from tinsmith.engines.fake.training import Adapter
from tinsmith.errors import ValidationError


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    base_model: str
    rank: int
    optimizer: str
    steps: int
    parts: int


def save(adapter: Adapter, folder: Path, parts: Saved) -> None:
    """Write an adapter into an empty folder."""
    spec = adapter.spec
    config = _Config(
        base_model=spec.base_model,
        rank=spec.lora.rank,
        optimizer=spec.optimizer.type,
        steps=adapter.steps if Saved.OPTIMIZER in parts else 0,
        parts=parts.value,
    )
    (folder / "adapter.json").write_bytes(msgspec.json.encode(config))
    _write(folder / "weights.npz", adapter.weights)
    if Saved.OPTIMIZER in parts:
        _write(folder / "first_moments.npz", adapter.first_moments)
        _write(folder / "second_moments.npz", adapter.second_moments)
    if Saved.GRADIENTS in parts:
        _write(folder / "gradients.npz", adapter.gradients)


def load(spec: AdapterSpec, base_CK: Array, folder: Path, parts: Saved) -> Adapter:
    """Read an adapter; raises `ValidationError` if it does not fit."""
    config = _config(folder)
    if parts & ~Saved(config.parts):
        raise ValidationError("the checkpoint has no optimizer state")
    adapter = Adapter(spec, base_CK, load_weights(folder))
    expected = {name: one.shape for name, one in fresh_weights(spec.lora, "").items()}
    found = {name: one.shape for name, one in adapter.weights.items()}
    if expected != found:
        raise ValidationError(
            f"the checkpoint has rank {config.rank} or other layers than the model, "
            f"whose rank is {spec.lora.rank}"
        )
    if Saved.OPTIMIZER in parts:
        if config.optimizer != spec.optimizer.type:
            raise ValidationError(
                f"the checkpoint was trained with {config.optimizer!r}, the model is made for "
                f"{spec.optimizer.type!r}"
            )
        adapter.first_moments = _read(folder / "first_moments.npz")
        adapter.second_moments = _read(folder / "second_moments.npz")
        adapter.steps = config.steps
    if Saved.GRADIENTS in parts:
        adapter.gradients = _read(folder / "gradients.npz")
    return adapter


def load_weights(folder: Path) -> Tensors:
    """The weights alone."""
    return _read(folder / "weights.npz")


def base_model_of(folder: Path) -> str:
    """The name of the base model that the files belong to."""
    return _config(folder).base_model


def _config(folder: Path) -> _Config:
    try:
        return msgspec.json.decode((folder / "adapter.json").read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as exc:
        raise ValidationError(f"{folder.name} holds no adapter: {exc}") from exc


def _write(file: Path, tensors: Tensors) -> None:
    with file.open("wb") as content:
        np.savez(content, **tensors)  # type: ignore[arg-type]  # its stubs know one array only


def _read(file: Path) -> Tensors:
    try:
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError) as exc:
        raise ValidationError(f"{file.name} cannot be read: {exc}") from exc
