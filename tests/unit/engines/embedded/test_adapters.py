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
from tinsmith.engines.base import AdapterId, AdapterSpec, Saved
from tinsmith.engines.embedded.adapters import (
    Adapter,
    fresh_adapter,
    load_adapter,
    load_weights,
    save_adapter,
)
from tinsmith.errors import ValidationError
from tinsmith.model.architecture import Architecture
from tinsmith.model.families import read_architecture
from tinsmith.model.load_weights import read_config
from tinsmith.model.spare_vectors import SpareVectors
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


def _trained(shape: Architecture, spec: AdapterSpec) -> Adapter:
    adapter = fresh_adapter(spec, shape, "cpu")
    size = adapter.layout.size
    adapter.weights = torch.randn(size)
    adapter.gradients = torch.randn(size)
    adapter.moments = {"first": torch.randn(size), "second": torch.rand(size)}
    adapter.steps = 7
    return adapter


def _is_same(one: Adapter, other: Adapter) -> bool:
    assert one.gradients is not None and other.gradients is not None
    return (
        torch.equal(one.weights, other.weights)
        and torch.equal(one.gradients, other.gradients)
        and one.moments.keys() == other.moments.keys()
        and all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)
        and one.steps == other.steps
    )


def test_what_is_saved_is_loaded_bit_for_bit(shape: Architecture, tmp_path: Path) -> None:
    """Weights, gradients, moments and the number of steps."""
    adapter = _trained(shape, _spec())
    save_adapter(adapter, tmp_path, Saved.SNAPSHOT)

    found = load_adapter(_spec(), shape, tmp_path, Saved.SNAPSHOT, "cpu")

    assert _is_same(found, adapter)


def test_an_adapter_that_has_gathered_nothing_has_nothing_again(
    shape: Architecture, tmp_path: Path
) -> None:
    """None is not zeros: they would make the first step of a replay another one."""
    save_adapter(fresh_adapter(_spec(), shape, "cpu"), tmp_path, Saved.SNAPSHOT)

    found = load_adapter(_spec(), shape, tmp_path, Saved.SNAPSHOT, "cpu")

    assert found.gradients is None and found.moments == {} and found.steps == 0


def test_a_copy_does_not_move_with_the_steps_of_the_adapter(shape: Architecture) -> None:
    """Files are written of it while training goes on."""
    adapter = _trained(shape, _spec())
    kept, before = adapter.as_it_is(), copy.deepcopy(adapter)
    spares = SpareVectors()

    for _ in range(3):  # the later ones use again what the earlier ones left
        adapter.gather(torch.ones_like(adapter.weights), spares)
        adapter.gather(torch.ones_like(adapter.weights), spares)
        adapter.step(AdamParams(), spares)

    assert not torch.equal(kept.moments["first"], adapter.moments["first"])
    assert not torch.equal(kept.weights, adapter.weights)
    assert kept.gradients is not None and kept.steps == 7 != adapter.steps
    assert _is_same(kept, before)


def test_a_step_tells_the_norm_of_all_that_was_gathered(shape: Architecture) -> None:
    """That of one pass is known when it ends; that of two is not the first one's."""
    adapter, spares = fresh_adapter(_spec(), shape, "cpu"), SpareVectors()
    one = torch.ones_like(adapter.weights)
    norm = math.sqrt(len(one))

    adapter.gather(one.clone(), spares, norm=norm)
    first = adapter.step(AdamParams(), spares)
    adapter.gather(one.clone(), spares, norm=norm)
    adapter.gather(one.clone(), spares, norm=norm)
    second = adapter.step(AdamParams(), spares)
    third = adapter.step(AdamParams(), spares)

    assert first["tinsmith/grad_norm"] == norm
    assert second["tinsmith/grad_norm"] == pytest.approx(2 * norm)
    assert third["tinsmith/grad_norm"] == 0.0


def test_steps_in_memory_that_was_used_before_are_those_in_fresh_memory(
    shape: Architecture,
) -> None:
    """Nothing of what a vector held last gets into what it holds next."""
    one = _trained(shape, _spec())
    other = copy.deepcopy(one)
    spares = SpareVectors()

    for number in range(4):
        for adapter, used in ((one, spares), (other, SpareVectors(most_bytes=0))):
            adapter.gather(torch.full_like(adapter.weights, number), used)
            adapter.gather(torch.ones_like(adapter.weights), used)
            adapter.step(AdamParams(), used)

    for adapter in (one, other):
        adapter.gather(torch.ones_like(adapter.weights), SpareVectors())
    assert _is_same(one, other)


