"""Where the factors of one linear layer lie in the flat vector of an adapter."""

# I input, O output, R rank, N number of the vector

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from torch import Tensor

from tinsmith.model.kernels.library import FactorsOfLayer


class FactorPlace:
    """First A, with `rank` rows for each part of the layer; then B of each part.

    Args:
        start: Where A begins.
        inputs: Of the layer.
        outputs: Of each part.
        rank: Of each part.
        scale: ALPHA / rank.
    """

    def __init__(
        self, start: int, inputs: int, outputs: Sequence[int], rank: int, scale: float
    ) -> None:
        self.inputs = inputs
        self.outputs = list(outputs)
        self.rank = rank
        self.scale = scale
        self.ranks = [rank] * len(outputs)
        """That of each part."""
        self.inner = rank * len(outputs)
        """Rows of A."""
        sizes = (rank * one for one in outputs)
        *self.starts, self.end = itertools.accumulate(sizes, initial=start + self.inner * inputs)
        self.starts = [start, *self.starts]
        """Where A begins, and B of each part."""

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """A, and B of each part."""
        # One call each, where a slice of the right shape is two: small models have many factors.
        before = flat_N.storage_offset()
        shapes = [(self.inner, self.inputs), *((outputs, self.rank) for outputs in self.outputs)]
        return [
            flat_N.as_strided(shape, (shape[1], 1), before + start)
            for shape, start in zip(shapes, self.starts, strict=True)
        ]

    @functools.cached_property
    def for_kernels(self) -> FactorsOfLayer:
        """The same, as kernels are told it."""
        return FactorsOfLayer(
            inputs=self.inputs,
            rank=self.rank,
            parts=len(self.outputs),
            outputs=tuple(self.outputs),
            starts=tuple(self.starts),
            scale=self.scale,
        )
