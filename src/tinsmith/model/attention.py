"""Attention over a pack: many sequences in one row of tokens, and each sees itself alone.

Here is what its two kinds have in common: `pack_attention.py` for training, and
`cached_attention.py` for sampling.

Either splits what a query sees into parts: a *past* that it sees whole, and the stretch itself, of
which it sees what is not after it. Each part is one call of the flash kernel; the results are
joined by the weights that their logarithms of sums give.

No mask is ever built, and the cost follows the lengths of the stretches. Where the kernel does not
reach (sequences longer than a window, capped scores, other devices) `masked_attention.py` stands
in, for each stretch by itself: what is beside it has no part in that.
"""

# H query head, G key head, D dimension of a head, T row of the pack, N stretch, L token of one

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AttentionRule(NamedTuple):
    """What a layer's attention is computed with."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """What the transformer asks of either kind."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """What each row takes from the rows that it sees: rows × heads × dimensions."""

    def done(self) -> None:
        """All layers have been through it."""


def reach_of(rule: AttentionRule, device: torch.device) -> int:
    """How long a sequence may be for the flash kernel to give what the rule says."""
    if rule.softcap is not None or device.type != "cpu":
        return 0
    return sys.maxsize if rule.window is None else rule.window


flash_kernel = torch._scaled_dot_product_flash_attention_for_cpu
"""Takes fewer heads of keys than of queries."""


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """N × heads × L × D in, out the result and the logarithm of the sum of each row's weights."""
    out, sums = flash_kernel(q, k, v, 0.0, is_causal, scale=scale)
    return out, sums


def joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two parts as if they had been one."""
    sums = torch.logaddexp(first[1], second[1])
    weight = (first[1] - sums).exp().unsqueeze(-1)
    other = (second[1] - sums).exp().unsqueeze(-1)
    out = first[0].float() * weight + second[0].float() * other
    return out.to(first[0].dtype), sums


def heads_first(rows: Tensor, stretches: int = 1) -> Tensor:
    """Rows × heads … as N × heads × L …, for N stretches of one length; a view."""
    made: Tensor = rows.unflatten(0, (stretches, -1)).transpose(1, 2)
    return made


def rows_first(parts: Tensor) -> Tensor:
    """The way back from `heads_first`."""
    return parts.transpose(1, 2).flatten(0, 1)
