"""LoRA adapters: one flat vector of float32, and the factors of each linear layer as views of it.

A layer y = x·Wᵀ becomes y = x·Wᵀ + ALPHA / rank · (x·Aᵀ)·Bᵀ. A begins uniform between ±1/√inputs,
as the seed determines, and B as zero, so that a fresh adapter changes nothing.

Being flat, all weights of an adapter are stepped, clipped, copied and compared at once, and so are
its gradients and moments. Layers that have one input (q, k, v; gate, up) are computed as one, so
their A factors lie beside each other and are one matrix too.

Knows nothing of files; how layers are called in them is `checkpoints/format.py`'s.
"""

# I input, O output, R rank, T row of the pack, N number of the vector

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.model.architecture import ALPHA, Architecture, LinearKind, LinearShape
from tinsmith.model.factor_place import FactorPlace
from tinsmith.model.kernel_factors import KernelFactors, factor_kernels
from tinsmith.model.linear import Linear


class Factors:
    """Those of one linear layer, as passes use them; with their gradients if it is trained.

    Args:
        place: Where they are.
        flat_N: The vector that they lie in.
        dtype: What is computed in.
        gradients_N: Where their gradients lie, whatever is there before; None if there are none.
        cast: Gives the vector in that type; without it each factor is cast by itself.
    """

    def __init__(
        self,
        place: FactorPlace,
        flat_N: Tensor,
        dtype: torch.dtype,
        *,
        gradients_N: Tensor | None = None,
        cast: Callable[[], Tensor] | None = None,
    ) -> None:
        self.place = place
        self.dtype = dtype
        self.has_gradients = False
        """Whether they were written; what is in them before means nothing."""
        self._flat_N = flat_N
        self._gradients_N = gradients_N
        self._cast = cast
        self._frozen: tuple[Linear, Linear] | None = None

    # Views are made when they are asked for: kernels need none, and a pass has thousands.

    @functools.cached_property
    def held(self) -> list[Tensor]:
        """A, and B of each part, as they lie in the vector."""
        return self.place.views(self._flat_N)

    @functools.cached_property
    def gradients(self) -> list[Tensor]:
        """In the order of `held`; empty if there are none."""
        return [] if self._gradients_N is None else self.place.views(self._gradients_N)

    @functools.cached_property
    def _used(self) -> list[Tensor]:
        """As they are multiplied, unless that is in a group."""
        if self._cast is None:
            return [one.to(self.dtype) for one in self.held]
        return self.place.views(self._cast())

    @functools.cached_property
    def by_kernels(self) -> KernelFactors | None:
        """What computes with them where there are kernels that can."""
        kernels = factor_kernels(self.place, self._flat_N, self.dtype)
        if kernels is None:
            return None
        return KernelFactors(kernels, self.place, self._flat_N, self._gradients_N)

    def freeze(self) -> None:
        """Make rows independent of each other, as those of the base are; see `linear.py`."""
        a_RI, *bs_OR = self._used
        # The parts as one matrix, with zeros between them: one call instead of three for few rows.
        self._frozen = Linear(a_RI), Linear(torch.block_diag(*bs_OR) * self.place.scale)

    def inner(self, x_TI: Tensor) -> Tensor:
        """What B is multiplied by: x·Aᵀ, scaled."""
        return scaled(x_TI @ self._used[0].T, self.place.scale)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add what the adapter changes to the layer's outputs; what `inner` is, for `backward`."""
        if self._frozen is not None:
            a, b = self._frozen
            t_TR = a(x_TI)
            y_TO.add_(b(t_TR))
            return t_TR
        if self.by_kernels is not None:
            return self.by_kernels.add_to(y_TO, x_TI)
        t_TR = self.inner(x_TI)
        ys, ts = columns(y_TO, self.place.outputs), columns(t_TR, self.place.ranks)
        for y, t, b_OR in zip(ys, ts, self._used[1:], strict=True):
            y.addmm_(t, b_OR.T)
        return t_TR

    def backward(self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor) -> None:
        """Add to the inputs' gradient, and to the factors' own."""
        if self.by_kernels is not None and self.by_kernels.goes_back:
            self.by_kernels.backward(dx_TI, dy_TO, x_TI, t_TR, is_added=self.has_gradients)
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
            # The first sum is written over what is there, which saves clearing it.
            if gradient.dtype == left.dtype:
                gradient.addmm_(left.T, right, beta=float(self.has_gradients))
            else:
                self._gather(gradient, left.T @ right)
        self.has_gradients = True

    def gather(self, made: Iterable[Tensor]) -> None:
        """Add to its gradients, in the order of these."""
        for gradient, one in zip(self.gradients, made, strict=True):
            self._gather(gradient, one)
        self.has_gradients = True

    def _gather(self, gradient: Tensor, made: Tensor) -> None:
        if self.has_gradients:
            gradient.add_(made)  # sums over many rows and passes are kept in float32
        else:
            gradient.copy_(made)

    def clear_unwritten(self) -> None:
        """Make gradients that nothing was gathered in zeros."""
        if not self.has_gradients:
            for gradient in self.gradients:
                gradient.zero_()
            self.has_gradients = True


