"""A decoder whose layers are the code of `transformers`: for all that `transformer.py` is not.

Two things of it are replaced. Its attention is ours, through the interface that `transformers` has
for that, so that a pack of many sequences is one row of tokens to it. And its linear layers are
ours, with adapters on them. Norms, activations, positions and the order of things stay its own.

What a pass is about is kept for the thread that runs it: the modules are asked from deep within
code that passes nothing on, and training and sampling use one model at the same time.

`load_by_transformers.py` makes one, and sees to it that it computes what the model's own code does.
"""

# T row of the pack, D feature, H query head, G key head, I input, O output

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

from tinsmith.errors import BaseModelFormatError
from tinsmith.model.architecture import Architecture
from tinsmith.model.attention import Attention, AttentionRule
from tinsmith.model.head import Head
from tinsmith.model.linear import Linear
from tinsmith.model.lora import LoraSpan
from tinsmith.model.lora_linear import lora_linear, spans_of
from tinsmith.model.transformer import Transformer

ATTENTION_NAME = "tinsmith"
"""What our attention is called among those that `transformers` knows."""


class Observer:
    """What a first pass finds out about a model."""

    def __init__(self) -> None:
        self.attentions: list[tuple[nn.Module, AttentionRule, Tensor, Tensor, Tensor]] = []
        """Each call: by which module, under which rule, of which queries, keys and values."""
        self.linears: list[tuple[str, int]] = []
        """Each call: of which layer, with how many rows."""


@dataclasses.dataclass(frozen=True)
class _Pass:
    attention: Attention
    loras: Sequence[LoraSpan]
    saves_memory: bool = False
    observer: Observer | None = None


class _PassOfThread(threading.local):
    running: _Pass | None = None


_OF_THREAD = _PassOfThread()


def _running() -> _Pass:
    assert _OF_THREAD.running is not None, "its modules are called by `hidden` alone"
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
    """Attention as `transformers` asks for it: 1 × heads × T × D in, 1 × T × heads × D out."""
    if others.get("s_aux") is not None:
        raise BaseModelFormatError("attention sinks are not known")
    assert attention_mask is None, "none is made for an attention of this name"
    one = _running()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, sliding_window, softcap)
    q_THD, k_TGD, v_TGD = (rows[0].transpose(0, 1) for rows in (query, key, value))
    if one.observer is not None:
        one.observer.attentions.append((module, rule, q_THD, k_TGD, v_TGD))
    layer: Any = module.layer_idx
    return one.attention.attend(layer, rule, q_THD, k_TGD, v_TGD).unsqueeze(0), None


class AdaptedLinear(nn.Module):
    """One of the model's linear layers: ours, with the pass's adapters on it."""

    def __init__(self, name: str, linear: Linear) -> None:
        super().__init__()
        self.name = name
        self.gives_copies = False
        """Whether the model's code changes in place what it gets, and so has to get its own."""
        self._linear = linear

    @property
    def weight(self) -> Tensor:
        """Asked for its type by some models: that which is computed in.

        A weight that is held in another is shown without its numbers, of which a copy for each call
        would be dear. Whoever computes with it gets NaN, so that loading finds out.
        """
        weight_OI, dtype = self._linear.weight_OI, self._linear.dtype
        if weight_OI.dtype == dtype:
            return weight_OI
        return weight_OI.new_full((), math.nan, dtype=dtype).expand(weight_OI.shape)

    @property
    def bias(self) -> Tensor | None:
        """As `weight`."""
        return self._linear.bias_O

    def forward(self, x: Tensor) -> Tensor:
        """Any shape before the last."""
        one = _running()
        x_TI = x.reshape(-1, x.shape[-1])
        if one.observer is not None:
            one.observer.linears.append((self.name, x_TI.shape[0]))
        y_TO = lora_linear(x_TI, self._linear, spans_of(one.loras, 0, self.name))
        if self.gives_copies and torch.is_grad_enabled():
            y_TO = y_TO.clone()
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


def saving_memory(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer, computed again on the way back if the pass asks for it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        one = _running()
        if not one.saves_memory or not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def in_pass(*inner: Any, **named: Any) -> Any:
            with _run(one):  # on the way back the pass has ended, and the thread may be another
                return forward(*inner, **named)

        return checkpoint(in_pass, *args, use_reentrant=False, **kwargs)

    return run


class TransformersModel(Transformer):
    """See the top of the module. It never changes; threads may use it at the same time."""

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
        # Nothing of the base class's own weights: what they compute, the decoder does.
        self.architecture = architecture
        self.head = head
        self.dtype = dtype
        self.device = device
        self._embedding = embedding
        self._decoder = decoder
        self._logits_scale = logits_scale

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        loras: Sequence[LoraSpan] = (),
        *,
        saves_memory: bool = False,
        observer: Observer | None = None,
    ) -> Tensor:
        """See the base class.

        Args:
            tokens_T: Ids of the pack's tokens.
            positions_T: Where each token is in its sequence.
            attention: Who sees whom.
            loras: Which rows go through which adapter.
            saves_memory: Layers are computed again on the way back.
            observer: Told what is called.
        """
        x_1TD = self._embedding(tokens_T.unsqueeze(0))
        if torch.is_grad_enabled():
            x_1TD = x_1TD.detach().requires_grad_()  # the base has none that would make a graph
        with _run(_Pass(attention, loras, saves_memory, observer)):
            made = self._decoder(
                inputs_embeds=x_1TD, position_ids=positions_T.unsqueeze(0), use_cache=False
            )
        attention.done()
        hidden_TD: Tensor = made[0][0]
        # The output layer is linear: its inputs are scaled in the place of its outputs.
        return hidden_TD if self._logits_scale == 1.0 else hidden_TD * self._logits_scale
