"""What a decoder is made of: its sizes, and in what it differs from the others.

Nearly all open language models are one design with small differences: a stack of layers, each an
attention and an MLP, each behind a norm and added to what came in. `Architecture` says which
differences a model has; `families.py` reads them from its configuration, `transformer.py` computes
them.

Knows no tensors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

Activation = Literal["silu", "gelu_tanh"]
Group = Literal["attention", "mlp", "unembed"]
"""What a user switches on or off as a whole."""
LinearKind: TypeAlias = str
"""`qkv`, `o`, `gate_up`, `down`, `head`; or a layer's own name, in `transformers_model.py`."""

OUTPUT_LAYER = "lm_head"
ALPHA = 32.0
"""The product of an adapter's factors counts ALPHA / rank times."""


class Rope(msgspec.Struct, frozen=True):
    """How positions turn queries and keys: one frequency for each pair of dimensions."""

    frequencies: tuple[float, ...]
    """Radians for each position; as many as half a head has dimensions."""
    factor: float = 1.0
    """What cosine and sine are multiplied with."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture of experts that stands in the place of an MLP."""

    count: int
    chosen: int
    """How many of them a token goes through."""
    inner: int
    normalises: bool
    """Whether the weights of the chosen add up to 1."""
    shared_inner: int = 0
    """The size of an expert that every token goes through, behind a gate; 0 for none."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """In what one layer may differ from the others of its model."""

    window: int | None = None
    """How many tokens back it sees, itself included; None for all."""
    rope: int | None = 0
    """Which of the architecture's; None if positions do not matter to it."""
    experts: Experts | None = None


class LinearShape(NamedTuple):
    """A linear layer as it is computed: parts that have the same input are one."""

    layer: int
    """-1 for the output layer, which is in none."""
    kind: LinearKind
    group: Group
    inputs: int
    parts: tuple[tuple[str, int], ...]
    """The name in the base model, and the outputs, of each layer that is a part of it."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """See the top of the module."""

    name: str
    """What `transformers` calls it, such as `LlamaForCausalLM`."""
    vocabulary: int
    hidden: int
    inner: int
    """The size between the two halves of an MLP."""
    heads: int
    kv_heads: int
    head_size: int
    max_context: int
    layers: tuple[LayerShape, ...]
    ropes: tuple[Rope, ...]
    norm_epsilon: float
    norm_offset: float = 0.0
    """What is added to the weights of norms: 1 in the Gemma family."""
    activation: Activation = "silu"
    has_qk_norm: bool = False
    """Queries and keys have norms of their own, one for all heads."""
    has_post_norms: bool = False
    """What attention and MLP give goes through a norm too, before it is added."""
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores are c·tanh(score / c) with this c."""
    logits_softcap: float | None = None
    ties_embeddings: bool = False
    eos_tokens: tuple[int, ...] = ()
    found_linears: tuple[LinearShape, ...] = ()
    """For models that `transformers` computes: those that were found in the model itself."""

    @property
    def query_outputs(self) -> int:
        """The outputs of the query projection, which are the inputs of the last one."""
        return self.heads * self.head_size

    @property
    def key_outputs(self) -> int:
        """The outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    def linears(self) -> tuple[LinearShape, ...]:
        """Every linear layer that an adapter can sit on, from the first to the last."""
        if self.found_linears:
            return self.found_linears
        shapes: list[LinearShape] = []
        for index, layer in enumerate(self.layers):
            shapes += self._attention(index)
            if layer.experts is None:
                shapes += self._mlp(index, "mlp", self.inner)
            elif layer.experts.shared_inner:
                shapes += self._mlp(index, "mlp.shared_expert", layer.experts.shared_inner)
        output = LinearShape(-1, "head", "unembed", self.hidden, ((OUTPUT_LAYER, self.vocabulary),))
        return (*shapes, output)

    def _attention(self, index: int) -> list[LinearShape]:
        place, keys = f"model.layers.{index}.self_attn", self.key_outputs
        queries = (f"{place}.q_proj", self.query_outputs)
        parts = (queries, (f"{place}.k_proj", keys), (f"{place}.v_proj", keys))
        last = ((f"{place}.o_proj", self.hidden),)
        return [
            LinearShape(index, "qkv", "attention", self.hidden, parts),
            LinearShape(index, "o", "attention", self.query_outputs, last),
        ]

    def _mlp(self, index: int, name: str, inner: int) -> list[LinearShape]:
        place = f"model.layers.{index}.{name}"
        first = ((f"{place}.gate_proj", inner), (f"{place}.up_proj", inner))
        last = ((f"{place}.down_proj", self.hidden),)
        return [
            LinearShape(index, "gate_up", "mlp", self.hidden, first),
            LinearShape(index, "down", "mlp", inner, last),
        ]
