"""Arithmetic that stands for a network: a table of logits that an adapter's weights are added to.

Tokens are folded into `CLASSES` classes, and what a token follows, itself and the one before it,
into `CONTEXTS` rows. With the base table T, which the model's name determines, and for each trained
part of the adapter its matrices A (rank × contexts) and B (classes × rank),

    logits = T + Σ ALPHA / rank · (B·A)ᵀ
    p(token | context) = softmax(logits[context])[class of token] / (tokens of that class)

so that the probabilities of the whole vocabulary add up to 1. The end-of-sequence token has a class
of its own, and is drawn about once in `CLASSES` tokens.

Weights, moments and gradients are float32, as they are saved; what is computed from them is
float64. Knows nothing of requests.
"""

# C context, K class, R rank, N position

from __future__ import annotations

import hashlib
import math
import zlib
from typing import Any, TypeAlias

import numpy as np

from tinsmith.model.architecture import ALPHA
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.training import LoraConfig

CONTEXTS = 64
CLASSES = 64
EOS = 0
_START = 7
"""Stands for the token before the first."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Tensors: TypeAlias = dict[str, Array]

_LAYER = "model.layers.0."
_OUTPUT = "lm_head"


class Vocabulary:
    """How token ids are folded into classes."""

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
        """The token at a place of a class."""
        return EOS if class_id == 0 else place * (CLASSES - 1) + class_id

    def logprobs(self, table_CK: Array, rows: Array, tokens: Array) -> Array:
        """The log-probability of each token after its context, rounded as it is answered."""
        classes = self.classes(tokens)
        found = table_CK[rows, classes] - self.log_sizes_K[classes]
        return found.astype(np.float32)


def base_table(name: str) -> Array:
    """The logits of a base model, which its name determines."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng(list(digest[:16])).normal(size=(CONTEXTS, CLASSES))


def fresh_weights(lora: LoraConfig, seed: str) -> Tensors:
    """Weights that change nothing yet: each A is random, each B is 0."""
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
    """The layers that an adapter has matrices for, called as in models of the usual build."""
    parts = {
        f"{_LAYER}self_attn.q_proj": lora.train_attn,
        f"{_LAYER}mlp.gate_proj": lora.train_mlp,
        _OUTPUT: lora.train_unembed,
    }
    return [part for part, is_trained in parts.items() if is_trained]


def log_table(base_CK: Array, weights: Tensors) -> Array:
    """The log-probability of each class after each context."""
    logits_CK: Array = base_CK.copy()
    for name, a_RC in weights.items():
        if name.endswith(".A"):
            b_KR = weights[_partner(name)].astype(np.float64)
            logits_CK += (ALPHA / len(a_RC)) * (b_KR @ a_RC.astype(np.float64)).T
    logits_CK -= logits_CK.max(axis=1, keepdims=True)
    logits_CK -= np.log(np.exp(logits_CK).sum(axis=1, keepdims=True))
    return logits_CK


def gradients(weights: Tensors, table_CK: Array, slopes_CK: Array) -> Tensors:
    """The gradient of each matrix, from how the loss changes with each log-probability."""
    dlogits_CK = slopes_CK - np.exp(table_CK) * slopes_CK.sum(axis=1, keepdims=True)
    made: Tensors = {}
    for name, a_RC in weights.items():
        if name.endswith(".A"):
            scale = ALPHA / len(a_RC)
            b_KR = weights[_partner(name)].astype(np.float64)
            made[name] = (scale * (dlogits_CK @ b_KR).T).astype(np.float32)
            made[_partner(name)] = (scale * (a_RC.astype(np.float64) @ dlogits_CK).T).astype(
                np.float32
            )
    return made


def slopes_table(rows: Array, classes: Array, slopes: Array) -> Array:
    """Slopes by position, added up by context and class."""
    flat: Array = np.bincount(
        rows * CLASSES + classes, weights=slopes, minlength=CONTEXTS * CLASSES
    )
    return flat.reshape(CONTEXTS, CLASSES)


def context_rows(tokens: Array) -> Array:
    """The row of each position: it depends on the token that stands there and the one before."""
    before = np.concatenate(([_START], tokens[:-1]))
    rows: Array = _row(before, tokens)
    return rows


def next_row(before: int, token: int) -> int:
    """As `context_rows`, for one position; `before` may be -1 for none."""
    return int(_row(_START if before < 0 else before, token))


def _row(before: Any, token: Any) -> Any:
    return (before * 31 + token * 40503 + (token >> 6)) % CONTEXTS


def _partner(name_of_a: str) -> str:
    return name_of_a.removesuffix("A") + "B"


def input_tokens(given: ModelInput) -> Array:
    """One number for each position: a token, or for an image or audio one that stands for it."""
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
