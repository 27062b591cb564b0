"""Attention written out: slower, and for what the flash kernel does not reach.

It takes windows, capped scores and any device. The mask is of one sequence alone.
"""

# L query, S key, H query head, G key head, D dimension of a head

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    q_LHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What each query takes from the keys up to its own, which are the last of them."""
    queries, keys = q_LHD.shape[0], k_SGD.shape[0]
    times = q_LHD.shape[1] // k_SGD.shape[1]
    mask_LS = _seen(queries, keys, window, q_LHD.device)
    q, k, v = (
        rows.transpose(0, 1).repeat_interleave(count, 0)
        for rows, count in ((q_LHD, 1), (k_SGD, times), (v_SGD, times))
    )
    if softcap is None:
        out: Tensor = F.scaled_dot_product_attention(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask_LS, scale=scale
        )[0]
        return out.transpose(0, 1)
    scores_HLS = softcap * torch.tanh((q @ k.transpose(1, 2)).float() * (scale / softcap))
    weights_HLS = scores_HLS.masked_fill(~mask_LS, float("-inf")).softmax(-1).to(v.dtype)
    return (weights_HLS @ v).transpose(0, 1)


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    place_L1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key_S = torch.arange(keys, device=device)
    seen_LS = key_S <= place_L1
    return seen_LS if window is None else seen_LS & (key_S > place_L1 - window)
