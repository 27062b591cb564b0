"""Factors of several adapters as one, in bfloat16: one product where there was one for each.

A product of a few rows takes less time than the call of oneDNN that makes it. And where it is left
to oneDNN, each comes out the same, bit for bit, in a group and alone. In float32 there is no such
group: calls take less time, and threads share out one product in another way than several. Nor is
there one where compiled kernels compute: a call of theirs costs less than to put factors together.
"""

# G adapter of the group, I input, O output, R rank, T row of an adapter

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.model.factor_place import FactorPlace
from tinsmith.model.lora import Factors, columns, scaled

MOST_SMALL = 16**3
"""Multiplications of a product that PyTorch makes itself. It counts those of a group together, and
would so treat small ones differently in a group and alone."""


def can_group(one: Factors, other: Factors, rows: int) -> bool:
    """Whether they fit together, and so many rows of each come out the same as alone."""
    if one.by_kernels is not None or other.by_kernels is not None:
        return False
    place = one.place
    narrowest = min(place.inputs, *place.outputs)
    # With a rank of 1 they are products of a matrix and a vector, which are summed up otherwise.
    is_large = place.rank > 1 and rows * place.rank * narrowest > MOST_SMALL
    is_same = (one.dtype, _shape(place)) == (other.dtype, _shape(other.place))
    return one.dtype == torch.bfloat16 and is_large and is_same


def _shape(place: FactorPlace) -> tuple[int, list[int], int]:
    return place.inputs, place.outputs, place.rank


class FactorGroup:
    """See the top of the module. Each member has as many rows, one after the other.

    Args:
        members: All of one shape.
    """

    def __init__(self, members: Sequence[Factors]) -> None:
        self._members = members
        self._place = members[0].place
        held = zip(*(one.held for one in members), strict=True)
        self._a_GRI, *self._bs_GOR = [_stacked(some, members[0].dtype) for some in held]

    def inner(self, x_TI: Tensor) -> Tensor:
        """`Factors.inner`."""
        return scaled(torch.bmm(self._rows(x_TI), self._a_GRI.mT), self._place.scale)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`Factors.add_to`."""
        t_GTR = self.inner(x_TI)
        ys, ts = columns(self._rows(y_TO), self._place.outputs), columns(t_GTR, self._place.ranks)
        for y, t, b_GOR in zip(ys, ts, self._bs_GOR, strict=True):
            y.baddbmm_(t, b_GOR.mT)
        return t_GTR

    def backward(self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_GTR: Tensor) -> None:
        """`Factors.backward`."""
        # Copied once, since each product would copy what is not in one piece.
        dys = [dy.contiguous() for dy in columns(self._rows(dy_TO), self._place.outputs)]
        dts = [torch.bmm(dy, b_GOR) for dy, b_GOR in zip(dys, self._bs_GOR, strict=True)]
        dt_GTR = scaled(torch.cat(dts, -1), self._place.scale)
        self._rows(dx_TI).baddbmm_(dt_GTR, self._a_GRI)
        lefts, rights = (dt_GTR, *dys), (self._rows(x_TI), *columns(t_GTR, self._place.ranks))
        made = [torch.bmm(one.mT, other) for one, other in zip(lefts, rights, strict=True)]
        for member, *gradients in zip(self._members, *made, strict=True):
            member.gather(gradients)

    def _rows(self, rows: Tensor) -> Tensor:
        return rows.view(len(self._members), -1, rows.shape[-1])


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    shape = len(matrices), *matrices[0].shape
    made = torch.empty(shape, dtype=dtype, device=matrices[0].device)
    for place, one in zip(made, matrices, strict=True):
        place.copy_(one)
    return made
