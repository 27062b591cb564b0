"""Replicas as operators write them."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.engine.embedded.embedded_settings import EmbeddedSettings
from tinsmith.engine.fleet.replica_settings import (
    ReplicaSettings,
    as_text,
    read_replica,
    replica_specs,
)
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.errors import ValidationError

MODELS = (
    ModelSource("a", "path-a"),
    ModelSource("alias", "path-a", "a"),
    ModelSource("b", "path-b"),
)
ENGINE = EngineSpec(engine="fake", models=MODELS, settings=EmbeddedSettings(threads=4))


def _specs(*texts: str, gpus: int = 0) -> list[Any]:
    return replica_specs([read_replica(one) for one in texts], ENGINE, count_devices=lambda: gpus)


def test_text_and_table_mean_the_same() -> None:
    table = {
        "count": 2,
        "duty": "train",
        "device": "cuda:1",
        "threads": 3,
        "adapter_gib": 1.5,
        "models": ["a", "b"],
    }
    text = "count=2, duty=train,device=cuda:1,threads=3,adapter_gib=1.5,model=a,model=b"

    assert read_replica(text) == read_replica(table)
    assert read_replica(as_text(read_replica(text))) == read_replica(text)
    assert read_replica(as_text(read_replica("name=x"))) == ReplicaSettings(name="x")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("count", "'count' has no value"),
        ("count=0", "count is 0"),
        ("count=two", "count"),
        ("duty=play", "duty"),
        ("device=gpu", "'gpu' is not a device"),
        ("device=cuda:x", "is not a device"),
        ("thread=1", "did you mean threads"),
        ("adapter_gib=-1", "adapter_gib is -1"),
        ("threads=1,threads=2", "threads is given twice"),
        ("name=a/b", "is not a name"),
        ("device=cuda:*,count=2", "the GPUs decide"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        read_replica(text)


def test_one_line_starts_one_replica_per_gpu() -> None:
    specs = _specs("device=cuda:*", gpus=3)

    assert [one.name for one in specs] == ["replica-0", "replica-1", "replica-2"]
    assert [one.engine.settings.device for one in specs] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ValidationError, match="finds no GPU"):
        _specs("device=cuda:*")


def test_a_replica_serves_the_models_it_is_given_with_their_aliases() -> None:
    first, second, third = _specs(
        "name=x,model=a,duty=train", "count=2,name=y,threads=2,adapter_gib=0.5"
    )

    assert [one.name for one in first.engine.models] == ["a", "alias"]
    assert second.engine.models == MODELS
    assert [one.name for one in (first, second, third)] == ["x", "y-0", "y-1"]
    assert (first.engine.settings.adapter_bytes, third.engine.settings.adapter_bytes) == (
        0,
        1 << 29,
    )
    assert (first.engine.settings.threads, third.engine.settings.threads) == (4, 2)
    assert (first.trains, first.draws, third.draws) == (True, False, True)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["model=a"], "no replica serves the model b"),
        (["model=c"], "'c' is not served"),
        (["name=x", "name=x"], "two replicas are named x"),
    ],
)
def test_replicas_that_do_not_fit_together_are_refused(texts: list[str], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        _specs(*texts)
