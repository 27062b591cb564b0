"""Save and load adapters of the fake engine, in the checkpoint format (`checkpoints/format.py`).

Moments are stored under the names of their matrices, prefixed with `first.` and `second.`.
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.checkpoints import format as files
from tinsmith.engine.base import AdapterParts, AdapterSpec
from tinsmith.engine.fake.arithmetic import Array, Tensors, fresh_weights
from tinsmith.engine.fake.training import Adapter
from tinsmith.engine.files.adapter_files import fitting, read_moments, scaled_factors
from tinsmith.engine.model.architecture import ALPHA
from tinsmith.errors import ValidationError
from tinsmith.types.record import to_plain

NAME = "fake"


def save(adapter: Adapter, folder: Path, parts: AdapterParts) -> None:
    """Write an adapter into an empty folder."""
    spec = adapter.spec
    files.write_adapter(
        folder,
        files.StoredAdapter(
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
    if parts & (AdapterParts.OPTIMIZER | AdapterParts.GRADIENTS):
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
            optimizer=moments if AdapterParts.OPTIMIZER in parts else None,
            gradients=adapter.gradients if AdapterParts.GRADIENTS in parts else None,
        )


def load(spec: AdapterSpec, base_CK: Array, folder: Path, parts: AdapterParts) -> Adapter:
    """Read an adapter; raises `ValidationError` if it does not fit."""
    with fitting():
        adapter = Adapter(spec, base_CK, load_weights(folder))
        _check_layout(adapter)
        if AdapterParts.OPTIMIZER in parts:
            _load_moments(adapter, folder)
        if AdapterParts.GRADIENTS in parts:
            gradients = files.read_arrays(folder, files.GRADIENTS)
            if gradients is None:
                raise ValidationError("the checkpoint has no gradients")
            adapter.gradients = gradients
        return adapter


def load_weights(folder: Path) -> Tensors:
    """Read only the weights; those saved with another alpha are rescaled to ours."""
    with fitting():
        return scaled_factors(files.read_adapter(folder))


def _check_layout(adapter: Adapter) -> None:
    wanted = fresh_weights(adapter.spec.lora, "")
    for name, array in wanted.items():
        found = adapter.weights.get(name)
        if found is None or found.shape != array.shape:
            raise ValidationError(
                f"the checkpoint has {'no' if found is None else f'{found.shape} for'} {name}, "
                f"but the model has {array.shape}",
                remedy="create the model with the rank and the layers of the checkpoint",
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
