"""Where adapters and samples go. Pure functions over what is known of each replica.

An adapter goes to the replica with the least to do among those that train its base model and have
room: a free slot, and memory for the adapter if the replica knows what it has. Replicas that are
about equally busy are told apart by the memory that their adapters take; of equals, the one that
serves fewest models is taken, so that those that could take anything stay free.

A sample goes where a prompt with the same beginning was drawn last, because its keys and values may
be cached there, unless that replica has far more samples than another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tinsmith.checkpoints.format import lora_config_of
from tinsmith.engine.base import AdapterSpec, BaseModel

LOAD_STEPS = 5
"""Loads are compared in steps of a fifth: a few percent are chance."""
AFFINITY_SLACK = 8
"""How many samples more than the idlest replica one may have and still be chosen for its cache."""
SPREAD_SAMPLES = 4
"""How many samples more than another replica all holders of weights have before it gets them."""
PARAMETER_BYTES = 5 * 4
"""Of a parameter under training, in float32: weight, accumulated gradient, two moments, and the
gradient of the running pass."""
RANK_PARAMETERS = 1 << 20
"""Parameters per rank where an engine does not tell the layers of its models; about those of a
model with a billion parameters."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """What placement knows of a replica that is running and not being drained."""

    name: str
    serves: frozenset[str]
    trains: bool = True
    draws: bool = True
    """Whether it draws samples."""
    room: int = 1
    """How many more adapters it may hold."""
    held_bytes: int = 0
    """What its adapters take, those on their way there included."""
    free_bytes: int | None = None
    """Memory for more adapters; None if it is not known."""
    load: float = 0.0
    """The share of the last minute in which it was computing."""
    samples: int = 0


def training_bytes(spec: AdapterSpec, model: BaseModel) -> int:
    """The memory that an adapter takes while it is trained, estimated from its rank and layers."""
    rank, lora = spec.lora.rank, spec.lora
    if not model.layers:
        return rank * RANK_PARAMETERS * PARAMETER_BYTES
    parameters = 0
    for name, (outputs, inputs) in model.layers.items():
        kind = lora_config_of(rank, {name})
        if (
            (kind.train_attn and lora.train_attn)
            or (kind.train_mlp and lora.train_mlp)
            or (kind.train_unembed and lora.train_unembed)
        ):
            parameters += rank * (outputs + inputs)
    return parameters * PARAMETER_BYTES


def place_adapter(
    replicas: Sequence[ReplicaView], base_model: str, size_bytes: int = 0
) -> str | None:
    """The replica for an adapter that takes so much memory; None if none has room."""
    fitting = [
        one
        for one in replicas
        if one.trains
        and base_model in one.serves
        and one.room > 0
        and (one.free_bytes is None or size_bytes <= one.free_bytes)
    ]
    return min(fitting, key=_placement_order).name if fitting else None


def _placement_order(one: ReplicaView) -> tuple[int, int, int, str]:
    return round(one.load * LOAD_STEPS), one.held_bytes, len(one.serves), one.name


def place_sample(
    replicas: Sequence[ReplicaView],
    base_model: str,
    *,
    holders: Collection[str] | None = None,
    last: str | None = None,
) -> str | None:
    """The replica for a sample; None if none can draw it.

    Args:
        replicas: All that are running.
        base_model: What the sample is drawn from.
        holders: Those that have its weights; None if it needs none.
        last: The one that last drew a prompt with the same beginning.
    """
    fitting = {
        one.name: one
        for one in replicas
        if one.draws and base_model in one.serves and (holders is None or one.name in holders)
    }
    if not fitting:
        return None
    idlest = min(fitting.values(), key=_sample_order)
    liked = fitting.get(last or "")
    if liked is not None and liked.samples <= idlest.samples + AFFINITY_SLACK:
        return liked.name
    return idlest.name


def spread_weights(
    replicas: Sequence[ReplicaView], base_model: str, holders: Collection[str]
) -> str | None:
    """The replica that should get sampler weights too, because those that have them are busy."""
    fitting = [one for one in replicas if one.draws and base_model in one.serves]
    having = [one for one in fitting if one.name in holders]
    lacking = [one for one in fitting if one.name not in holders]
    if not having or not lacking:
        return None
    idlest = min(lacking, key=_sample_order)
    least = min(one.samples for one in having)
    return idlest.name if least >= idlest.samples + SPREAD_SAMPLES else None


def _sample_order(one: ReplicaView) -> tuple[int, int, str]:
    return one.samples, round(one.load * LOAD_STEPS), one.name
