"""What all engines ask of an adapter, and of its files, whoever wrote them.

`checkpoints/format.py` reads and writes them; here is what is refused, and why, and how adapters
of other programs are brought to our alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tinsmith.checkpoints import format as files
from tinsmith.engines.base import AdapterSpec, BaseModel
from tinsmith.errors import CheckpointFormatError, NotFoundError, ValidationError
from tinsmith.model.architecture import ALPHA

OPTIMIZERS = ("adamw", "dimuon")

Array: TypeAlias = "np.ndarray[Any, Any]"


@contextmanager
def fitting() -> Iterator[None]:
    """What is wrong with the files is the matter of who asked for them."""
    try:
        yield
    except CheckpointFormatError as exc:
        raise ValidationError(str(exc)) from exc


def scaled_factors(found: files.Adapter) -> dict[str, Array]:
    """A and B of each layer, such that their product counts ALPHA / rank times."""
    scale = np.float32(found.alpha / ALPHA)
    factors: dict[str, Array] = {}
    for module, pair in found.layers.items():
        factors[f"{module}.A"] = pair.a.astype(np.float32)
        factors[f"{module}.B"] = pair.b.astype(np.float32) * scale
    return factors


def read_moments(folder: Path, engine: str, spec: AdapterSpec) -> tuple[int, dict[str, Array]]:
    """The steps that the optimizer made, and its moments.

    Raises:
        ValidationError: There are none, or they are of another engine or optimizer.
    """
    state, moments = files.read_state(folder), files.read_arrays(folder, files.OPTIMIZER)
    if state is None or moments is None or state.engine != engine:
        raise ValidationError(
            "the checkpoint has no optimizer state that this engine can read",
            remedy="load it with optimizer=False",
        )
    if state.optimizer.get("type") != spec.optimizer.type:
        raise ValidationError(
            f"the checkpoint was trained with {state.optimizer.get('type')!r}, the model is made "
            f"for {spec.optimizer.type!r}",
            remedy="load it with optimizer=False",
        )
    return state.steps, moments


def known_model(models: Mapping[str, BaseModel], name: str) -> BaseModel:
    """The base model of that name.

    Raises:
        NotFoundError: There is none.
    """
    if name not in models:
        raise NotFoundError(f"there is no base model {name!r}")
    return models[name]


def model_to_train(models: Mapping[str, BaseModel], spec: AdapterSpec) -> BaseModel:
    """The base model of an adapter. Which layers can be trained, the engine looks at.

    Raises:
        NotFoundError: There is none of that name.
        ValidationError: The rank or the optimizer cannot be had.
    """
    model = known_model(models, spec.base_model)
    if not 1 <= spec.lora.rank <= model.max_rank:
        raise ValidationError(
            f"rank is {spec.lora.rank}; for {model.name} it may be 1 to {model.max_rank}"
        )
    if spec.optimizer.type not in OPTIMIZERS:
        raise ValidationError(
            f"there is no optimizer {spec.optimizer.type!r}",
            remedy=f"known are {', '.join(OPTIMIZERS)}",
        )
    return model


def check_base(models: Mapping[str, BaseModel], folder: Path, wanted: str) -> None:
    """Refuse weights of another model; those of other programs may not tell theirs.

    Raises:
        ValidationError: The files are of another model.
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
        raise ValidationError(f"the checkpoint is one of {saved}, not of {wanted}")
