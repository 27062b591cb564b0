"""The forward of a decoder, for training and sampling alike: tokens to hidden states.

The input is a *packed batch*: the tokens of many sequences in one dimension, without padding.
Everything but attention treats each token by itself. The attention object (`attention.py`) decides
which rows see which, and LoRA spans decide which rows go through which adapter.
"""

# T row of the packed batch, D feature, H query head, G key head, F inner feature, E expert

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinsmith.engine.model.architecture import Architecture, LayerShape
from tinsmith.engine.model.attention import Attention, AttentionRule
from tinsmith.engine.model.head import Head
from tinsmith.engine.model.layers import (
    ExpertWeights,
    add_rms_norm,
    apply_rope,
    gated_activation,
    lora_linear,
    mix_experts,
    rms_norm,
    spans_of,
)
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.lora import LoraSpan


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The frozen weights of one layer. Norm weights include the architecture's offset."""

    qkv: Linear
    o: Linear
    input_norm_D: Tensor
    mlp_norm_D: Tensor
    gate_up: Linear | None = None
    """Of the MLP or the shared expert; None if there is neither."""
    down: Linear | None = None
    experts: ExpertWeights | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    attention_out_norm_D: Tensor | None = None
    mlp_out_norm_D: Tensor | None = None


RopeTables = list[tuple[Tensor, Tensor]]
"""Cosine and sine of each RoPE variant, for the rows of the batch."""


class Transformer:
    """A base model. Immutable and thread-safe."""

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
        """The compute dtype: of hidden states, keys, values and adapters. Weights may be stored in
        another dtype."""
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

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        loras: Sequence[LoraSpan] = (),
        *,
        recomputes: bool = False,
    ) -> Tensor:
        """The hidden states after the final norm, the input of `head`.

        With gradients enabled, the backward from them accumulates the gradients of the adapters.

        Args:
            tokens_T: Token ids of the packed batch.
            positions_T: Position of each token in its sequence.
            attention: Which rows see which.
            loras: Which rows go through which adapter; in order, without overlap.
            recomputes: Activation checkpointing: each layer saves only its input and is recomputed
                in the backward, for a third more work and a tenth of the memory.
        """
        x_TD = self._embedding_VD[tokens_T].to(self.dtype)
        if self.architecture.embedding_scale != 1.0:
            x_TD = x_TD * torch.tensor(self.architecture.embedding_scale, dtype=self.dtype)
        # The residual stream is float32: in bfloat16 each layer would round away what earlier
        # layers added, and sampling and training would do so differently.
        x_TD = x_TD.float()
        rope_tables = self._rope_tables(positions_T)
        if torch.is_grad_enabled():
            x_TD.requires_grad_()  # the frozen weights would not start a graph
        added_TD: Tensor | None = None
        for index in range(len(self._layers)):
            if recomputes and torch.is_grad_enabled():
                x_TD = (
                    x_TD if added_TD is None else x_TD + added_TD
                )  # save one tensor instead of two
                x_TD, added_TD = checkpoint(
                    self._layer,
                    index,
                    x_TD,
                    None,
                    rope_tables,
                    attention,
                    loras,
                    use_reentrant=False,
                )
            else:
                x_TD, added_TD = self._layer(index, x_TD, added_TD, rope_tables, attention, loras)
        attention.done()
        return self._add_rms_norm(x_TD, added_TD, self._final_norm_D)[1]

    def _add_rms_norm(
        self, x_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        epsilon = self.architecture.norm_epsilon
        return add_rms_norm(x_TD, added_TD, weight_D, epsilon, self.dtype)

    def _rms_norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_TD, weight_D, self.architecture.norm_epsilon, self.dtype)

    def _rope_tables(self, positions_T: Tensor) -> RopeTables:
        rope_tables: RopeTables = []
        positions_T11 = positions_T.to(torch.float32).view(-1, 1, 1)
        for rope, frequencies_D in zip(self.architecture.ropes, self._frequencies_D, strict=True):
            angles_T1D = positions_T11 * frequencies_D
            cos_T1D, sin_T1D = angles_T1D.cos() * rope.factor, angles_T1D.sin() * rope.factor
            cos_T1D, sin_T1D = torch.cat((cos_T1D, cos_T1D), 2), torch.cat((-sin_T1D, sin_T1D), 2)
            rope_tables.append((cos_T1D, sin_T1D))
        return rope_tables

    def _layer(
        self,
        index: int,
        x_TD: Tensor,
        added_TD: Tensor | None,
        rope_tables: RopeTables,
        attention: Attention,
        loras: Sequence[LoraSpan],
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, and the MLP output, which the next norm adds to it."""
        weights = self._layers[index]
        x_TD, seen_TD = self._add_rms_norm(x_TD, added_TD, weights.input_norm_D)
        added_TD = self._attention(index, seen_TD, rope_tables, attention, loras)
        if weights.attention_out_norm_D is not None:
            added_TD = self._rms_norm(added_TD, weights.attention_out_norm_D)
        x_TD, seen_TD = self._add_rms_norm(x_TD, added_TD, weights.mlp_norm_D)
        added_TD = self._mlp(index, seen_TD, loras)
        if weights.mlp_out_norm_D is not None:
            added_TD = self._rms_norm(added_TD, weights.mlp_out_norm_D)
        return x_TD, added_TD

    def _attention(
        self,
        index: int,
        x_TD: Tensor,
        rope_tables: RopeTables,
        attention: Attention,
        loras: Sequence[LoraSpan],
    ) -> Tensor:
        shape, weights = self.architecture, self._layers[index]
        layer: LayerShape = shape.layers[index]
        qkv_TO = lora_linear(x_TD, weights.qkv, spans_of(loras, index, "qkv"))
        qkv_THD = qkv_TO.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_size)
        rotated_heads = shape.heads + shape.kv_heads
        # RoPE is applied to queries and keys together; only QK norms separate them.
        qk_THD, v_TGD = qkv_THD[:, :rotated_heads], qkv_THD[:, rotated_heads:]
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            q_THD = self._rms_norm(qk_THD[:, : shape.heads], weights.q_norm_D)
            k_TGD = self._rms_norm(qk_THD[:, shape.heads :], weights.k_norm_D)
            qk_THD = torch.cat((q_THD, k_TGD), 1)
        if layer.rope is not None:
            qk_THD = apply_rope(qk_THD, *rope_tables[layer.rope])
        q_THD, k_TGD = qk_THD[:, : shape.heads], qk_THD[:, shape.heads :]
        out_THD = attention.attend(index, self._rules[index], q_THD, k_TGD, v_TGD)
        return lora_linear(out_THD.flatten(1), weights.o, spans_of(loras, index, "o"))

    def _mlp(self, index: int, x_TD: Tensor, loras: Sequence[LoraSpan]) -> Tensor:
        weights = self._layers[index]
        shared_TD: Tensor | None = None
        if weights.gate_up is not None and weights.down is not None:
            gate_up_TF = lora_linear(x_TD, weights.gate_up, spans_of(loras, index, "gate_up"))
            inner_TF = gated_activation(gate_up_TF, self.architecture.activation)
            shared_TD = lora_linear(inner_TF, weights.down, spans_of(loras, index, "down"))
        if weights.experts is None:
            assert shared_TD is not None, "a layer has an MLP or experts"
            return shared_TD
        return mix_experts(x_TD, weights.experts, self.architecture.activation, shared_TD)
