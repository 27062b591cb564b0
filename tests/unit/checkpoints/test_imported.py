from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.unit.checkpoints.adapters import an_adapter, same_layers
from tinsmith.checkpoints.format import ADAPTER_CONFIG, ADAPTER_MODEL, read_adapter, write_adapter
from tinsmith.checkpoints.imported import import_adapter
from tinsmith.checkpoints.safetensors_file import read_tensors, write_tensors
from tinsmith.errors import CheckpointFormatError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_adapter(folder, an_adapter())
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def change_settings(source: Path, **fields: Any) -> None:
    config = msgspec.json.decode((source / ADAPTER_CONFIG).read_bytes())
    (source / ADAPTER_CONFIG).write_bytes(msgspec.json.encode({**config, **fields}))


def test_an_imported_adapter_is_written_in_our_format(source: Path, target: Path) -> None:
    (source / "README.md").write_text("not taken")

    adapter = import_adapter(source, target, base_model="our-name")

    assert {file.name for file in target.iterdir()} == {ADAPTER_CONFIG, ADAPTER_MODEL}
    read = read_adapter(target)
    assert read.base_model == adapter.base_model == "our-name"
    same_layers(read, an_adapter())


def test_the_frozen_output_layer_that_peft_also_saves_is_left_out(
    source: Path, target: Path
) -> None:
    tensors = {
        name: torch.from_numpy(a) for name, a in read_tensors(source / ADAPTER_MODEL).items()
    }
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.ones(8, 4)
    safetensors.torch.save_file(tensors, source / ADAPTER_MODEL)

    import_adapter(source, target)

    same_layers(read_adapter(target), an_adapter())


def test_half_precision_becomes_float32(source: Path, target: Path) -> None:
    kinds = [torch.bfloat16, torch.float16, torch.float64]
    tensors = {
        name: torch.from_numpy(array).to(kinds[place % 3])
        for place, (name, array) in enumerate(read_tensors(source / ADAPTER_MODEL).items())
    }
    safetensors.torch.save_file(tensors, source / ADAPTER_MODEL)

    import_adapter(source, target)

    read = read_tensors(target / ADAPTER_MODEL)
    for name, tensor in tensors.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], tensor.float().numpy())


def test_rank_stabilized_lora_keeps_its_scale(source: Path, target: Path) -> None:
    change_settings(source, use_rslora=True, r=4, lora_alpha=8)

    adapter = import_adapter(source, target)

    assert adapter.alpha / adapter.rank == 8 / np.sqrt(4)
    assert read_adapter(target).alpha == adapter.alpha


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"peft_type": {"deep": []}},
        {"task_type": "SEQ_CLS"},
        {"bias": "all"},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"modules_to_save": ["embed_tokens"]},
        {"fan_in_fan_out": True},
        {"lora_alpha": "8"},
        {"r": 8},
        {"r": 10**9},
        {"base_model_name_or_path": None},
    ],
)
def test_adapters_with_unsupported_peft_settings_are_rejected(
    source: Path, target: Path, fields: dict[str, Any]
) -> None:
    change_settings(source, **fields)

    with pytest.raises(CheckpointFormatError):
        import_adapter(source, target)

    assert list(target.iterdir()) == []


class Bomb:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_pickles_are_rejected_without_being_read(source: Path, target: Path, name: str) -> None:
    (source / ADAPTER_MODEL).unlink()
    (source / name).write_bytes(pickle.dumps(Bomb()))

    remedy = "save_pretrained" if name.endswith("bin") else "not a valid safetensors file"
    with pytest.raises(CheckpointFormatError, match=remedy):
        import_adapter(source, target)


def test_weights_that_are_too_large_or_not_finite_are_rejected(source: Path, target: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="the maximum is 100"):
        import_adapter(source, target, max_bytes=100)
    arrays = read_tensors(source / ADAPTER_MODEL)
    first = next(iter(arrays))
    for value in (np.nan, np.inf, 1e300):
        arrays[first] = np.full(arrays[first].shape, value, np.float64)
        (source / ADAPTER_MODEL).unlink()
        write_tensors(source / ADAPTER_MODEL, arrays)
        with pytest.raises(CheckpointFormatError, match="NaN or infinity"):
            import_adapter(source, target)


def test_an_import_that_is_not_an_adapter_is_rejected(tmp_path: Path, target: Path) -> None:
    (tmp_path / "file").touch()
    for source in (tmp_path / "missing", tmp_path / "file", target):
        with pytest.raises(CheckpointFormatError):
            import_adapter(source, target)