def _write_foreign(shape: Architecture, folder: Path, layers: list[str], alpha: float) -> Adapter:
    """As `peft` writes adapters: with an alpha of its own, on some layers."""
    adapter = _trained(shape, _spec())
    pairs = {
        name: files.LoraPair(a.numpy(), b.numpy())
        for name, (a, b) in adapter.layout.factors(adapter.weights).items()
        if not layers or name.rpartition(".")[2] in layers
    }
    files.write_adapter(folder, files.Adapter(base_model="", rank=4, alpha=alpha, layers=pairs))
    return adapter


def test_an_adapter_of_another_alpha_does_the_same_with_ours(
    shape: Architecture, tmp_path: Path
) -> None:
    """The product of its factors counts alpha / rank times; ours has the alpha 32."""
    theirs = _write_foreign(shape, tmp_path, [], alpha=8.0)

    ours = load_adapter(_spec(), shape, tmp_path, Saved.WEIGHTS, "cpu")

    for (a, b), (a_ours, b_ours) in zip(
        theirs.layout.factors(theirs.weights).values(),
        ours.layout.factors(ours.weights).values(),
        strict=True,
    ):
        assert torch.allclose(8.0 / 4 * (b @ a), 32.0 / 4 * (b_ours @ a_ours), atol=1e-5)


def test_weights_on_some_layers_are_sampled_from_and_not_trained_on(
    shape: Architecture, tmp_path: Path
) -> None:
    """Where they have nothing the base model is as it was; a model to train has other layers."""
    theirs = _write_foreign(shape, tmp_path, ["q_proj", "v_proj"], alpha=32.0)

    layout, flat = load_weights(shape, tmp_path)

    expected = theirs.layout.factors(theirs.weights)
    for name, (a, b) in layout.factors(flat).items():
        is_there = name.endswith(("q_proj", "v_proj"))
        assert torch.equal(b @ a, expected[name][1] @ expected[name][0] if is_there else b @ a * 0)
    with pytest.raises(ValidationError, match=r"does not train the layer model\.layers\.0"):
        load_adapter(_spec(train_mlp=False), shape, tmp_path, Saved.WEIGHTS, "cpu")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, "the rank 4, the model 8"),
        ({"train_mlp": False}, r"trains the layer model\.layers\.0\.mlp\.\w+_proj, which"),
    ],
)
def test_layers_that_do_not_fit_are_named(
    shape: Architecture, tmp_path: Path, lora: dict[str, Any], words: str
) -> None:
    """With what to do about it."""
    save_adapter(_trained(shape, _spec()), tmp_path, Saved.WEIGHTS)

    with pytest.raises(ValidationError, match=words) as caught:
        load_adapter(_spec(**lora), shape, tmp_path, Saved.WEIGHTS, "cpu")

    assert "make the model with" in str(caught.value)


@pytest.mark.parametrize(("layer", "inputs"), [(77, 48), (0, 64)])
def test_layers_of_another_model_are_refused(
    shape: Architecture, tmp_path: Path, layer: int, inputs: int
) -> None:
    """By their name or their size; also for samples."""
    pair = files.LoraPair(np.ones((4, inputs), np.float32), np.ones((64, 4), np.float32))
    layers = {f"model.layers.{layer}.self_attn.q_proj": pair}
    files.write_adapter(tmp_path, files.Adapter(base_model="", rank=4, alpha=32.0, layers=layers))

    with pytest.raises(ValidationError, match=rf"model\.layers\.{layer}\.self_attn\.q_proj"):
        load_weights(shape, tmp_path)


def test_moments_of_another_optimizer_or_engine_are_refused(
    shape: Architecture, tmp_path: Path
) -> None:
    """Weights alone can still be had."""
    save_adapter(_trained(shape, _spec()), tmp_path, Saved.CHECKPOINT)
    dimuon = _spec(DimuonOptimizerConfig())

    with pytest.raises(ValidationError, match="'adamw'"):
        load_adapter(dimuon, shape, tmp_path, Saved.CHECKPOINT, "cpu")
    state = (tmp_path / files.STATE).read_text()
    (tmp_path / files.STATE).write_text(state.replace('"embedded"', '"another"'))
    with pytest.raises(ValidationError, match="optimizer=False"):
        load_adapter(_spec(), shape, tmp_path, Saved.CHECKPOINT, "cpu")

    load_adapter(dimuon, shape, tmp_path, Saved.WEIGHTS, "cpu")
