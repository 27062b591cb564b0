from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.checkpoints.adapters import an_adapter, same_layers
from tinsmith.checkpoints.format import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    GRADIENTS,
    OPTIMIZER,
    STATE,
    Layout,
    StoredAdapter,
    TrainingState,
    layer_of,
    read_adapter,
    read_arrays,
    read_state,
    tensor_name,
    write_adapter,
    write_training,
)
from tinsmith.checkpoints.safetensors_file import read_header, write_tensors
from tinsmith.errors import CheckpointFormatError
from tinsmith.types.training import LoraConfig


@pytest.mark.parametrize("layout", Layout)
def test_weights_round_trip_in_both_layouts(tmp_path: Path, layout: Layout) -> None:
    adapter = an_adapter()

    write_adapter(tmp_path, adapter, layout=layout)

    read = read_adapter(tmp_path)
    assert (read.base_model, read.rank, read.alpha) == (adapter.base_model, 4, 32)
    same_layers(read, adapter)


def test_both_layouts_use_the_expected_names() -> None:
    query = "model.layers.3.self_attn.q_proj"
    for layout in Layout:
        name = f"base_model.model.{query}.lora_A.weight"
        assert tensor_name(query, "A", layout) == name
        assert layer_of(name) == (query, "A")
    names = {
        Layout.PEFT: "base_model.model.lm_head.lora_B.weight",
        Layout.TINKER: "base_model.model.model.unembed_tokens.lora_B.weight",
    }
    for layout, name in names.items():
        assert tensor_name("lm_head", "B", layout) == name
        assert layer_of(name) == ("lm_head", "B")


def test_files_have_the_names_and_fields_that_other_programs_expect(tmp_path: Path) -> None:
    write_adapter(tmp_path, an_adapter())

    config = msgspec.json.decode((tmp_path / ADAPTER_CONFIG).read_bytes())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    assert config["target_modules"] == ["gate_proj", "lm_head", "q_proj"]
    assert read_header(tmp_path / "adapter_model.safetensors").metadata == {"format": "pt"}


def test_the_trained_layers_are_inferred_from_their_names() -> None:
    config = an_adapter().lora_config()
    assert config == LoraConfig(rank=4, train_unembed=True, train_attn=True, train_mlp=True)

    layers = {"model.layers.0.self_attn.q_proj": an_adapter().layers["lm_head"]}
    config = StoredAdapter(base_model="m", rank=4, alpha=1.0, layers=layers).lora_config()
    assert config == LoraConfig(rank=4, train_unembed=False, train_attn=True, train_mlp=False)


def a_state(**fields: Any) -> TrainingState:
    given: dict[str, Any] = {
        "engine": "fake",
        "base_model": "m",
        "lora": {"rank": 4},
        "optimizer": {"type": "adamw"},
        "steps": 7,
        **fields,
    }
    return TrainingState(**given)


def test_training_state_round_trips(tmp_path: Path) -> None:
    moments = {"x.exp_avg": np.arange(3, dtype="f4")}
    state = a_state(extra={"seed": 5})

    write_training(tmp_path, state, optimizer=moments)

    assert read_state(tmp_path) == state
    found = read_arrays(tmp_path, OPTIMIZER)
    assert found is not None
    np.testing.assert_array_equal(found["x.exp_avg"], moments["x.exp_avg"])
    assert read_arrays(tmp_path, GRADIENTS) is None


def test_weights_alone_have_no_training_state(tmp_path: Path) -> None:
    write_adapter(tmp_path, an_adapter())

    assert read_state(tmp_path) is None


def test_a_state_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    write_training(tmp_path, a_state(format_version=2))

    with pytest.raises(CheckpointFormatError, match="format 2; this version of tinsmith reads 1"):
        read_state(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"steps": "x"}', b"[" * 9999])
def test_an_invalid_state_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE).write_bytes(content)

    with pytest.raises(CheckpointFormatError, match=r"state\.json cannot be read"):
        read_state(tmp_path)


def test_an_oversized_settings_file_is_not_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, an_adapter())
    (tmp_path / ADAPTER_CONFIG).write_bytes(b" " * (1 << 21))

    with pytest.raises(CheckpointFormatError, match="more than 1048576 bytes"):
        read_adapter(tmp_path)


A = np.zeros((4, 8), "f4")
B = np.zeros((6, 4), "f4")
Q = "base_model.model.q_proj"


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({}, "has no tensors"),
        ({f"{Q}.lora_A.weight": A}, "has only lora_A"),
        ({f"{Q}.lora_A.weight": A.T, f"{Q}.lora_B.weight": B}, "does not fit r = 4"),
        ({f"{Q}.lora_A.weight": A[0], f"{Q}.lora_B.weight": B}, "a matrix of floats"),
        ({f"{Q}.lora_A.weight": A.astype("i4"), f"{Q}.lora_B.weight": B}, "a matrix of floats"),
        ({f"{Q}.lora_A.weight": A[:, :0], f"{Q}.lora_B.weight": B}, "a matrix of floats"),
        ({"lm_head.weight": A}, "not a LoRA factor"),
        ({f"{Q}.lora_magnitude_vector": A}, "not a LoRA factor"),
        ({f"base_model.model.{'x' * 201}.lora_A.weight": A}, "not a LoRA factor"),
        ({"base_model.model.../x.lora_A.weight": A}, "not a LoRA factor"),
        (
            {
                "base_model.model.lm_head.lora_A.weight": A,
                "base_model.model.model.unembed_tokens.lora_A.weight": A,
            },
            "appears twice",
        ),
    ],
)
def test_tensors_that_are_not_an_adapter_are_rejected(
    tmp_path: Path, arrays: dict[str, Any], why: str
) -> None:
    write_tensors(tmp_path / ADAPTER_MODEL, arrays)
    (tmp_path / ADAPTER_CONFIG).write_text('{"r": 4, "lora_alpha": 8}')

    with pytest.raises(CheckpointFormatError, match=why):
        read_adapter(tmp_path)


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path)
    (tmp_path / ADAPTER_CONFIG).write_text('{"r": 4, "lora_alpha": 8}')
    with pytest.raises(CheckpointFormatError, match=r"adapter_model\.safetensors is missing"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("rank", [0, -1, 4097, 10**30])
def test_ranks_out_of_bounds_are_rejected(tmp_path: Path, rank: int) -> None:
    write_adapter(tmp_path, an_adapter())
    (tmp_path / ADAPTER_CONFIG).write_text(f'{{"r": {rank}, "lora_alpha": 8}}')

    with pytest.raises(CheckpointFormatError):
        read_adapter(tmp_path)


@pytest.mark.parametrize("missing", [ADAPTER_CONFIG, ADAPTER_MODEL])
def test_the_error_names_a_missing_file_without_its_folder(tmp_path: Path, missing: str) -> None:
    """The folder is one of the server, and tenants are told the error."""
    write_adapter(tmp_path, an_adapter())
    (tmp_path / missing).unlink()

    with pytest.raises(CheckpointFormatError, match=missing) as caught:
        read_adapter(tmp_path)

    assert str(tmp_path) not in str(caught.value)
