"""Adapters of the fake engine as files, in the form of all checkpoints (`checkpoints/format.py`).

Moments are kept under the names of their matrices with `first.` and `second.` before them.
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.checkpoints import format as files
from tinsmith.engines.adapter_files import fitting, read_moments, scaled_factors
from tinsmith.engines.base import AdapterSpec, Saved
from tinsmith.engines.fake.arithmetic import Array, Tensors, fresh_weights
from tinsmith.engines.fake.training import Adapter
from tinsmith.errors import ValidationError
from tinsmith.model.architecture import ALPHA
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
    with fitting():
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
    with fitting():
        return scaled_factors(files.read_adapter(folder))


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
    adapter.steps, moments = read_moments(folder, NAME, adapter.spec)
    adapter.first_moments = _named(moments, "first.")
    adapter.second_moments = _named(moments, "second.")


def _named(moments: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): one for name, one in moments.items() if name.startswith(prefix)
    }
