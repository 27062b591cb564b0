"""Adapters of the embedded engine and their files."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.small_models import make_model
from tinsmith.checkpoints import format as files
from tinsmith.engine.base import AdapterId, AdapterParts, AdapterSpec
from tinsmith.engine.embedded.adapter_state import (
    AdapterState,
    fresh_adapter,
    load_adapter,
    load_weights,
    save_adapter,
)
from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.families import read_architecture
from tinsmith.engine.model.load_base_model import read_config
from tinsmith.engine.model.optimizer import VectorPool
from tinsmith.errors import ValidationError
from tinsmith.types import AdamOptimizerConfig, AdamParams, DimuonOptimizerConfig, LoraConfig


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return read_architecture(read_config(folder))


def _spec(optimizer: Any = None, **lora: Any) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=AdapterId("a"),
        base_model="base",
        lora=LoraConfig(**{"rank": 4, "seed": 1, **lora}),
        optimizer=optimizer or AdamOptimizerConfig(),
    )


def _trained(shape: Architecture, spec: AdapterSpec) -> AdapterState:
    adapter = fresh_adapter(spec, shape, "cpu")
    size = adapter.layout.size
    adapter.weights = torch.randn(size)
    adapter.gradients = torch.randn(size)
    adapter.moments = {"first": torch.randn(size), "second": torch.rand(size)}
    adapter.steps = 7
    return adapter


def _is_same(one: AdapterState, other: AdapterState) -> bool:
    assert one.gradients is not None and other.gradients is not None
    return (
        torch.equal(one.weights, other.weights)
        and torch.equal(one.gradients, other.gradients)
        and one.moments.keys() == other.moments.keys()
        and all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)
        and one.steps == other.steps
    )


def test_a_saved_adapter_is_loaded_bit_for_bit(shape: Architecture, tmp_path: Path) -> None:
    """Weights, gradients, moments and the number of steps."""
    adapter = _trained(shape, _spec())
    save_adapter(adapter, tmp_path, AdapterParts.SNAPSHOT)

    found = load_adapter(_spec(), shape, tmp_path, AdapterParts.SNAPSHOT, "cpu")

    assert _is_same(found, adapter)


def test_an_adapter_without_gradients_round_trips_without_gradients(
    shape: Architecture, tmp_path: Path
) -> None:
    """None is not zeros: they would make the first step of a replay another one."""
    save_adapter(fresh_adapter(_spec(), shape, "cpu"), tmp_path, AdapterParts.SNAPSHOT)

    found = load_adapter(_spec(), shape, tmp_path, AdapterParts.SNAPSHOT, "cpu")

    assert found.gradients is None and found.moments == {} and found.steps == 0


def test_a_copy_does_not_change_with_later_steps_of_the_adapter(shape: Architecture) -> None:
    """Files are written of it while training goes on."""
    adapter = _trained(shape, _spec())
    kept, before = adapter.frozen_copy(), copy.deepcopy(adapter)
    pool = VectorPool()

    for _ in range(3):  # the later ones use again what the earlier ones left
        adapter.accumulate(torch.ones_like(adapter.weights), pool)
        adapter.accumulate(torch.ones_like(adapter.weights), pool)
        adapter.step(AdamParams(), pool)

    assert not torch.equal(kept.moments["first"], adapter.moments["first"])
    assert not torch.equal(kept.weights, adapter.weights)
    assert kept.gradients is not None and kept.steps == 7 != adapter.steps
    assert _is_same(kept, before)


def test_a_step_reports_the_norm_of_all_accumulated_gradients(shape: Architecture) -> None:
    """That of one pass is known when it ends; that of two is not the first one's."""
    adapter, pool = fresh_adapter(_spec(), shape, "cpu"), VectorPool()
    one = torch.ones_like(adapter.weights)
    norm = math.sqrt(len(one))

    adapter.accumulate(one.clone(), pool, norm=norm)
    first = adapter.step(AdamParams(), pool)
    adapter.accumulate(one.clone(), pool, norm=norm)
    adapter.accumulate(one.clone(), pool, norm=norm)
    second = adapter.step(AdamParams(), pool)
    third = adapter.step(AdamParams(), pool)

    assert first["tinsmith/grad_norm"] == norm
    assert second["tinsmith/grad_norm"] == pytest.approx(2 * norm)
    assert third["tinsmith/grad_norm"] == 0.0


def test_steps_in_reused_memory_equal_those_in_fresh_memory(
    shape: Architecture,
) -> None:
    """Nothing of what a vector held last gets into what it holds next."""
    one = _trained(shape, _spec())
    other = copy.deepcopy(one)
    pool = VectorPool()

    for number in range(4):
        for adapter, used in ((one, pool), (other, VectorPool(most_bytes=0))):
            adapter.accumulate(torch.full_like(adapter.weights, number), used)
            adapter.accumulate(torch.ones_like(adapter.weights), used)
            adapter.step(AdamParams(), used)

    for adapter in (one, other):
        adapter.accumulate(torch.ones_like(adapter.weights), VectorPool())
    assert _is_same(one, other)


