"""Which files a checkpoint has, and how weights are written to them and read from them.

    adapter_config.json          weights, as `peft` and vLLM load them
    adapter_model.safetensors
    state.json                   a training checkpoint has these too: what made it, how far it is
    optimizer.safetensors        the optimizer's moments, under names that are the engine's own
    gradients.safetensors        what is gathered for the next step; in snapshots, if there is any

Weights are held as `LoraPair`s by the base model's own name of each linear layer, such as
`model.layers.0.self_attn.q_proj`; the output layer is `lm_head`. In files the names differ by
`Layout`. On disk it is always PEFT's; archives are given out in Tinker's (`archive.py`).

Arrays are numpy's, which is loaded when they are read or written. Knows nothing of stores.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from tinsmith.checkpoints.disk import disk_errors
from tinsmith.checkpoints.safetensors_file import read_tensors, write_tensors
from tinsmith.errors import CheckpointFormatError, shown
from tinsmith.types.training import LoraConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tinsmith.checkpoints.safetensors_file import Array

    Weights = NDArray[np.floating[Any]]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"

STATE_VERSION = 1
OUTPUT_LAYER = "lm_head"
FULL_OUTPUT_LAYER = f"base_model.model.{OUTPUT_LAYER}.weight"
"""The output layer as a matrix, its adapter folded in; beside the factors (`output_layer.py`)."""
TIED = {"base_model_embeddings": "tied"}
"""In the metadata of weights whose base model has its embedding as output layer."""
RANK_MAX = 4096
_JSON_BYTES_MAX = 1 << 20
_MODULE = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_MODULE_MAX = 200
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "c_attn"})

Factor = Literal["A", "B"]
T = TypeVar("T")


class LoraPair(NamedTuple):
    """The two factors of one layer: it gives `x @ W.T + alpha / rank * (x @ a.T) @ b.T`."""

    a: Weights
    """Rank × inputs."""
    b: Weights
    """Outputs × rank."""


class StoredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA weights with what is needed to use them."""

    base_model: str
    rank: int
    alpha: float
    """The product of the factors counts `alpha / rank` times."""
    layers: dict[str, LoraPair]
    """By the name of the layer in the base model."""

    def lora_config(self) -> LoraConfig:
        """Which layers it trains, in the words of the API, as far as their names tell."""
        return lora_config_of(self.rank, self.layers.keys())


def lora_config_of(rank: int, modules: Collection[str]) -> LoraConfig:
    """Which layers an adapter trains, in the words of the API, as far as their names tell."""
    attention = {module for module in modules if _is_attention(module)}
    return LoraConfig(
        rank=rank,
        train_unembed=OUTPUT_LAYER in modules,
        train_attn=bool(attention),
        train_mlp=bool(set(modules) - attention - {OUTPUT_LAYER}),
    )


def _is_attention(module: str) -> bool:
    place, _, kind = module.rpartition(".")
    owner = place.rpartition(".")[2]
    return kind in _ATTENTION or "attn" in owner or "attention" in owner


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """What a training checkpoint or a snapshot knows besides its arrays."""

    engine: str
    """The name of the engine that wrote it, which alone may understand the moments."""
    base_model: str
    lora: dict[str, Any]
    """The `LoraConfig` of the adapter, in its plain form."""
    optimizer: dict[str, Any]
    """The `OptimizerConfig`, in its plain form."""
    steps: int
    """How many steps the optimizer made."""
    extra: dict[str, Any] = {}
    """What the engine wants to know again. JSON."""
    format_version: int = STATE_VERSION


class Layout(enum.Enum):
    """How tensors are called in a file of weights. They differ in the output layer."""

    PEFT = "peft"
    """As `peft` and vLLM load them: `base_model.model.lm_head.…`."""
    TINKER = "tinker"
    """As tools for Tinker's archives read them: `base_model.model.model.unembed_tokens.…`."""


