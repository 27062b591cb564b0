"""The forward of a decoder, one for training and for sampling: rows of tokens to hidden rows.

A *pack* is one row of tokens of many sequences. Everything but attention treats each token by
itself, so sequences need not be told apart there; which rows see which is the attention's
(`attention.py`), and which rows go through which adapter is said by spans.
"""

# T row of the pack, D feature, H query head, G key head, F inner feature, E expert

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinsmith.model.architecture import Architecture, LayerShape
from tinsmith.model.attention import Attention, AttentionRule
from tinsmith.model.experts import ExpertWeights, mix_experts
from tinsmith.model.head import Head
from tinsmith.model.layers import added_and_normed, gated, rms_norm, turned
from tinsmith.model.linear import Linear
from tinsmith.model.lora import LoraSpan
from tinsmith.model.lora_linear import lora_linear, spans_of


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The frozen weights of one layer. Those of norms have the architecture's offset added."""

    qkv: Linear
    o: Linear
    input_norm_D: Tensor
    mlp_norm_D: Tensor
    gate_up: Linear | None = None
    """Of the MLP, or of the expert that all tokens go through; None if there is neither."""
    down: Linear | None = None
    experts: ExpertWeights | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    attention_out_norm_D: Tensor | None = None
    mlp_out_norm_D: Tensor | None = None


Turns = list[tuple[Tensor, Tensor]]
"""Cosine and sine of each rope, for the rows of the pack."""