def _write_foreign(
    shape: Architecture, folder: Path, layers: list[str], alpha: float
) -> AdapterState:
    """As `peft` writes adapters: with an alpha of its own, on some layers."""
    adapter = _trained(shape, _spec())
    pairs = {
        name: files.LoraPair(a.numpy(), b.numpy())
        for name, (a, b) in adapter.layout.factors(adapter.weights).items()
        if not layers or name.rpartition(".")[2] in layers
    }
    files.write_adapter(
        folder, files.StoredAdapter(base_model="", rank=4, alpha=alpha, layers=pairs)
    )
    return adapter


def test_an_adapter_with_another_alpha_is_rescaled_to_ours(
    shape: Architecture, tmp_path: Path
) -> None:
    """The product of its factors counts alpha / rank times; ours has the alpha 32."""
    theirs = _write_foreign(shape, tmp_path, [], alpha=8.0)

    ours = load_adapter(_spec(), shape, tmp_path, AdapterParts.WEIGHTS, "cpu")

    for (a, b), (a_ours, b_ours) in zip(
        theirs.layout.factors(theirs.weights).values(),
        ours.layout.factors(ours.weights).values(),
        strict=True,
    ):
        assert torch.allclose(8.0 / 4 * (b @ a), 32.0 / 4 * (b_ours @ a_ours), atol=1e-5)


def test_weights_for_only_some_layers_can_be_sampled_but_not_trained(
    shape: Architecture, tmp_path: Path
) -> None:
    """Where they have nothing the base model is as it was; a model to train has other layers."""
    theirs = _write_foreign(shape, tmp_path, ["q_proj", "v_proj"], alpha=32.0)

    layout, flat = load_weights(shape, tmp_path)

    expected = theirs.layout.factors(theirs.weights)
    for name, (a, b) in layout.factors(flat).items():
        is_there = name.endswith(("q_proj", "v_proj"))
        assert torch.equal(b @ a, expected[name][1] @ expected[name][0] if is_there else b @ a * 0)
    with pytest.raises(ValidationError, match=r"does not adapt the layer model\.layers\.0"):
        load_adapter(_spec(train_mlp=False), shape, tmp_path, AdapterParts.WEIGHTS, "cpu")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, "rank 4, but the model has rank 8"),
        ({"train_mlp": False}, r"adapts the layer model\.layers\.0\.mlp\.\w+_proj, which"),
    ],
)
def test_the_error_names_layers_that_do_not_fit(
    shape: Architecture, tmp_path: Path, lora: dict[str, Any], words: str
) -> None:
    """With what to do about it."""
    save_adapter(_trained(shape, _spec()), tmp_path, AdapterParts.WEIGHTS)

    with pytest.raises(ValidationError, match=words) as caught:
        load_adapter(_spec(**lora), shape, tmp_path, AdapterParts.WEIGHTS, "cpu")

    assert "create the model with" in str(caught.value)


@pytest.mark.parametrize(("layer", "inputs"), [(77, 48), (0, 64)])
def test_layers_of_another_model_are_rejected(
    shape: Architecture, tmp_path: Path, layer: int, inputs: int
) -> None:
    """By their name or their size; also for samples."""
    pair = files.LoraPair(np.ones((4, inputs), np.float32), np.ones((64, 4), np.float32))
    layers = {f"model.layers.{layer}.self_attn.q_proj": pair}
    files.write_adapter(
        tmp_path, files.StoredAdapter(base_model="", rank=4, alpha=32.0, layers=layers)
    )

    with pytest.raises(ValidationError, match=rf"model\.layers\.{layer}\.self_attn\.q_proj"):
        load_weights(shape, tmp_path)


def test_moments_of_another_optimizer_or_engine_are_rejected(
    shape: Architecture, tmp_path: Path
) -> None:
    """Weights alone can still be had."""
    save_adapter(_trained(shape, _spec()), tmp_path, AdapterParts.CHECKPOINT)
    dimuon = _spec(DimuonOptimizerConfig())

    with pytest.raises(ValidationError, match="'adamw'"):
        load_adapter(dimuon, shape, tmp_path, AdapterParts.CHECKPOINT, "cpu")
    state = (tmp_path / files.STATE).read_text()
    (tmp_path / files.STATE).write_text(state.replace('"embedded"', '"another"'))
    with pytest.raises(ValidationError, match="optimizer=False"):
        load_adapter(_spec(), shape, tmp_path, AdapterParts.CHECKPOINT, "cpu")

    load_adapter(dimuon, shape, tmp_path, AdapterParts.WEIGHTS, "cpu")