def columns(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Those of each part. Most layers have one part, and few rows cost as much as a view does."""
    return (rows,) if len(sizes) == 1 else rows.split_with_sizes(sizes, -1)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """In place, and with no call for the scale that most adapters have."""
    return rows if scale == 1.0 else rows.mul_(scale)


class FusedLora:
    """An adapter as passes use it: the factors of each linear layer, found by layer and kind."""

    def __init__(
        self, factors: dict[tuple[int, LinearKind], Factors], gradients: Tensor | None
    ) -> None:
        self._factors = factors
        self._gradients = gradients

    def factors(self, layer: int, kind: LinearKind) -> Factors | None:
        """None where the adapter changes nothing."""
        return self._factors.get((layer, kind))

    def gradients(self) -> Tensor:
        """What backward passes have gathered, in the order of the flat vector."""
        assert self._gradients is not None, "it was made without gradients"
        for one in self._factors.values():
            one.clear_unwritten()
        return self._gradients


class LoraSpan(NamedTuple):
    """Rows of a pack that go through an adapter; rows in no span are the base model's own."""

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
        self._places: list[tuple[LinearShape, FactorPlace]] = []
        self.size = 0
        """How many floats the vector has."""
        for shape in architecture.linears():
            if groups[shape.group]:
                outputs = [one for _, one in shape.parts]
                place = FactorPlace(self.size, shape.inputs, outputs, rank, self.scale)
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
        """Weights that change nothing yet. The same seed gives the same, on every machine."""
        digest = hashlib.sha256(seed.encode()).digest()
        # Made on the CPU: generators of devices differ.
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
        """The adapter as passes of that type use it; views, or copies where that is another.

        Args:
            flat: The weights.
            dtype: That of the base model.
            gradients: Where backward passes gather the gradients, whatever is in it before; None if
                there are none.
            is_frozen: The vector never changes again; rows of samples then come out the same
                whatever is beside them.
        """
        assert flat.shape == (self.size,), "the weights have another layout"
        assert gradients is None or _lie_alike(gradients, flat), "gradients lie as weights do"
        if is_frozen:
            flat = flat.to(dtype)

        @functools.cache
        def cast() -> Tensor:
            return flat.to(dtype)  # at once, which takes less time than for each factor

        factors: dict[tuple[int, LinearKind], Factors] = {}
        for shape, place in self._places:
            # Later, and not for the head alone: groups of layers have copies of their own.
            is_by_itself = flat.dtype == dtype or shape.kind == "head"
            used = None if is_by_itself else cast
            made = Factors(place, flat, dtype, gradients_N=gradients, cast=used)
            if is_frozen:
                made.freeze()
            factors[shape.layer, shape.kind] = made
        return FusedLora(factors, gradients)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether what is found by its place in one is found so in the other."""
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