_OUTPUT_NAMES = {Layout.PEFT: OUTPUT_LAYER, Layout.TINKER: "model.unembed_tokens"}


def tensor_name(module: str, factor: Factor, layout: Layout) -> str:
    """What a layer's factor is called in a file."""
    name = _OUTPUT_NAMES[layout] if module == OUTPUT_LAYER else module
    return f"base_model.model.{name}.lora_{factor}.weight"


def layer_of(name: str) -> tuple[str, Factor]:
    """The layer and the factor that a tensor of either layout is.

    Raises:
        CheckpointFormatError: It is not a LoRA factor of a linear layer.
    """
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", name)
    if not found or len(found[1]) > _MODULE_MAX or not _MODULE.fullmatch(found[1]):
        raise CheckpointFormatError(
            f"tensor {shown(name, 120)} is not a LoRA factor of a linear layer",
            remedy="only plain LoRA is supported: names end in lora_A.weight and lora_B.weight",
        )
    factor: Factor = "A" if found[2] == "A" else "B"
    return (OUTPUT_LAYER if found[1] in _OUTPUT_NAMES.values() else found[1]), factor


def name_in(layout: Layout, name: str) -> str:
    """What a tensor of either layout is called in this one; an engine's own keeps its name."""
    try:
        return tensor_name(*layer_of(name), layout)
    except CheckpointFormatError:
        return name


def write_adapter(
    folder: Path,
    adapter: StoredAdapter,
    *,
    layout: Layout = Layout.PEFT,
    ties_embeddings: bool = False,
) -> None:
    """Write weights into a folder that has none.

    Args:
        folder: Where the files go.
        adapter: The weights.
        layout: The names of tensors in the file.
        ties_embeddings: Whether the base model's output layer is its embedding. The file says so
            in its metadata, because `peft` merges an adapter of such a layer wrongly.

    Raises:
        StorageFullError: The disk is full.
        CheckpointUnavailableError: It cannot be written to for another reason.
    """
    arrays: dict[str, Array] = {}
    for module, pair in adapter.layers.items():
        arrays[tensor_name(module, "A", layout)] = pair.a
        arrays[tensor_name(module, "B", layout)] = pair.b
    with disk_errors(f"weights cannot be written to {folder}"):
        metadata = {"format": "pt"} | (TIED if ties_embeddings else {})
        write_tensors(folder / ADAPTER_MODEL, arrays, metadata)
        (folder / ADAPTER_CONFIG).write_bytes(_pretty(_peft_config(adapter)))


def read_adapter(folder: Path) -> StoredAdapter:
    """Read weights in either layout.

    Raises:
        CheckpointFormatError: The files are not those of a LoRA adapter, or do not fit together.
        CheckpointUnavailableError: They cannot be read.
    """
    with disk_errors(f"weights cannot be read from {folder}"):
        config = read_json(folder / ADAPTER_CONFIG, PeftConfig)
        if not (folder / ADAPTER_MODEL).is_file():
            raise CheckpointFormatError(f"{ADAPTER_MODEL} is missing")
        arrays = read_tensors(folder / ADAPTER_MODEL)
    if not 1 <= config.r <= RANK_MAX:
        raise CheckpointFormatError(
            f"r is {config.r} in {ADAPTER_CONFIG}; expected 1 to {RANK_MAX}"
        )
    return StoredAdapter(
        base_model=config.base_model_name_or_path or "",
        rank=config.r,
        alpha=config.lora_alpha,
        layers=_pairs(arrays, config.r),
    )


