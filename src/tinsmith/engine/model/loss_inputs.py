"""The inputs of a loss: the targets of all data of a pass, and the other inputs of each target.

A *cell* is one target at one position. A datum with targets of shape (N,) has N cells, one with
targets of shape (N, K) has N·K in row-major order. The cells of all data of a pass are numbered
consecutively. Sparse tensors are made dense.

Knows nothing of formulas.
"""

# C cell, D datum

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import ValidationError, shown
from tinsmith.types.tensors import TensorData

Config: TypeAlias = Mapping[str, float | str]
Inputs: TypeAlias = Mapping[str, TensorData]
"""The `loss_fn_inputs` of one datum."""
ExampleRows: TypeAlias = slice | Tensor
"""Some cells: a slice, or their indices."""

TARGETS = "target_tokens"


class Targets(NamedTuple):
    """The targets of a pass."""

    tokens: tuple[Tensor, ...]
    """The targets of each datum, int64, in their original shape."""
    spans: tuple[slice, ...]
    """The cells of each datum."""

    @property
    def cells(self) -> int:
        """Number of cells."""
        stop: int = self.spans[-1].stop
        return stop


def read_targets(data: Sequence[Inputs], lengths: Sequence[int] | None = None) -> Targets:
    """The targets of all data.

    Args:
        data: The inputs of each datum.
        lengths: The number of positions of each datum, to check the targets against.

    Raises:
        ValidationError: A datum has no targets, or not one row of them for each position.
    """
    if not data:
        raise ValidationError("the call has no data")
    tokens: list[Tensor] = []
    spans: list[slice] = []
    start = 0
    for index, inputs in enumerate(data):
        given = inputs.get(TARGETS)
        if given is None:
            raise ValidationError(f"datum {index} has no {TARGETS!r} in its loss_fn_inputs")
        if given.dtype != "int64":
            raise ValidationError(f"datum {index}: {TARGETS} must be int64, not {given.dtype}")
        dense = dense_tensor(given)
        if dense.ndim not in (1, 2):
            raise ValidationError(
                f"datum {index}: {TARGETS} has the shape {list(dense.shape)}; it must have one "
                "dimension or two"
            )
        if lengths is not None and len(dense) != lengths[index]:
            raise ValidationError(
                f"datum {index} has {lengths[index]} input tokens and {TARGETS} of shape "
                f"{list(dense.shape)}"
            )
        tokens.append(dense)
        spans.append(slice(start, start + dense.numel()))
        start += dense.numel()
    return Targets(tuple(tokens), tuple(spans))


def dense_tensor(given: TensorData) -> Tensor:
    """An API tensor as a dense torch tensor."""
    return given.to_torch()


class CellInputs:
    """One number per cell for every input of a loss; stored on the CPU.

    Args:
        loss: The name of the loss, for messages.
        data: The inputs of each datum.
        targets: Their targets.
        required: Inputs that every datum must have.
        optional: Inputs that it may have, with their defaults.

    Raises:
        ValidationError: An input is missing, not of the size of the targets, or not finite.
    """

    def __init__(
        self,
        loss: str,
        data: Sequence[Inputs],
        targets: Targets,
        *,
        required: Sequence[str],
        optional: Mapping[str, float] | None = None,
    ) -> None:
        self._whole: dict[str, Tensor] = {}
        self._constants: dict[str, float] = {}
        for name in required:
            for index, inputs in enumerate(data):
                if name not in inputs:
                    raise ValidationError(
                        f"datum {index} has no {name!r} in its loss_fn_inputs, which {loss} needs"
                    )
            self._whole[name] = _joined(name, data, targets, math.nan)
        for name, default in (optional or {}).items():
            if any(name in inputs for inputs in data):
                self._whole[name] = _joined(name, data, targets, default)
            else:
                self._constants[name] = default

    def whole(self, name: str) -> Tensor | None:
        """An input of all cells, float32; None if no datum has it."""
        return self._whole.get(name)

    def at(self, part: ExampleRows, device: torch.device) -> Cells:
        """The inputs of some cells."""
        return Cells(
            {name: whole[part].to(device).double() for name, whole in self._whole.items()},
            self._constants,
        )


class Cells:
    """The inputs of some cells, float64, and the defaults of missing ones."""

    def __init__(self, given: Mapping[str, Tensor], constants: Mapping[str, float]) -> None:
        self._given = given
        self._constants = constants

    def __getitem__(self, name: str) -> Tensor:
        return self._given[name]

    def optional(self, name: str, like_C: Tensor) -> Tensor:
        """An optional input, or its default."""
        found = self._given.get(name)
        return torch.full_like(like_C, self._constants[name]) if found is None else found

    def within(self, ratio_C: Tensor) -> Tensor:
        """The ratios, clipped to the thresholds of their cells."""
        low_C = self.optional("clip_low_threshold", ratio_C)
        high_C = self.optional("clip_high_threshold", ratio_C)
        return torch.minimum(torch.maximum(ratio_C, low_C), high_C)


def _joined(name: str, data: Sequence[Inputs], targets: Targets, default: float) -> Tensor:
    joined_C = torch.full((targets.cells,), default)
    for index, (inputs, span) in enumerate(zip(data, targets.spans, strict=True)):
        tensor = inputs.get(name)
        if tensor is None:
            continue
        numbers = dense_tensor(tensor)
        if numbers.numel() != span.stop - span.start:
            raise ValidationError(
                f"datum {index}: {name} has the shape {list(numbers.shape)}, and {TARGETS} "
                f"{list(targets.tokens[index].shape)}"
            )
        if not bool(torch.isfinite(numbers).all()):
            raise ValidationError(f"datum {index}: {name} contains NaN or infinity")
        joined_C[span] = numbers.reshape(-1).to(torch.float32)
    return joined_C


def number_setting(config: Config, name: str, default: float) -> float:
    """A number of a loss's configuration.

    Raises:
        ValidationError: It is not a finite number.
    """
    value = config.get(name, default)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValidationError(f"loss_fn_config[{name!r}] is {shown(value)}; it must be a number")
    return float(value)
