"""Attention written out: slower, and for what the flash kernel does not reach.

It takes windows, capped scores and any device. Some queries are computed at a time, with the keys
that they can see: memory follows the length of a sequence and not its square.
"""

# L query, S key, H query head, G key head, D dimension of a head

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERIES = 128
"""How many are computed at a time."""


def masked_attention(
    q_LHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What each query takes from the keys up to its own, which are the last of them."""
    queries, before = q_LHD.shape[0], k_SGD.shape[0] - q_LHD.shape[0]
    parts: list[Tensor] = []
    for start in range(0, queries, QUERIES):
        end = min(start + QUERIES, queries)
        seen = slice(0 if window is None else max(0, before + start + 1 - window), before + end)
        given = q_LHD[start:end], k_SGD[seen], v_SGD[seen], scale, window
        if softcap is None:
            parts.append(_plain(*given))
        elif torch.is_grad_enabled():  # to keep all scores for the way back would take too much
            parts.append(checkpoint(_capped, *given, softcap, use_reentrant=False))
        else:
            parts.append(_capped(*given, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plain(q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, window: int | None) -> Tensor:
    q, k, v = _heads_first(q_LHD, k_SGD, v_SGD)
    mask_LS = _seen(q.shape[1], k.shape[1], window, q.device)
    out: Tensor = F.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask_LS, scale=scale
    )[0]
    return out.transpose(0, 1)


def _capped(
    q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    q, k, v = _heads_first(q_LHD, k_SGD, v_SGD)
    mask_LS = _seen(q.shape[1], k.shape[1], window, q.device)
    scores_HLS = softcap * torch.tanh((q @ k.transpose(1, 2)).float() * (scale / softcap))
    weights_HLS = scores_HLS.masked_fill(~mask_LS, float("-inf")).softmax(-1).to(v.dtype)
    return (weights_HLS @ v).transpose(0, 1)


def _heads_first(q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As many heads of keys and values as of queries, and heads before rows."""
    times = q_LHD.shape[1] // k_SGD.shape[1]
    k, v = (rows.transpose(0, 1).repeat_interleave(times, 0) for rows in (k_SGD, v_SGD))
    return q_LHD.transpose(0, 1), k, v


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    place_L1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key_S = torch.arange(keys, device=device)
    seen_LS = key_S <= place_L1
    return seen_LS if window is None else seen_LS & (key_S > place_L1 - window)
