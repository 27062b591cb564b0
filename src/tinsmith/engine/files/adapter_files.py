"""The checks that every engine makes on an adapter and its files.

`checkpoints/format.py` reads and writes the files. This module refuses those that do not fit, and
rescales adapters that other programs saved with a different alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tinsmith.checkpoints import format as files
from tinsmith.engine.base import AdapterSpec, BaseModel
from tinsmith.engine.model.architecture import ALPHA
from tinsmith.errors import CheckpointFormatError, NotFoundError, ValidationError

OPTIMIZERS = ("adamw", "dimuon")

Array: TypeAlias = "np.ndarray[Any, Any]"


@contextmanager
def fitting() -> Iterator[None]:
    """Turn errors in the files into the caller's error: they chose the files."""
    try:
        yield
    except CheckpointFormatError as exc:
        raise ValidationError(str(exc)) from exc


def scaled_factors(found: files.StoredAdapter) -> dict[str, Array]:
    """A and B of each layer, rescaled so that ALPHA / rank is the right scale for their product."""
    scale = np.float32(found.alpha / ALPHA)
    factors: dict[str, Array] = {}
    for module, pair in found.layers.items():
        factors[f"{module}.A"] = pair.a.astype(np.float32)
        factors[f"{module}.B"] = pair.b.astype(np.float32) * scale
    return factors


def read_moments(folder: Path, engine: str, spec: AdapterSpec) -> tuple[int, dict[str, Array]]:
    """The optimizer's step count and its moments.

    Raises:
        ValidationError: The files have none, or those of another engine or optimizer.
    """
    state, moments = files.read_state(folder), files.read_arrays(folder, files.OPTIMIZER)
    if state is None or moments is None or state.engine != engine:
        raise ValidationError(
            "the checkpoint has no optimizer state that this engine can read",
            remedy="load it with optimizer=False",
        )
    if state.optimizer.get("type") != spec.optimizer.type:
        raise ValidationError(
            f"the checkpoint was trained with {state.optimizer.get('type')!r}, but "
            "the model was created "
            f"for {spec.optimizer.type!r}",
            remedy="load it with optimizer=False",
        )
    return state.steps, moments


def known_model(models: Mapping[str, BaseModel], name: str) -> BaseModel:
    """The base model with this name.

    Raises:
        NotFoundError: No base model has this name.
    """
    if name not in models:
        raise NotFoundError(f"there is no base model {name!r}")
    return models[name]


def model_to_train(models: Mapping[str, BaseModel], spec: AdapterSpec) -> BaseModel:
    """The base model of an adapter. The engine itself checks which layers can be trained.

    Raises:
        NotFoundError: No base model has this name.
        ValidationError: The rank or the optimizer is not supported.
    """
    model = known_model(models, spec.base_model)
    if not 1 <= spec.lora.rank <= model.max_rank:
        raise ValidationError(
            f"rank is {spec.lora.rank}; for {model.name} it must be 1 to {model.max_rank}"
        )
    if spec.optimizer.type not in OPTIMIZERS:
        raise ValidationError(
            f"unknown optimizer {spec.optimizer.type!r}",
            remedy=f"expected one of {', '.join(OPTIMIZERS)}",
        )
    return model


def check_base(models: Mapping[str, BaseModel], folder: Path, wanted: str) -> None:
    """Refuse weights of another base model. Files of other programs may not name theirs.

    Raises:
        ValidationError: The files name another base model.
    """
    with fitting():
        config = files.read_json(folder / files.ADAPTER_CONFIG, files.PeftConfig)
    saved = config.base_model_name_or_path
    if not saved:
        return
    first = known_model(models, wanted)
    names = {first.name, first.alias_of or first.name, first.source or first.name}
    known = models.get(saved)
    if saved not in names and (known is None or known.alias_of not in names):
        raise ValidationError(f"the checkpoint was trained on {saved}, not on {wanted}")
