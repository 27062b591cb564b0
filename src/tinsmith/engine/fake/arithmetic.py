"""The fake engine's model: a table of logits, to which an adapter's weights are added.

Token ids are mapped to `CLASSES` classes, and the context of a prediction (the last two tokens) to
`CONTEXTS` rows. With the base table T, which the model's name determines, and the matrices
A (rank × contexts) and B (classes × rank) of each trained part of the adapter,

    logits = T + Σ ALPHA / rank · (B·A)ᵀ
    p(token | context) = softmax(logits[context])[class of token] / (tokens of that class)

so the probabilities of the whole vocabulary sum to 1. The end-of-sequence token has a class of its
own, and is sampled about once in `CLASSES` tokens.

Weights, moments and gradients are float32, as in checkpoints; everything computed from them is
float64. Knows nothing of requests.
"""

# C context, K class, R rank, N position

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from tinsmith.engine.model.architecture import ALPHA
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.training import LoraConfig

CONTEXTS = 64
CLASSES = 64
EOS = 0
_START = 7
"""Takes the place of the token before the first."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Tensors: TypeAlias = dict[str, Array]

_LAYER = "model.layers.0."
_OUTPUT = "lm_head"


class Vocabulary:
    """The mapping of token ids to classes."""

    def __init__(self, size: int) -> None:
        self.size = size
        others = np.arange(CLASSES - 1)
        self.class_sizes_K: Array = np.concatenate(
            ([1], (size - 1 - others + CLASSES - 2) // (CLASSES - 1))
        )
        self.log_sizes_K: Array = np.log(np.maximum(self.class_sizes_K, 1))

    def classes(self, tokens: Array) -> Array:
        """The class of each token."""
        return np.where(tokens == EOS, 0, 1 + (tokens - 1) % (CLASSES - 1))

    def token(self, class_id: int, place: int) -> int:
        """The token at index `place` of a class."""
        return EOS if class_id == 0 else place * (CLASSES - 1) + class_id

    def logprobs(self, table_CK: Array, rows: Array, tokens: Array) -> Array:
        """The log-probability of each token given its context, rounded as in responses."""
        classes = self.classes(tokens)
        found = table_CK[rows, classes] - self.log_sizes_K[classes]
        return found.astype(np.float32)


def base_table(name: str) -> Array:
    """The logits of a base model, determined by its name."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng(list(digest[:16])).normal(size=(CONTEXTS, CLASSES))


def fresh_weights(lora: LoraConfig, seed: str) -> Tensors:
    """Fresh weights, which leave the base model unchanged: each A is random, each B is 0."""
    digest = hashlib.sha256(seed.encode()).digest()
    chance = np.random.default_rng(list(digest[:16]))
    made: Tensors = {}
    for part in trained_parts(lora):
        spread = 1 / math.sqrt(lora.rank)
        made[f"{part}.A"] = chance.normal(scale=spread, size=(lora.rank, CONTEXTS)).astype(
            np.float32
        )
        made[f"{part}.B"] = np.zeros((CLASSES, lora.rank), np.float32)
    return made


def trained_parts(lora: LoraConfig) -> list[str]:
    """The layers that an adapter has matrices for, with the usual names of `transformers`."""
    parts = {
        f"{_LAYER}self_attn.q_proj": lora.train_attn,
        f"{_LAYER}mlp.gate_proj": lora.train_mlp,
        _OUTPUT: lora.train_unembed,
    }
    return [part for part, is_trained in parts.items() if is_trained]


def log_table(base_CK: Array, weights: Tensors) -> Array:
    """The log-probability of each class given each context."""
    logits_CK: Array = base_CK.copy()
    for _, a_RC, b_KR in _factors(weights):
        logits_CK += (ALPHA / len(a_RC)) * (b_KR @ a_RC).T
    logits_CK -= logits_CK.max(axis=1, keepdims=True)
    logits_CK -= np.log(np.exp(logits_CK).sum(axis=1, keepdims=True))
    return logits_CK


def gradients(weights: Tensors, table_CK: Array, slopes_CK: Array) -> Tensors:
    """The gradient of each matrix, given the gradient with respect to the log-probabilities."""
    dlogits_CK = slopes_CK - np.exp(table_CK) * slopes_CK.sum(axis=1, keepdims=True)
    made: Tensors = {}
    for part, a_RC, b_KR in _factors(weights):
        scale = ALPHA / len(a_RC)
        made[f"{part}.A"] = (scale * (dlogits_CK @ b_KR).T).astype(np.float32)
        made[f"{part}.B"] = (scale * (a_RC @ dlogits_CK).T).astype(np.float32)
    return made


def _factors(weights: Tensors) -> Iterator[tuple[str, Array, Array]]:
    """Each trained part with its matrices A and B in float64."""
    for name in weights:
        if name.endswith(".A"):
            part = name.removesuffix(".A")
            b_KR = weights[f"{part}.B"].astype(np.float64)
            yield part, weights[name].astype(np.float64), b_KR


def slopes_table(rows: Array, classes: Array, slopes: Array) -> Array:
    """Gradients by position, summed by context and class."""
    flat: Array = np.bincount(
        rows * CLASSES + classes, weights=slopes, minlength=CONTEXTS * CLASSES
    )
    return flat.reshape(CONTEXTS, CLASSES)


def context_rows(tokens: Array) -> Array:
    """The row of each position: a hash of the token there and the one before it."""
    before = np.concatenate(([_START], tokens[:-1]))
    rows: Array = _row(before, tokens)
    return rows


def next_row(before: int, token: int) -> int:
    """The row of one position, as in `context_rows`; `before` is -1 if there is no token."""
    return int(_row(_START if before < 0 else before, token))


def _row(before: Any, token: Any) -> Any:
    return (before * 31 + token * 40503 + (token >> 6)) % CONTEXTS


def input_tokens(given: ModelInput) -> Array:
    """One number per position: the token, or a number derived from the image or audio there."""
    pieces: list[Array] = []
    for chunk in given.chunks:
        if isinstance(chunk, EncodedTextChunk):
            pieces.append(chunk.numbers.numpy().astype(np.int64))
        else:
            content = (
                chunk.location.encode()
                if chunk.type == "image_asset_pointer"
                else (chunk.dmel if chunk.type == "dmel" else chunk.data)
            )
            pieces.append(np.full(chunk.length, zlib.crc32(content), np.int64))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
