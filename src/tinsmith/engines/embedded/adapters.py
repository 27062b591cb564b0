"""An adapter of the embedded engine: its weights, gradients and moments, and their files.

Weights, gathered gradients and moments are flat vectors of float32 in the order of `LoraLayout`. In
files each factor is a tensor of its own, under the name of its layer, so that they outlive a change
of that order; what is read back is bit for bit what was written.

Files are those of all checkpoints (`checkpoints/format.py`). Adapters of other programs are scaled
to our alpha when they are read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinsmith.checkpoints import format as files
from tinsmith.engines.adapter_files import Array, fitting, read_moments, scaled_factors
from tinsmith.engines.base import AdapterSpec, Saved
from tinsmith.errors import ValidationError
from tinsmith.model.architecture import ALPHA, Architecture
from tinsmith.model.lora import LoraLayout
from tinsmith.model.optimizer import take_step
from tinsmith.model.spare_vectors import SpareVectors
from tinsmith.types.record import to_plain
from tinsmith.types.training import LoraConfig, OptimParams

NAME = "embedded"


class Adapter:
    """The state of one adapter.

    Weights and moments are replaced, or changed in place where no copy holds them and the step
    cannot fail. What was replaced is used again, unless a copy holds it.
    """

    def __init__(self, spec: AdapterSpec, layout: LoraLayout, weights: Tensor) -> None:
        self.spec = spec
        self.layout = layout
        self.weights = weights
        self.gradients: Tensor | None = None
        """What was gathered since the last step; None for nothing."""
        self.moments: dict[str, Tensor] = {}
        """Of the optimizer, by name; empty before the first step."""
        self.steps = 0
        self._gradient_norm: float | None = None
        """Of what was gathered, if it is known."""
        self._largest = math.inf
        """Of the numbers of the last step; see `take_step`."""
        self._is_held = False
        """Whether a copy may have these vectors too."""

    @property
    def bytes(self) -> int:
        """How much memory its vectors take."""
        vectors = [self.weights, self.gradients, *self.moments.values()]
        return sum(one.nbytes for one in vectors if one is not None)

    def matrices(self, flat: Tensor) -> Iterable[Tensor]:
        """The factors that a vector of its layout is made of, as views."""
        return _views(self.layout, flat).values()

    def as_it_is(self) -> Adapter:
        """A copy that later works do not change."""
        self._is_held = True
        return copy.copy(self)

    def gather(self, gradients: Tensor, spares: SpareVectors, *, norm: float | None = None) -> None:
        """Add the gradients of a work that has ended well. Their vector is the adapter's now.

        Args:
            gradients: Of the work.
            spares: Where a vector goes that is not needed any more.
            norm: Of the gradients, if it is known.
        """
        self._gradient_norm = norm if self.gradients is None else None
        if self.gradients is None:
            self.gradients = gradients
        elif self._is_held:
            self.gradients = gradients.add_(self.gradients)
        else:
            self.gradients.add_(gradients)
            spares.give(gradients)

    def step(self, params: OptimParams, spares: SpareVectors) -> dict[str, float]:
        """Take a step along the gradients, which are then gone; its metrics.

        Raises:
            ValidationError: It cannot be taken; nothing has changed.
        """
        made = take_step(
            self.spec.optimizer,
            params,
            self.weights,
            self.gradients,
            self.moments,
            self.steps,
            self.matrices,
            spares,
            gradient_norm=self._gradient_norm,
            largest=self._largest,
            is_own=not self._is_held,
        )
        if not self._is_held:
            if made.weights is not self.weights:
                spares.give(self.weights, *self.moments.values())
            if self.gradients is not None:
                spares.give(self.gradients)
        self.weights, self.moments, self.gradients = made.weights, made.moments, None
        self._largest, self._gradient_norm = made.largest, None
        self.steps += 1
        self._is_held = False
        return made.metrics


def layout_of(architecture: Architecture, lora: LoraConfig) -> LoraLayout:
    """Which factors an adapter of this configuration has."""
    return LoraLayout(
        architecture,
        lora.rank,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        unembed=lora.train_unembed,
    )


def fresh_adapter(spec: AdapterSpec, architecture: Architecture, device: str) -> Adapter:
    """An adapter that changes nothing yet; its seed determines it, or else its id."""
    layout = layout_of(architecture, spec.lora)
    seed = spec.adapter_id if spec.lora.seed is None else str(spec.lora.seed)
    return Adapter(spec, layout, layout.fresh(seed).to(device))


# Files


def save_adapter(
    adapter: Adapter,
    folder: Path,
    parts: Saved,
    *,
    base_model: str | None = None,
    ties_embeddings: bool = False,
) -> None:
    """Write an adapter into an empty folder.

    Args:
        adapter: What to write.
        folder: Where to.
        parts: Which files, besides the weights.
        base_model: What other programs find the base model by; None for the name it is served by.
        ties_embeddings: Whether its output layer is its embedding.
    """
    spec, layout = adapter.spec, adapter.layout
    layers = {
        module: files.LoraPair(_array(a_RI), _array(b_OR))
        for module, (a_RI, b_OR) in layout.factors(adapter.weights).items()
    }
    files.write_adapter(
        folder,
        files.Adapter(
            base_model=base_model or spec.base_model,
            rank=spec.lora.rank,
            alpha=ALPHA,
            layers=layers,
        ),
        ties_embeddings=ties_embeddings,
    )
    if not parts & (Saved.OPTIMIZER | Saved.GRADIENTS):
        return
    state = files.TrainingState(
        engine=NAME,
        base_model=spec.base_model,
        lora=to_plain(spec.lora),
        optimizer=to_plain(spec.optimizer),
        steps=adapter.steps,
    )
    moments: dict[str, Array] = {}
    for name, flat in adapter.moments.items():
        moments |= _named(layout, flat, f"{name}.")
    gradients = {} if adapter.gradients is None else _named(layout, adapter.gradients)
    files.write_training(
        folder,
        state,
        optimizer=moments if Saved.OPTIMIZER in parts else None,
        gradients=gradients if Saved.GRADIENTS in parts else None,
    )


def load_adapter(
    spec: AdapterSpec, architecture: Architecture, folder: Path, parts: Saved, device: str
) -> Adapter:
    """Read an adapter that is to be trained on.

    Raises:
        ValidationError: The files do not fit, or a part that is asked for is not there.
    """
    layout = layout_of(architecture, spec.lora)
    with fitting():
        found = files.read_adapter(folder)
        if found.rank != spec.lora.rank:
            raise ValidationError(
                f"the checkpoint has the rank {found.rank}, the model {spec.lora.rank}",
                remedy="make the model with the rank of the checkpoint",
            )
        weights = _flat(layout, scaled_factors(found), is_whole=True)
        adapter = Adapter(spec, layout, weights.to(device))
        if Saved.OPTIMIZER in parts:
            _load_moments(adapter, folder)
        if Saved.GRADIENTS in parts:
            gradients = files.read_arrays(folder, files.GRADIENTS)
            if gradients is None:
                raise ValidationError("the checkpoint has no gradients")
            if gradients:
                adapter.gradients = _flat(layout, gradients, is_whole=True).to(device)
        return adapter


def load_weights(architecture: Architecture, folder: Path) -> tuple[LoraLayout, Tensor]:
    """Read weights that are to be sampled from: a layout that holds them, and the flat vector.

    Layers that the files do not have are left as they are in the base model.

    Raises:
        ValidationError: The files do not fit.
    """
    with fitting():
        found = files.read_adapter(folder)
        groups = {
            shape.group
            for shape in architecture.linears()
            if any(name in found.layers for name, _ in shape.parts)
        }
        layout = LoraLayout(
            architecture,
            found.rank,
            attention="attention" in groups,
            mlp="mlp" in groups,
            unembed="unembed" in groups,
        )
        return layout, _flat(layout, scaled_factors(found), is_whole=False)


def _load_moments(adapter: Adapter, folder: Path) -> None:
    adapter.steps, moments = read_moments(folder, NAME, adapter.spec)
    by_moment: dict[str, dict[str, Array]] = {}
    for name, array in moments.items():
        moment, _, factor = name.partition(".")
        by_moment.setdefault(moment, {})[factor] = array
    for moment, factors in by_moment.items():
        adapter.moments[moment] = _flat(adapter.layout, factors, is_whole=True).to(
            adapter.weights.device
        )


# Vectors and factors


def _views(layout: LoraLayout, flat: Tensor) -> dict[str, Tensor]:
    """The factors in a vector by name: that of the layer, and A or B."""
    found: dict[str, Tensor] = {}
    for module, (a_RI, b_OR) in layout.factors(flat).items():
        found[f"{module}.A"], found[f"{module}.B"] = a_RI, b_OR
    return found


def _named(layout: LoraLayout, flat: Tensor, prefix: str = "") -> dict[str, Array]:
    return {f"{prefix}{name}": _array(view) for name, view in _views(layout, flat).items()}


def _array(tensor: Tensor) -> Array:
    return tensor.cpu().numpy()


def _flat(layout: LoraLayout, factors: Mapping[str, Array], *, is_whole: bool) -> Tensor:
    """Factors as one vector. Those that are not there are 0, unless all have to be."""
    flat = torch.zeros(layout.size)
    views = _views(layout, flat)
    for name, array in factors.items():
        layer = name.rpartition(".")[0]
        view = views.pop(name, None)
        if view is None:
            raise ValidationError(
                f"the checkpoint trains the layer {layer}, which the model does not have or train",
                remedy="make the model with the layers of the checkpoint",
            )
        if tuple(view.shape) != array.shape:
            raise ValidationError(
                f"layer {layer}: the checkpoint has a factor of shape {list(array.shape)}, the "
                f"model one of {list(view.shape)}",
                remedy="make the model on the base model of the checkpoint",
            )
        view.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    if is_whole and views:
        raise ValidationError(
            f"the checkpoint does not train the layer {next(iter(views)).rpartition('.')[0]}, "
            "which the model does",
            remedy="make the model with the layers of the checkpoint",
        )
    return flat
