"""The state of an adapter in the embedded engine: weights, gradients, moments, and their files.

Weights, accumulated gradients and moments are flat float32 vectors in the order of `LoraLayout`. In
files each factor is a tensor named after its layer, so files are independent of that order. Loading
restores exactly what was saved.

The file format is that of all checkpoints (`checkpoints/format.py`). Adapters of other programs are
rescaled to our alpha.
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
from tinsmith.engine.base import AdapterParts, AdapterSpec
from tinsmith.engine.files.adapter_files import Array, fitting, read_moments, scaled_factors
from tinsmith.engine.model.architecture import ALPHA, Architecture
from tinsmith.engine.model.lora import LoraLayout
from tinsmith.engine.model.optimizer import VectorPool, take_step
from tinsmith.errors import ValidationError
from tinsmith.types.record import to_plain
from tinsmith.types.training import LoraConfig, OptimParams

NAME = "embedded"


class AdapterState:
    """The state of one adapter.

    A step replaces weights and moments, or changes them in place if no copy shares them and the
    step cannot fail. Replaced vectors return to the pool, unless a copy shares them.
    """

    def __init__(self, spec: AdapterSpec, layout: LoraLayout, weights: Tensor) -> None:
        self.spec = spec
        self.layout = layout
        self.weights = weights
        self.gradients: Tensor | None = None
        """Accumulated since the last step; None for nothing."""
        self.moments: dict[str, Tensor] = {}
        """The optimizer's moments by name; empty before the first step."""
        self.steps = 0
        self._gradient_norm: float | None = None
        """Norm of the gradients, if known."""
        self._largest = math.inf
        """Bound from the last step; see `take_step`."""
        self._is_shared = False
        """Whether a copy may share these vectors."""

    def matrices(self, flat: Tensor) -> Iterable[Tensor]:
        """The factors in a vector of its layout, as views."""
        return _views(self.layout, flat).values()

    def frozen_copy(self) -> AdapterState:
        """A copy that later works do not change; shares the vectors."""
        self._is_shared = True
        return copy.copy(self)

    def accumulate(self, gradients: Tensor, pool: VectorPool, *, norm: float | None = None) -> None:
        """Add the gradients of a successful pass; takes ownership of their vector.

        Args:
            gradients: The gradients of the pass.
            pool: Where unused vectors are returned to.
            norm: The norm of the gradients, if known.
        """
        self._gradient_norm = norm if self.gradients is None else None
        if self.gradients is None:
            self.gradients = gradients
        elif self._is_shared:
            self.gradients = gradients.add_(self.gradients)
        else:
            self.gradients.add_(gradients)
            pool.give(gradients)

    def step(self, params: OptimParams, pool: VectorPool) -> dict[str, float]:
        """Apply an optimizer step and reset the gradients; returns its metrics.

        Raises:
            ValidationError: The step is not possible; nothing has changed.
        """
        made = take_step(
            self.spec.optimizer,
            params,
            self.weights,
            self.gradients,
            self.moments,
            self.steps,
            self.matrices,
            pool,
            gradient_norm=self._gradient_norm,
            largest=self._largest,
            is_own=not self._is_shared,
        )
        if not self._is_shared:
            if made.weights is not self.weights:
                pool.give(self.weights, *self.moments.values())
            if self.gradients is not None:
                pool.give(self.gradients)
        self.weights, self.moments, self.gradients = made.weights, made.moments, None
        self._largest, self._gradient_norm = made.largest, None
        self.steps += 1
        self._is_shared = False
        return made.metrics


def layout_of(architecture: Architecture, lora: LoraConfig) -> LoraLayout:
    """The factors of an adapter with this configuration."""
    return LoraLayout(
        architecture,
        lora.rank,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        unembed=lora.train_unembed,
    )


def fresh_adapter(spec: AdapterSpec, architecture: Architecture, device: str) -> AdapterState:
    """A new adapter, determined by its seed, or else by its id."""
    layout = layout_of(architecture, spec.lora)
    seed = spec.adapter_id if spec.lora.seed is None else str(spec.lora.seed)
    return AdapterState(spec, layout, layout.fresh(seed).to(device))


# Files


