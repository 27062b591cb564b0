"""LoRA adapters: one flat float32 vector, with the factors of each linear layer as views of it.

A layer y = x·Wᵀ becomes y = x·Wᵀ + ALPHA / rank · (x·Aᵀ)·Bᵀ. A is initialised uniformly in
±1/√inputs, determined by the seed, and B with zeros, so that a fresh adapter changes nothing.

In one vector, all weights of an adapter are stepped, clipped and copied at once, and so are its
gradients and moments. Layers with the same input (q, k, v; gate, up) are fused, and their A factors
are adjacent and form one matrix.

Knows nothing of files; `checkpoints/format.py` has the names of layers in them.

`KernelLora` computes an adapter on one linear layer with the compiled kernels (`kernels/lora.c`).
The forward is bit-identical to factors frozen for sampling. Forward and backward are one call each,
which work directly on the optimizer's float32 vectors; for few rows, casting and stacking factors
would cost more than the arithmetic.
"""

# I input, O output, R rank, T row of the batch, N number of the vector

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.model.architecture import ALPHA, Architecture, LinearKind, LinearShape
from tinsmith.engine.model.kernels.library import MOST_PARTS, Kernels, LoraShape, matmul_kernels
from tinsmith.engine.model.linear import Linear


def lora_kernels(place: FactorLayout, flat_N: Tensor, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they support factors of this layout, vector and dtype."""
    are_pairs = place.inputs % 2 == 0 and place.rank % 2 == 0
    is_known = flat_N.dtype == torch.float32 and flat_N.is_contiguous()
    if not are_pairs or not is_known or len(place.outputs) > MOST_PARTS:
        return None
    return matmul_kernels(flat_N.device, dtype)


class KernelLora:
    """Forward and backward of the factors of one layer.

    Args:
        kernels: From `lora_kernels`.
        place: The layout of the factors in `flat_N`.
        flat_N: The adapter's weights.
        gradients_N: Where their gradients are accumulated; None if they are not trained.
    """

    def __init__(
        self, kernels: Kernels, place: FactorLayout, flat_N: Tensor, gradients_N: Tensor | None
    ) -> None:
        self._kernels = kernels
        self._place = place
        self._flat_N = flat_N
        self._gradients_N = gradients_N
        self.has_backward = all(outputs % 2 == 0 for outputs in place.outputs)
        """Whether the backward is supported: it takes outputs in pairs."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`LoraFactors.add_to`."""
        t_TR = torch.empty((len(x_TI), self._place.inner), dtype=torch.bfloat16)
        self._kernels.lora_forward(self._place.for_kernels, self._flat_N, _across(x_TI), y_TO, t_TR)
        return t_TR

    def backward(
        self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor, *, is_added: bool
    ) -> None:
        """`LoraFactors.backward`; overwrites the gradients unless `is_added`."""
        self._kernels.lora_backward(
            *(self._place.for_kernels, self._flat_N, self._gradients_N),
            *(_across(dy_TO), _across(x_TI), t_TR, dx_TI),
            is_added=is_added,
        )


def _across(rows: Tensor) -> Tensor:
    """With contiguous rows."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


class FactorLayout:
    """First A, with `rank` rows for each part of the layer; then B of each part.

    Args:
        start: Offset of A.
        inputs: Input features of the layer.
        outputs: Output features of each part.
        rank: Rank of each part.
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
        """The rank, once per part."""
        self.inner = rank * len(outputs)
        """Number of rows of A."""
        sizes = (rank * one for one in outputs)
        *self.starts, self.end = itertools.accumulate(sizes, initial=start + self.inner * inputs)
        self.starts = [start, *self.starts]
        """Offsets of A, and of B of each part."""

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """A, and B of each part."""
        # One call per view instead of two for slice and reshape: small models have many factors.
        before = flat_N.storage_offset()
        shapes = [(self.inner, self.inputs), *((outputs, self.rank) for outputs in self.outputs)]
        return [
            flat_N.as_strided(shape, (shape[1], 1), before + start)
            for shape, start in zip(shapes, self.starts, strict=True)
        ]

    @functools.cached_property
    def for_kernels(self) -> LoraShape:
        """The layout as a C struct."""
        return LoraShape(
            inputs=self.inputs,
            rank=self.rank,
            parts=len(self.outputs),
            outputs=tuple(self.outputs),
            starts=tuple(self.starts),
            scale=self.scale,
        )


class LoraFactors:
    """The factors of one linear layer, with their gradients if they are trained.

    Args:
        place: Their layout in the vector.
        flat_N: The adapter's weights.
        dtype: The compute dtype.
        gradients_N: Where gradients are written; the initial content is ignored. None for none.
        cast: Returns the vector in `dtype`; without it each factor is cast by itself.
    """

    def __init__(
        self,
        place: FactorLayout,
        flat_N: Tensor,
        dtype: torch.dtype,
        *,
        gradients_N: Tensor | None = None,
        cast: Callable[[], Tensor] | None = None,
    ) -> None:
        self.place = place
        self.dtype = dtype
        self.has_gradients = False
        """Whether gradients have been written; before that their memory is uninitialised."""
        self._flat_N = flat_N
        self._gradients_N = gradients_N
        self._cast = cast
        self._frozen: tuple[Linear, Linear] | None = None

    # Views are made on demand: kernels need none, and a pass would make thousands.

    @functools.cached_property
    def held(self) -> list[Tensor]:
        """A, and B of each part, as views of the vector."""
        return self.place.views(self._flat_N)

    @functools.cached_property
    def gradients(self) -> list[Tensor]:
        """The gradients in the order of `held`; empty if they are not trained."""
        return [] if self._gradients_N is None else self.place.views(self._gradients_N)

    @functools.cached_property
    def _used(self) -> list[Tensor]:
        """The factors in the compute dtype."""
        if self._cast is None:
            return [one.to(self.dtype) for one in self.held]
        return self.place.views(self._cast())

    @functools.cached_property
    def kernel_lora(self) -> KernelLora | None:
        """The compiled kernels for these factors, if supported."""
        kernels = lora_kernels(self.place, self._flat_N, self.dtype)
        if kernels is None:
            return None
        return KernelLora(kernels, self.place, self._flat_N, self._gradients_N)

    def freeze(self) -> None:
        """Prepare for sampling: make rows independent of each other, as in `linear.py`."""
        a_RI, *bs_OR = self._used
        # All parts as one block-diagonal matrix: one call instead of three for few rows.
        self._frozen = Linear(a_RI), Linear(torch.block_diag(*bs_OR) * self.place.scale)

    def inner(self, x_TI: Tensor) -> Tensor:
        """x·Aᵀ, scaled: the input of B."""
        return scaled(x_TI @ self._used[0].T, self.place.scale)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add the adapter's output to the layer's; returns `inner`, for `backward`."""
        if self._frozen is not None:
            a, b = self._frozen
            t_TR = a(x_TI)
            y_TO.add_(b(t_TR))
            return t_TR
        if self.kernel_lora is not None:
            return self.kernel_lora.add_to(y_TO, x_TI)
        t_TR = self.inner(x_TI)
        ys, ts = columns(y_TO, self.place.outputs), columns(t_TR, self.place.ranks)
        for y, t, b_OR in zip(ys, ts, self._used[1:], strict=True):
            y.addmm_(t, b_OR.T)
        return t_TR

    def backward(self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor) -> None:
        """Add to the gradient of the inputs, and accumulate those of the factors."""
        if self.kernel_lora is not None and self.kernel_lora.has_backward:
            self.kernel_lora.backward(dx_TI, dy_TO, x_TI, t_TR, is_added=self.has_gradients)
            self.has_gradients = self._gradients_N is not None
            return
        a_RI, *bs_OR = self._used
        dt_TR = torch.empty_like(t_TR)
        dys, dts = columns(dy_TO, self.place.outputs), columns(dt_TR, self.place.ranks)
        for dy, dt, b_OR in zip(dys, dts, bs_OR, strict=True):
            torch.mm(dy, b_OR, out=dt)
        dx_TI.addmm_(scaled(dt_TR, self.place.scale), a_RI)
        if not self.gradients:
            return
        lefts, rights = (dt_TR, *dys), (x_TI, *columns(t_TR, self.place.ranks))
        for gradient, left, right in zip(self.gradients, lefts, rights, strict=True):
            # The first one overwrites, which saves clearing the memory.
            if gradient.dtype == left.dtype:
                gradient.addmm_(left.T, right, beta=float(self.has_gradients))
            else:
                self._accumulate(gradient, left.T @ right)
        self.has_gradients = True

    def accumulate(self, made: Iterable[Tensor]) -> None:
        """Add to the gradients, in the order of `held`."""
        for gradient, one in zip(self.gradients, made, strict=True):
            self._accumulate(gradient, one)
        self.has_gradients = True

    def _accumulate(self, gradient: Tensor, made: Tensor) -> None:
        if self.has_gradients:
            gradient.add_(made)  # accumulated in float32
        else:
            gradient.copy_(made)

    def clear_unwritten(self) -> None:
        """Zero the gradients if nothing was accumulated."""
        if not self.has_gradients:
            for gradient in self.gradients:
                gradient.zero_()
            self.has_gradients = True


def columns(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Split columns by part; without a view for layers of one part, as most are."""
    return (rows,) if len(sizes) == 1 else rows.split_with_sizes(sizes, -1)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Scale in place; free for a scale of 1, which most adapters have."""
    return rows if scale == 1.0 else rows.mul_(scale)


class FusedLora:
    """An adapter in use: the factors of each linear layer, by layer and kind."""

    def __init__(
        self, factors: dict[tuple[int, LinearKind], LoraFactors], gradients: Tensor | None
    ) -> None:
        self._factors = factors
        self._gradients = gradients

    def factors(self, layer: int, kind: LinearKind) -> LoraFactors | None:
        """The factors of a linear layer; None if it is not adapted."""
        return self._factors.get((layer, kind))

    def gradients(self) -> Tensor:
        """The accumulated gradients, in the layout of the flat vector."""
        assert self._gradients is not None, "it was made without gradients"
        for one in self._factors.values():
            one.clear_unwritten()
        return self._gradients


class LoraSpan(NamedTuple):
    """Rows of a batch that go through an adapter; rows in no span use the base model."""

    start: int
    end: int
    lora: FusedLora


class LoraLayout:
    """Which factors an adapter has, and where they lie in its flat vector."""

    def __init__(
        self, architecture: Architecture, rank: int, *, attention: bool, mlp: bool, unembed: bool
    ) -> None:
        self.rank = rank
        self.scale = ALPHA / rank
        groups = {"attention": attention, "mlp": mlp, "unembed": unembed}
        self._places: list[tuple[LinearShape, FactorLayout]] = []
        self.size = 0
        """How many floats the vector has."""
        for shape in architecture.linears():
            if groups[shape.group]:
                outputs = [one for _, one in shape.parts]
                place = FactorLayout(self.size, shape.inputs, outputs, rank, self.scale)
                self._places.append((shape, place))
                self.size = place.end

    def factors(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer by its name in the base model, as views of the vector."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for shape, place in self._places:
            a_RI, *bs_OR = place.views(flat)
            for number, (name, _) in enumerate(shape.parts):
                rows = slice(number * self.rank, (number + 1) * self.rank)
                found[name] = a_RI[rows], bs_OR[number]
        return found

    def fresh(self, seed: str) -> Tensor:
        """Initial weights, which change nothing yet; the same for a seed on every machine."""
        digest = hashlib.sha256(seed.encode()).digest()
        # On the CPU: the generators of devices differ.
        chance = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        flat = torch.zeros(self.size)
        for _, place in self._places:
            a_RI, *_ = place.views(flat)
            bound = 1.0 / math.sqrt(place.inputs)
            a_RI.uniform_(-bound, bound, generator=chance)
        return flat

    def fused(
        self,
        flat: Tensor,
        dtype: torch.dtype,
        *,
        gradients: Tensor | None = None,
        is_frozen: bool = False,
    ) -> FusedLora:
        """The adapter for use with a model; views of the vector, or copies in another dtype.

        Args:
            flat: The weights.
            dtype: The compute dtype of the base model.
            gradients: Where the backward accumulates gradients; the initial content is ignored.
                None without training.
            is_frozen: For sampling: the vector never changes again, and each row is bit-identical
                whatever is beside it.
        """
        assert flat.shape == (self.size,), "the weights have another layout"
        assert gradients is None or _lie_alike(gradients, flat), "gradients lie as weights do"
        if is_frozen:
            flat = flat.to(dtype)

        @functools.cache
        def cast() -> Tensor:
            return flat.to(dtype)  # faster than casting each factor

        factors: dict[tuple[int, LinearKind], LoraFactors] = {}
        for shape, place in self._places:
            # Cast lazily, and never for the head alone: groups of adapters cast their own copies.
            is_by_itself = flat.dtype == dtype or shape.kind == "head"
            used = None if is_by_itself else cast
            made = LoraFactors(place, flat, dtype, gradients_N=gradients, cast=used)
            if is_frozen:
                made.freeze()
            factors[shape.layer, shape.kind] = made
        return FusedLora(factors, gradients)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same memory layout."""
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
