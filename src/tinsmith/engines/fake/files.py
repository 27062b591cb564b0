"""Adapters of the fake engine as files, in the form of all checkpoints (`checkpoints/format.py`).

Moments are kept under the names of their matrices with `first.` and `second.` before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tinsmith.checkpoints import format as files
from tinsmith.engines.base import AdapterSpec, Saved
from tinsmith.engines.fake.arithmetic import ALPHA, Array, Tensors, fresh_weights
from tinsmith.engines.fake.training import Adapter
from tinsmith.errors import CheckpointFormatError, ValidationError
from tinsmith.types.record import to_plain

NAME = "fake"


def save(adapter: Adapter, folder: Path, parts: Saved) -> None:
    """Write an adapter into an empty folder."""
    spec = adapter.spec
    files.write_adapter(
        folder,
        files.Adapter(
            base_model=spec.base_model,
            rank=spec.lora.rank,
            alpha=ALPHA,
            layers={
                module: files.LoraPair(
                    adapter.weights[f"{module}.A"], adapter.weights[f"{module}.B"]
                )
                for module in dict.fromkeys(name[:-2] for name in adapter.weights)
            },
        ),
    )
    if parts & (Saved.OPTIMIZER | Saved.GRADIENTS):
        state = files.TrainingState(
            engine=NAME,
            base_model=spec.base_model,
            lora=to_plain(spec.lora),
            optimizer=to_plain(spec.optimizer),
            steps=adapter.steps,
        )
        moments = {
            **{f"first.{name}": one for name, one in adapter.first_moments.items()},
            **{f"second.{name}": one for name, one in adapter.second_moments.items()},
        }
        files.write_training(
            folder,
            state,
            optimizer=moments if Saved.OPTIMIZER in parts else None,
            gradients=adapter.gradients if Saved.GRADIENTS in parts else None,
        )


def load(spec: AdapterSpec, base_CK: Array, folder: Path, parts: Saved) -> Adapter:
    """Read an adapter; raises `ValidationError` if it does not fit."""
    with _fitting():
        adapter = Adapter(spec, base_CK, load_weights(folder))
        _check_layout(adapter)
        if Saved.OPTIMIZER in parts:
            _load_moments(adapter, folder)
        if Saved.GRADIENTS in parts:
            gradients = files.read_arrays(folder, files.GRADIENTS)
            if gradients is None:
                raise ValidationError("the checkpoint has no gradients")
            adapter.gradients = gradients
        return adapter


def load_weights(folder: Path) -> Tensors:
    """The weights alone; those of other programs are scaled as ours are."""
    with _fitting():
        found = files.read_adapter(folder)
        scale = np.float32(found.alpha / ALPHA)
        weights: Tensors = {}
        for module, pair in found.layers.items():
            weights[f"{module}.A"] = pair.a.astype(np.float32)
            weights[f"{module}.B"] = pair.b.astype(np.float32) * scale
        return weights


def base_model_of(folder: Path) -> str:
    """The name of the base model that the files belong to; empty if they do not tell."""
    with _fitting():
        config = files.read_json(folder / files.ADAPTER_CONFIG, files.PeftConfig)
    return config.base_model_name_or_path or ""


def _check_layout(adapter: Adapter) -> None:
    wanted = fresh_weights(adapter.spec.lora, "")
    for name, array in wanted.items():
        found = adapter.weights.get(name)
        if found is None or found.shape != array.shape:
            raise ValidationError(
                f"the checkpoint has {'no' if found is None else f'{found.shape} for'} {name}, "
                f"the model has {array.shape}",
                remedy="make the model with the rank and the layers of the checkpoint",
            )
    if len(adapter.weights) > len(wanted):
        raise ValidationError("the checkpoint trains layers that the model does not")
    adapter.weights = {name: adapter.weights[name] for name in wanted}


def _load_moments(adapter: Adapter, folder: Path) -> None:
    state, moments = files.read_state(folder), files.read_arrays(folder, files.OPTIMIZER)
    if state is None or moments is None or state.engine != NAME:
        raise ValidationError(
            "the checkpoint has no optimizer state that this engine can read",
            remedy="load it with optimizer=False",
        )
    if state.optimizer.get("type") != adapter.spec.optimizer.type:
        raise ValidationError(
            f"the checkpoint was trained with {state.optimizer.get('type')!r}, the model is made "
            f"for {adapter.spec.optimizer.type!r}",
            remedy="load it with optimizer=False",
        )
    adapter.steps = state.steps
    adapter.first_moments = _named(moments, "first.")
    adapter.second_moments = _named(moments, "second.")


def _named(moments: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): one for name, one in moments.items() if name.startswith(prefix)
    }


@contextmanager
def _fitting() -> Iterator[None]:
    """What is wrong with the files is the matter of who asked for them."""
    try:
        yield
    except CheckpointFormatError as exc:
        raise ValidationError(str(exc)) from exc
