"""Where adapters and samples go."""

from __future__ import annotations

import itertools

from tinsmith.engine.base import AdapterId, AdapterSpec, BaseModel
from tinsmith.engine.fleet.placement import (
    AFFINITY_SLACK,
    SPREAD_SAMPLES,
    ReplicaView,
    place_adapter,
    place_sample,
    spread_weights,
    training_bytes,
)
from tinsmith.types import AdamOptimizerConfig, LoraConfig

BASE, OTHER = "base", "other"
BOTH = frozenset({BASE, OTHER})


def _view(name: str, **known: object) -> ReplicaView:
    return ReplicaView(name=name, **{"serves": BOTH, **known})  # type: ignore[arg-type]


def _most_rank(ranks: list[int], *, is_round_robin: bool) -> int:
    """The ranks on the fullest of two replicas, after adapters of these ranks were placed."""
    held, turns = {"a": 0, "b": 0}, itertools.cycle("ab")
    for rank in ranks:
        views = [_view(name, held_bytes=sum_) for name, sum_ in held.items()]
        chosen = next(turns) if is_round_robin else place_adapter(views, BASE)
        assert chosen is not None
        held[chosen] += rank
    return max(held.values())


def test_large_and_small_adapters_in_turn_are_balanced_where_round_robin_is_not() -> None:
    """Two tenants in turn, one with rank 64 and one with rank 1."""
    ranks = [64, 1] * 4

    assert _most_rank(ranks, is_round_robin=True) == 256
    assert _most_rank(ranks, is_round_robin=False) <= 132


def test_an_adapter_goes_where_it_fits_although_another_replica_has_more_slots() -> None:
    """Slots alone would choose the first, in whose memory there is no room for it."""
    slots = [_view("a", room=60), _view("b", room=1, load=0.9)]
    known = [_view("a", room=60, free_bytes=99), _view("b", room=1, load=0.9, free_bytes=100)]

    assert place_adapter(slots, BASE, 100) == "a"
    assert place_adapter(known, BASE, 100) == "b"
    assert place_adapter(known, BASE, 101) is None


def test_the_memory_of_an_adapter_follows_from_its_rank_and_the_layers_that_it_trains() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": (8, 4),
        "model.layers.0.mlp.up_proj": (16, 4),
        "lm_head": (100, 4),
    }

    def size(rank: int, **trained: bool) -> int:
        model = BaseModel(name=BASE, vocabulary=100, max_context=9, layers=layers)
        spec = AdapterSpec(
            adapter_id=AdapterId("a"),
            base_model=BASE,
            lora=LoraConfig(rank=rank, **trained),
            optimizer=AdamOptimizerConfig(),
        )
        return training_bytes(spec, model)

    assert size(1) == (12 + 20 + 104) * 20
    assert size(3) == 3 * size(1)
    assert size(1, train_unembed=False, train_mlp=False) == 12 * 20


def test_an_adapter_goes_to_the_replica_with_least_to_do() -> None:
    """However few adapters the busy one has; small differences in load count for nothing."""
    busy, idle = _view("a", load=0.9), _view("b", load=0.1, held_bytes=100)

    assert place_adapter([busy, idle], BASE) == "b"
    assert place_adapter([_view("a", load=0.1), idle], BASE) == "a"


def test_only_replicas_that_train_the_base_model_and_have_room_are_chosen() -> None:
    views = [
        _view("full", room=0),
        _view("sampler", trains=False),
        _view("other", serves=frozenset({OTHER})),
        _view("good", load=1.0, held_bytes=10_000),
    ]

    assert place_adapter(views, BASE) == "good"
    assert place_adapter(views[:3], BASE) is None


def test_replicas_that_serve_little_are_filled_before_those_that_serve_much() -> None:
    """So that there is room for what only the latter serve."""
    views = [_view("a"), _view("b", serves=frozenset({BASE}))]

    assert place_adapter(views, BASE) == "b"
    assert place_adapter(views, OTHER) == "a"


def test_a_prompt_goes_where_its_beginning_was_drawn_last_unless_that_is_overloaded() -> None:
    views = [_view("a", samples=AFFINITY_SLACK), _view("b")]
    overloaded = [_view("a", samples=AFFINITY_SLACK + 1), _view("b")]

    assert place_sample(views, BASE, last="a") == "a"
    assert place_sample(overloaded, BASE, last="a") == "b"
    assert place_sample(views, BASE, last="gone") == "b"


def test_a_sample_goes_to_a_replica_that_has_its_weights() -> None:
    views = [_view("a", samples=5), _view("b"), _view("t", draws=False)]

    assert place_sample(views, BASE, holders={"a"}) == "a"
    assert place_sample(views, BASE, holders=set()) is None
    assert place_sample(views, "nothing") is None
    assert place_sample(views, BASE) == "b"


def test_weights_are_spread_once_all_their_holders_are_busy() -> None:
    """To the idlest replica that lacks them, and not before demand asks for it."""
    busy, idle = SPREAD_SAMPLES + 1, 1
    views = [_view("a", samples=busy), _view("b", samples=3), _view("c", samples=idle)]

    assert spread_weights(views, BASE, {"a"}) == "c"
    assert spread_weights(views, BASE, {"a", "b"}) is None
    assert spread_weights(views, BASE, {"a", "b", "c"}) is None
