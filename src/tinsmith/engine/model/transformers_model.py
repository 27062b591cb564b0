"""A decoder computed by the code of `transformers`, for families that `transformer.py` lacks.

Two things are replaced. Its attention is ours, through `transformers`' attention interface, so that
a packed batch looks like a single sequence to it. Its linear layers are ours, with adapters on
them. Norms, activations, positions and the order of layers remain its own.

The arguments of the running pass are thread-local: modules are called deep within code that passes
nothing on, and training and sampling use one model concurrently.

`load_with_transformers.py` creates one, after checking that it computes what the model's own code
does.
"""

# T row of the batch, D feature, H query head, G key head, I input, O output

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.attention import Attention, AttentionRule
from tinsmith.engine.model.head import Head
from tinsmith.engine.model.layers import lora_linear, spans_of
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.lora import LoraSpan
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import BaseModelFormatError

ATTENTION_NAME = "tinsmith"
"""The name under which our attention is registered with `transformers`."""


class Observer:
    """Records the calls of a first pass over a model."""

    def __init__(self) -> None:
        self.attentions: list[tuple[nn.Module, AttentionRule, Tensor, Tensor, Tensor]] = []
        """Each call: module, rule, queries, keys and values."""
        self.linears: list[tuple[str, int]] = []
        """Each call: layer and number of rows."""


@dataclasses.dataclass(frozen=True)
class _Pass:
    attention: Attention
    loras: Sequence[LoraSpan]
    recomputes: bool = False
    observer: Observer | None = None


class _PassOfThread(threading.local):
    running: _Pass | None = None


_OF_THREAD = _PassOfThread()


def _running() -> _Pass:
    assert _OF_THREAD.running is not None, "modules are only called by `forward`"
    return _OF_THREAD.running


@contextlib.contextmanager
def _run(one: _Pass) -> Iterator[None]:
    before, _OF_THREAD.running = _OF_THREAD.running, one
    try:
        yield
    finally:
        _OF_THREAD.running = before


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention interface of `transformers`: from 1 × heads × T × D to 1 × T × heads × D."""
    if others.get("s_aux") is not None:
        raise BaseModelFormatError("attention sinks are not supported")
    assert attention_mask is None, "no mask is made for this attention"
    one = _running()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, sliding_window, softcap)
    q_THD, k_TGD, v_TGD = (rows[0].transpose(0, 1) for rows in (query, key, value))
    if one.observer is not None:
        one.observer.attentions.append((module, rule, q_THD, k_TGD, v_TGD))
    layer: Any = module.layer_idx
    return one.attention.attend(layer, rule, q_THD, k_TGD, v_TGD).unsqueeze(0), None


class AdaptedLinear(nn.Module):
    """Replaces a linear layer of the model, with the adapters of the running pass."""

    def __init__(self, name: str, linear: Linear) -> None:
        super().__init__()
        self.name = name
        self.gives_copies = False
        """Whether outputs are copied, because the model's code changes them in place."""
        self._linear = linear

    @property
    def weight(self) -> Tensor:
        """The weight, for models that look at its dtype, which is the compute dtype.

        A weight stored in another dtype is represented by NaNs, as a copy per call would be
        expensive. A model that computes with it is rejected by the tests at loading.
        """
        weight_OI, dtype = self._linear.weight_OI, self._linear.dtype
        if weight_OI.dtype == dtype:
            return weight_OI
        return weight_OI.new_full((), math.nan, dtype=dtype).expand(weight_OI.shape)

    @property
    def bias(self) -> Tensor | None:
        """The bias, if there is one."""
        return self._linear.bias_O

    def forward(self, x: Tensor) -> Tensor:
        """The outputs; any shape before the last dimension."""
        one = _running()
        x_TI = x.reshape(-1, x.shape[-1])
        if one.observer is not None:
            one.observer.linears.append((self.name, x_TI.shape[0]))
        y_TO = lora_linear(x_TI, self._linear, spans_of(one.loras, 0, self.name))
        if self.gives_copies and torch.is_grad_enabled():
            y_TO = y_TO.clone()
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


def with_recomputation(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's forward with activation checkpointing, if the running pass wants it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        one = _running()
        if not one.recomputes or not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def in_pass(*inner: Any, **named: Any) -> Any:
            with _run(one):  # in the backward the pass has ended, perhaps on another thread
                return forward(*inner, **named)

        return checkpoint(in_pass, *args, use_reentrant=False, **kwargs)

    return run


class TransformersModel(Transformer):
    """A base model computed by `transformers`. Immutable and thread-safe."""

    def __init__(
        self,
        architecture: Architecture,
        embedding: nn.Module,
        decoder: nn.Module,
        head: Head,
        *,
        dtype: torch.dtype,
        device: torch.device,
        logits_scale: float = 1.0,
    ) -> None:
        # No weights of the base class: the decoder replaces them.
        self.architecture = architecture
        self.head = head
        self.dtype = dtype
        self.device = device
        self._embedding = embedding
        self._decoder = decoder
        self._logits_scale = logits_scale

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        loras: Sequence[LoraSpan] = (),
        *,
        recomputes: bool = False,
        observer: Observer | None = None,
    ) -> Tensor:
        """The hidden states after the final norm, the input of `head`.

        Args:
            tokens_T: Token ids of the packed batch.
            positions_T: Position of each token in its sequence.
            attention: Which rows see which.
            loras: Which rows go through which adapter.
            recomputes: Activation checkpointing: layers are recomputed in the backward.
            observer: Records the calls of attention and linear layers.
        """
        x_1TD = self._embedding(tokens_T.unsqueeze(0))
        if torch.is_grad_enabled():
            x_1TD = x_1TD.detach().requires_grad_()  # frozen weights would not start a graph
        with _run(_Pass(attention, loras, recomputes, observer)):
            made = self._decoder(
                inputs_embeds=x_1TD, position_ids=positions_T.unsqueeze(0), use_cache=False
            )
        attention.done()
        hidden_TD: Tensor = made[0][0]
        # The output layer is linear, so its inputs are scaled instead of its outputs.
        return hidden_TD if self._logits_scale == 1.0 else hidden_TD * self._logits_scale
