"""A mixture of experts: each token goes through the few that a router chooses for it.

Experts are frozen and take no adapters. A token's sum over its experts is made in the order of
their numbers, whatever tokens are beside it.
"""

# T row of the pack, D feature, E expert, C chosen, N row of one expert

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tinsmith.model.architecture import Activation, Experts
from tinsmith.model.layers import gated
from tinsmith.model.linear import Linear
from tinsmith.model.lora_linear import lora_linear

_LEAST_GATE = -80.0
"""What is below counts for nothing, and its exponential would be no number."""


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The router and the experts of one layer."""

    shape: Experts
    router: Linear
    gate_ups: tuple[Linear, ...]
    downs: tuple[Linear, ...]
    shared_gate: Linear | None = None
    """How much of the expert that all tokens go through is taken."""


def mix_experts(
    x_TD: Tensor, weights: ExpertWeights, activation: Activation, shared_TD: Tensor | None
) -> Tensor:
    """What the chosen experts give, by their weights, and what the shared one gives."""
    shares_TE = lora_linear(x_TD, weights.router, []).float().softmax(-1)
    shares_TC, chosen_TC = shares_TE.topk(weights.shape.chosen, dim=-1)
    if weights.shape.normalises:
        shares_TC = shares_TC / shares_TC.sum(-1, keepdim=True)
    mixed_TD = torch.zeros_like(x_TD)
    for expert in chosen_TC.unique().tolist():
        rows_N, places_N = torch.nonzero(chosen_TC == expert, as_tuple=True)
        gate_up_NF = lora_linear(x_TD[rows_N], weights.gate_ups[expert], [])
        out_ND = lora_linear(gated(gate_up_NF, activation), weights.downs[expert], [])
        share_N1 = shares_TC[rows_N, places_N].unsqueeze(1)
        mixed_TD = mixed_TD.index_add(0, rows_N, (out_ND * share_N1).to(x_TD.dtype))
    if shared_TD is None:
        return mixed_TD
    if weights.shared_gate is not None:
        # Not by `sigmoid`, which computes the last numbers of a tensor in another way than others.
        gate_T1 = lora_linear(x_TD, weights.shared_gate, []).clamp(min=_LEAST_GATE)
        shared_TD = shared_TD / (1 + torch.exp(-gate_T1))
    return mixed_TD + shared_TD