class Transformer:
    """A base model. It never changes; threads may use it at the same time."""

    def __init__(
        self,
        architecture: Architecture,
        embedding_VD: Tensor,
        layers: Sequence[LayerWeights],
        final_norm_D: Tensor,
        head: Head,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.architecture = architecture
        self.head = head
        self.dtype = dtype
        """What is computed in: hidden rows, keys and values, adapters. Weights may be held in
        another."""
        self.device = embedding_VD.device
        self._embedding_VD = embedding_VD
        self._layers = tuple(layers)
        self._final_norm_D = final_norm_D
        self._frequencies_D = [
            torch.tensor(rope.frequencies, device=self.device) for rope in architecture.ropes
        ]
        self._rules = [
            AttentionRule(architecture.attention_scale, one.window, architecture.attention_softcap)
            for one in architecture.layers
        ]

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        loras: Sequence[LoraSpan] = (),
        *,
        saves_memory: bool = False,
    ) -> Tensor:
        """The hidden rows after the last norm, which `head` makes logits of.

        With gradients enabled, going back from them gathers the gradients of the adapters that
        keep any.

        Args:
            tokens_T: Ids of the pack's tokens.
            positions_T: Where each token is in its sequence.
            attention: Who sees whom.
            loras: Which rows go through which adapter; in order, without overlap.
            saves_memory: Each layer keeps what came in alone, and is computed again on the way
                back: a third more work for a tenth of the memory.
        """
        x_TD = self._embedding_VD[tokens_T].to(self.dtype)
        if self.architecture.embedding_scale != 1.0:
            x_TD = x_TD * torch.tensor(self.architecture.embedding_scale, dtype=self.dtype)
        # What all layers add to is float32: in bfloat16 each of them would round away what those
        # before it added, and samples and passes would do so differently.
        x_TD = x_TD.float()
        turns = self._turns(positions_T)
        if torch.is_grad_enabled():
            x_TD.requires_grad_()  # the base has no gradients that would make a graph
        added_TD: Tensor | None = None
        for index in range(len(self._layers)):
            if saves_memory and torch.is_grad_enabled():
                x_TD = x_TD if added_TD is None else x_TD + added_TD  # one is kept, and not two
                x_TD, added_TD = checkpoint(
                    self._layer, index, x_TD, None, turns, attention, loras, use_reentrant=False
                )
            else:
                x_TD, added_TD = self._layer(index, x_TD, added_TD, turns, attention, loras)
        attention.done()
        return self._added_and_normed(x_TD, added_TD, self._final_norm_D)[1]

    def _added_and_normed(
        self, x_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        epsilon = self.architecture.norm_epsilon
        return added_and_normed(x_TD, added_TD, weight_D, epsilon, self.dtype)

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_TD, weight_D, self.architecture.norm_epsilon, self.dtype)

    def _turns(self, positions_T: Tensor) -> Turns:
        turns: Turns = []
        positions_T11 = positions_T.to(torch.float32).view(-1, 1, 1)
        for rope, frequencies_D in zip(self.architecture.ropes, self._frequencies_D, strict=True):
            angles_T1D = positions_T11 * frequencies_D
            cos_T1D, sin_T1D = angles_T1D.cos() * rope.factor, angles_T1D.sin() * rope.factor
            cos_T1D, sin_T1D = torch.cat((cos_T1D, cos_T1D), 2), torch.cat((-sin_T1D, sin_T1D), 2)
            turns.append((cos_T1D, sin_T1D))
        return turns

    def _layer(
        self,
        index: int,
        x_TD: Tensor,
        added_TD: Tensor | None,
        turns: Turns,
        attention: Attention,
        loras: Sequence[LoraSpan],
    ) -> tuple[Tensor, Tensor]:
        """What all layers add to, and what this one adds last: whoever norms it next adds it."""
        weights = self._layers[index]
        x_TD, seen_TD = self._added_and_normed(x_TD, added_TD, weights.input_norm_D)
        added_TD = self._attention(index, seen_TD, turns, attention, loras)
        if weights.attention_out_norm_D is not None:
            added_TD = self._normed(added_TD, weights.attention_out_norm_D)
        x_TD, seen_TD = self._added_and_normed(x_TD, added_TD, weights.mlp_norm_D)
        added_TD = self._mlp(index, seen_TD, loras)
        if weights.mlp_out_norm_D is not None:
            added_TD = self._normed(added_TD, weights.mlp_out_norm_D)
        return x_TD, added_TD

    def _attention(
        self,
        index: int,
        x_TD: Tensor,
        turns: Turns,
        attention: Attention,
        loras: Sequence[LoraSpan],
    ) -> Tensor:
        shape, weights = self.architecture, self._layers[index]
        layer: LayerShape = shape.layers[index]
        qkv_TO = lora_linear(x_TD, weights.qkv, spans_of(loras, index, "qkv"))
        qkv_THD = qkv_TO.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_size)
        turning = shape.heads + shape.kv_heads
        # Queries and keys are turned as one; only norms of their own set them apart.
        qk_THD, v_TGD = qkv_THD[:, :turning], qkv_THD[:, turning:]
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            q_THD = self._normed(qk_THD[:, : shape.heads], weights.q_norm_D)
            k_TGD = self._normed(qk_THD[:, shape.heads :], weights.k_norm_D)
            qk_THD = torch.cat((q_THD, k_TGD), 1)
        if layer.rope is not None:
            qk_THD = turned(qk_THD, *turns[layer.rope])
        q_THD, k_TGD = qk_THD[:, : shape.heads], qk_THD[:, shape.heads :]
        out_THD = attention.attend(index, self._rules[index], q_THD, k_TGD, v_TGD)
        return lora_linear(out_THD.flatten(1), weights.o, spans_of(loras, index, "o"))

    def _mlp(self, index: int, x_TD: Tensor, loras: Sequence[LoraSpan]) -> Tensor:
        weights = self._layers[index]
        shared_TD: Tensor | None = None
        if weights.gate_up is not None and weights.down is not None:
            gate_up_TF = lora_linear(x_TD, weights.gate_up, spans_of(loras, index, "gate_up"))
            inner_TF = gated(gate_up_TF, self.architecture.activation)
            shared_TD = lora_linear(inner_TF, weights.down, spans_of(loras, index, "down"))
        if weights.experts is None:
            assert shared_TD is not None, "a layer has an MLP or experts"
            return shared_TD
        return mix_experts(x_TD, weights.experts, self.architecture.activation, shared_TD)
