"""The architecture of a decoder: its sizes, and how it differs from others.

Nearly all open language models share one design with small differences: a stack of layers, each
with attention and an MLP behind norms, added to a residual stream. `Architecture` describes the
differences; `families.py` reads them from a model's configuration, `transformer.py` computes them.

Knows nothing of tensors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

Activation = Literal["silu", "gelu_tanh"]
Group = Literal["attention", "mlp", "unembed"]
"""Linear layers that a user trains or freezes as a whole."""
LinearKind: TypeAlias = str
"""`qkv`, `o`, `gate_up`, `down`, `head`; or a layer's own name, in `transformers_model.py`."""

OUTPUT_LAYER = "lm_head"
ALPHA = 32.0
"""LoRA alpha: the product of an adapter's factors is scaled by ALPHA / rank."""


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding: one frequency for each pair of dimensions."""

    frequencies: tuple[float, ...]
    """Radians per position, for half the dimensions of a head."""
    factor: float = 1.0
    """Factor of cosine and sine."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of an MLP."""

    count: int
    chosen: int
    """Experts per token."""
    inner: int
    normalises: bool
    """Whether the weights of the chosen experts are normalised to 1."""
    shared_inner: int = 0
    """The inner size of the shared expert, which every token goes through; 0 for none."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer may differ from the others of its model."""

    window: int | None = None
    """The sliding window in tokens, the own one included; None for full attention."""
    rope: int | None = 0
    """Index into `Architecture.ropes`; None for no position embedding."""
    experts: Experts | None = None


class LinearShape(NamedTuple):
    """A linear layer as it is computed: layers with the same input are fused into one."""

    layer: int
    """-1 for the output layer."""
    kind: LinearKind
    group: Group
    inputs: int
    parts: tuple[tuple[str, int], ...]
    """The name in the base model and the output features of each fused layer."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of a decoder."""

    name: str
    """The model class in `transformers`, such as `LlamaForCausalLM`."""
    vocabulary: int
    hidden: int
    inner: int
    """The inner size of the MLP."""
    heads: int
    kv_heads: int
    head_size: int
    max_context: int
    layers: tuple[LayerShape, ...]
    ropes: tuple[Rope, ...]
    norm_epsilon: float
    norm_offset: float = 0.0
    """Added to the weights of norms: 1 in the Gemma family."""
    activation: Activation = "silu"
    has_qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    has_post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised before they are added."""
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores become c·tanh(score / c) with this c."""
    logits_softcap: float | None = None
    ties_embeddings: bool = False
    eos_tokens: tuple[int, ...] = ()
    found_linears: tuple[LinearShape, ...] = ()
    """For models computed by `transformers`: the layers found in the model."""

    @property
    def query_outputs(self) -> int:
        """Output features of the query projection."""
        return self.heads * self.head_size

    @property
    def key_outputs(self) -> int:
        """Output features of the key and value projections, each."""
        return self.kv_heads * self.head_size

    def linears(self) -> tuple[LinearShape, ...]:
        """Every linear layer that can have an adapter, in order."""
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