def save_adapter(
    adapter: AdapterState,
    folder: Path,
    parts: AdapterParts,
    *,
    base_model: str | None = None,
    ties_embeddings: bool = False,
) -> None:
    """Write an adapter into an empty folder.

    Args:
        adapter: The adapter to save.
        folder: An empty folder.
        parts: What to write besides the weights.
        base_model: What other programs load the base model from; None for its name in the service.
        ties_embeddings: Whether its output layer is its embedding.
    """
    spec, layout = adapter.spec, adapter.layout
    layers = {
        module: files.LoraPair(_array(a_RI), _array(b_OR))
        for module, (a_RI, b_OR) in layout.factors(adapter.weights).items()
    }
    files.write_adapter(
        folder,
        files.StoredAdapter(
            base_model=base_model or spec.base_model,
            rank=spec.lora.rank,
            alpha=ALPHA,
            layers=layers,
        ),
        ties_embeddings=ties_embeddings,
    )
    if not parts & (AdapterParts.OPTIMIZER | AdapterParts.GRADIENTS):
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
        optimizer=moments if AdapterParts.OPTIMIZER in parts else None,
        gradients=gradients if AdapterParts.GRADIENTS in parts else None,
    )


def load_adapter(
    spec: AdapterSpec, architecture: Architecture, folder: Path, parts: AdapterParts, device: str
) -> AdapterState:
    """Load an adapter for training.

    Raises:
        ValidationError: The files do not match the spec, or a requested part is missing.
    """
    layout = layout_of(architecture, spec.lora)
    with fitting():
        found = files.read_adapter(folder)
        if found.rank != spec.lora.rank:
            raise ValidationError(
                f"the checkpoint has rank {found.rank}, but the model has rank {spec.lora.rank}",
                remedy="create the model with the rank of the checkpoint",
            )
        weights = _flat(layout, scaled_factors(found), is_whole=True)
        adapter = AdapterState(spec, layout, weights.to(device))
        if AdapterParts.OPTIMIZER in parts:
            _load_moments(adapter, folder)
        if AdapterParts.GRADIENTS in parts:
            gradients = files.read_arrays(folder, files.GRADIENTS)
            if gradients is None:
                raise ValidationError("the checkpoint has no gradients")
            if gradients:
                adapter.gradients = _flat(layout, gradients, is_whole=True).to(device)
        return adapter


def load_weights(architecture: Architecture, folder: Path) -> tuple[LoraLayout, Tensor]:
    """Load weights for sampling: their layout and the flat vector.

    Layers that are not in the files are those of the base model.

    Raises:
        ValidationError: The files do not match the base model.
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


def _load_moments(adapter: AdapterState, folder: Path) -> None:
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
    """The factors in a vector by name: `<layer>.A` and `<layer>.B`."""
    found: dict[str, Tensor] = {}
    for module, (a_RI, b_OR) in layout.factors(flat).items():
        found[f"{module}.A"], found[f"{module}.B"] = a_RI, b_OR
    return found


def _named(layout: LoraLayout, flat: Tensor, prefix: str = "") -> dict[str, Array]:
    return {f"{prefix}{name}": _array(view) for name, view in _views(layout, flat).items()}


def _array(tensor: Tensor) -> Array:
    return tensor.cpu().numpy()


def _flat(layout: LoraLayout, factors: Mapping[str, Array], *, is_whole: bool) -> Tensor:
    """The factors as one vector; missing ones are 0, or an error if `is_whole`."""
    flat = torch.zeros(layout.size)
    views = _views(layout, flat)
    for name, array in factors.items():
        layer = name.rpartition(".")[0]
        view = views.pop(name, None)
        if view is None:
            raise ValidationError(
                f"the checkpoint adapts the layer {layer}, which the model does not train or have",
                remedy="create the model with the layers of the checkpoint",
            )
        if tuple(view.shape) != array.shape:
            raise ValidationError(
                f"layer {layer}: the checkpoint has a factor of shape {list(array.shape)}, the "
                f"model one of {list(view.shape)}",
                remedy="create the model on the base model of the checkpoint",
            )
        view.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    if is_whole and views:
        raise ValidationError(
            f"the checkpoint does not adapt the layer {next(iter(views)).rpartition('.')[0]}, "
            "which the model trains",
            remedy="create the model with the layers of the checkpoint",
        )
    return flat