class PeftConfig(msgspec.Struct, frozen=True):
    """What we read of `adapter_config.json`."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None


def _peft_config(adapter: StoredAdapter) -> dict[str, Any]:
    kinds = sorted({module.rpartition(".")[2] for module in adapter.layers})
    return {
        "base_model_name_or_path": adapter.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        # A whole number as one: vLLM and PEFT declare it so.
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": kinds,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def is_extra(name: str) -> bool:
    """Whether a tensor is none of the adapter's own.

    These are frozen weights that `peft` saves along, and what the factors make of them.
    """
    return name.endswith(".base_layer.weight") or name == FULL_OUTPUT_LAYER


def _pairs(arrays: dict[str, Array], rank: int) -> dict[str, LoraPair]:
    factors: dict[str, dict[Factor, Array]] = {}
    for name, array in arrays.items():
        if is_extra(name):
            continue
        module, factor = layer_of(name)
        if array.dtype.kind != "f" or array.ndim != 2 or 0 in array.shape:
            raise CheckpointFormatError(
                f"tensor {name} is {array.dtype}{list(array.shape)}; expected a matrix of floats"
            )
        if array.shape[0 if factor == "A" else 1] != rank:
            raise CheckpointFormatError(
                f"tensor {name} has shape {list(array.shape)}, which does not fit r = {rank}"
            )
        if factors.setdefault(module, {}).setdefault(factor, array) is not array:
            raise CheckpointFormatError(f"layer {module} appears twice, under two names")
    for module, found in factors.items():
        if len(found) != 2:
            raise CheckpointFormatError(f"layer {module} has only lora_{next(iter(found))}")
    if not factors:
        raise CheckpointFormatError(f"{ADAPTER_MODEL} has no tensors")
    return {module: LoraPair(found["A"], found["B"]) for module, found in factors.items()}  # type: ignore[arg-type]  # checked above


def write_training(
    folder: Path,
    state: TrainingState,
    *,
    optimizer: Mapping[str, Array] | None = None,
    gradients: Mapping[str, Array] | None = None,
) -> None:
    """Write the state that training resumes from, beside weights; parts that are None are left out.

    Raises:
        StorageFullError: The disk is full.
        CheckpointUnavailableError: It cannot be written to for another reason.
    """
    with disk_errors(f"training state cannot be written to {folder}"):
        if optimizer is not None:
            write_tensors(folder / OPTIMIZER, optimizer)
        if gradients is not None:
            write_tensors(folder / GRADIENTS, gradients)
        (folder / STATE).write_bytes(_pretty(state))


def read_state(folder: Path) -> TrainingState | None:
    """What a training checkpoint knows besides its arrays; None if there are weights only.

    Raises:
        CheckpointFormatError: It cannot be understood, or is of a newer version.
    """
    with disk_errors(f"training state cannot be read from {folder}"):
        if not (folder / STATE).exists():
            return None
        state = read_json(folder / STATE, TrainingState)
    if state.format_version != STATE_VERSION:
        raise CheckpointFormatError(
            f"{STATE} has format {state.format_version}; this version of tinsmith reads "
            f"{STATE_VERSION}",
            remedy="use the version of tinsmith that wrote it, or a newer one",
        )
    return state


def read_arrays(folder: Path, file: str) -> dict[str, Array] | None:
    """The arrays of `OPTIMIZER` or `GRADIENTS`; None if the checkpoint has no such file."""
    with disk_errors(f"{file} cannot be read from {folder}"):
        return read_tensors(folder / file) if (folder / file).exists() else None


def read_json(file: Path, kind: type[T]) -> T:
    """Read a small JSON file.

    Raises:
        CheckpointFormatError: It is missing, too large, or not of this kind.
    """
    try:
        with file.open("rb") as content:
            text = content.read(_JSON_BYTES_MAX + 1)
        if len(text) > _JSON_BYTES_MAX:
            raise CheckpointFormatError(f"{file.name} has more than {_JSON_BYTES_MAX} bytes")
        return msgspec.json.decode(text, type=kind)
    except FileNotFoundError as exc:
        raise CheckpointFormatError(f"{file.name} is missing") from exc
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise CheckpointFormatError(f"{file.name} cannot be read: {exc}") from exc


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
