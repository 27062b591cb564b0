"""Loads a base model from a Hugging Face folder: weights fused, cast, and on one device.

The choice of files and the treatment of tied output layers follow `transformers`. Models that would
compute something else than their author meant are rejected: quantised or missing weights, or
weights that contradict a setting.
"""

# V vocabulary, D feature, O output, I input

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith.engine.model.architecture import Architecture, Experts
from tinsmith.engine.model.families import architecture_name, is_known, read_architecture
from tinsmith.engine.model.head import Head
from tinsmith.engine.model.layers import ExpertWeights
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.load_with_transformers import load_with_transformers
from tinsmith.engine.model.transformer import LayerWeights, Transformer
from tinsmith.engine.model.weight_files import read_object, refuse_quantised, weight_files
from tinsmith.errors import BaseModelFormatError

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that older programs saved besides the weights."""

_log = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`, with the EOS tokens of `generation_config.json` if it has any.

    Raises:
        BaseModelFormatError: It is missing or not JSON.
    """
    config = read_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_object(generation).get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
    return config


def load_base_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    held_in: torch.dtype | None = None,
    device: str = "cpu",
) -> Transformer:
    """Load a base model.

    Args:
        folder: With `config.json` and safetensors.
        dtype: The compute dtype.
        held_in: The dtype to store matrices in, if another; they are widened when used.
        device: The device to load to.

    Raises:
        BaseModelFormatError: The model is not supported, neither by our own code nor through
            `transformers`.
    """
    config = read_config(folder)
    _refuse_unreadable(folder, config)
    held = held_in or dtype
    if not is_known(config):
        return load_with_transformers(folder, config, dtype=dtype, held_in=held, device=device)
    try:
        architecture = read_architecture(config)
    except BaseModelFormatError as exc:
        return _with_other_settings(folder, config, exc, dtype, held, device)
    files = _tensors_in(folder)
    _check_biases(config, files)
    with torch.no_grad():
        return _Reader(architecture, files, dtype, held, device).transformer()


def _refuse_unreadable(folder: Path, config: Mapping[str, Any]) -> None:
    """Reject formats that are never read."""
    name = architecture_name(config)
    if name == "?":
        raise BaseModelFormatError(
            f'{folder / "config.json"} has no "architectures"',
            remedy='add the model class, such as "architectures": ["LlamaForCausalLM"]',
        )
    refuse_quantised(f"this {name}", config)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise BaseModelFormatError(
            f"the weights in {folder} are pickled ({pickled[0]}), which could run arbitrary code",
            remedy="convert them to safetensors, for example with transformers' `save_pretrained`",
        )


def _with_other_settings(
    folder: Path,
    config: Mapping[str, Any],
    why: BaseModelFormatError,
    dtype: torch.dtype,
    held_in: torch.dtype,
    device: str,
) -> Transformer:
    """Load a model of a supported family that has an unsupported setting."""
    _log.info(
        "%s has settings that the built-in model code does not support: %s",
        architecture_name(config),
        why,
    )
    try:
        return load_with_transformers(folder, config, dtype=dtype, held_in=held_in, device=device)
    except BaseModelFormatError as exc:
        raise BaseModelFormatError(
            f"{why}; loading it with transformers failed too: {exc}"
        ) from exc


def _tensors_in(folder: Path) -> dict[str, Any]:
    """The file of each tensor; files are memory-mapped, so tensors are read on demand."""
    found: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            opened = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as exc:
            raise BaseModelFormatError(f"{path} cannot be read: {exc}") from exc
        tensors = dict.fromkeys(opened.keys(), opened)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise BaseModelFormatError(
                f"{path} has the tensor {twice[0]!r}, which another file has too"
            )
        found.update(tensors)
    return found


def _check_biases(config: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Reject biases that a setting denies: other programs would ignore them."""
    if architecture_name(config).startswith("Qwen2"):
        return  # they always have biases
    for setting, place in (("attention_bias", ".self_attn."), ("mlp_bias", ".mlp.")):
        found = [name for name in files if place in name and name.endswith(".bias")]
        if found and config.get(setting) is False:
            raise BaseModelFormatError(
                f"the model's files have {found[0]!r}, but config.json has {setting} = false"
            )


class _Reader:
    """Builds a model from the tensors in its files."""

    def __init__(
        self,
        architecture: Architecture,
        files: dict[str, Any],
        dtype: torch.dtype,
        held_in: torch.dtype,
        device: str,
    ) -> None:
        self._shape = architecture
        self._files = files
        self._dtype = dtype
        self._held_in = held_in
        self._device = device
        self._used: set[str] = set()

    def transformer(self) -> Transformer:
        shape = self._shape
        embedding_VD = self._matrix("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        layers = [self._layer(index) for index in range(len(shape.layers))]
        head = Head(self._output(embedding_VD), shape.logits_softcap)
        norm_D = self._norm("model.norm")
        self._tell_of_unused()
        return Transformer(shape, embedding_VD, layers, norm_D, head, dtype=self._dtype)

    def _output(self, embedding_VD: Tensor) -> Linear:
        shape = self._shape
        if shape.ties_embeddings:
            if "lm_head.weight" not in self._files:
                return Linear(embedding_VD, dtype=self._dtype)
            output_VD = self._matrix("lm_head.weight", shape.vocabulary, shape.hidden)
            if torch.equal(output_VD, embedding_VD):
                return Linear(embedding_VD, dtype=self._dtype)
            _log.warning(
                "%s: config.json ties the output layer to the embedding, but the files have a "
                "separate one, which is used, as in transformers",
                shape.name,
            )
        return self._linear(["lm_head"], shape.hidden, [shape.vocabulary])

    def _tell_of_unused(self) -> None:
        unused = sorted(
            name for name in self._files.keys() - self._used if not name.endswith(_NOT_WEIGHTS)
        )
        if unused:
            _log.warning(
                "%s: %d tensors in its files are not used, such as %s",
                self._shape.name,
                len(unused),
                unused[0],
            )

    def _layer(self, index: int) -> LayerWeights:
        shape, place = self._shape, f"model.layers.{index}"
        experts = shape.layers[index].experts
        attention, mlp = f"{place}.self_attn", f"{place}.mlp"
        inner = shape.inner
        if experts is not None:
            mlp, inner = f"{mlp}.shared_expert", experts.shared_inner
        norms = self._norms(place)
        return LayerWeights(
            qkv=self._linear(
                [f"{attention}.{one}_proj" for one in "qkv"],
                shape.hidden,
                [shape.query_outputs, shape.key_outputs, shape.key_outputs],
            ),
            o=self._linear([f"{attention}.o_proj"], shape.query_outputs, [shape.hidden]),
            gate_up=self._gate_up(mlp, inner) if inner else None,
            down=self._linear([f"{mlp}.down_proj"], inner, [shape.hidden]) if inner else None,
            experts=None if experts is None else self._experts(place, experts),
            q_norm_D=self._norm(f"{attention}.q_norm") if shape.has_qk_norm else None,
            k_norm_D=self._norm(f"{attention}.k_norm") if shape.has_qk_norm else None,
            **norms,
        )

    def _norms(self, place: str) -> dict[str, Tensor]:
        if not self._shape.has_post_norms:
            return {
                "input_norm_D": self._norm(f"{place}.input_layernorm"),
                "mlp_norm_D": self._norm(f"{place}.post_attention_layernorm"),
            }
        return {
            "input_norm_D": self._norm(f"{place}.input_layernorm"),
            "attention_out_norm_D": self._norm(f"{place}.post_attention_layernorm"),
            "mlp_norm_D": self._norm(f"{place}.pre_feedforward_layernorm"),
            "mlp_out_norm_D": self._norm(f"{place}.post_feedforward_layernorm"),
        }

    def _gate_up(self, place: str, inner: int) -> Linear:
        return self._linear(
            [f"{place}.gate_proj", f"{place}.up_proj"], self._shape.hidden, [inner, inner]
        )

    def _experts(self, place: str, experts: Experts) -> ExpertWeights:
        hidden, inner = self._shape.hidden, experts.inner
        if f"{place}.block_sparse_moe.gate.weight" in self._files:  # Mixtral's names
            place, names = f"{place}.block_sparse_moe", ("w1", "w3", "w2")
        else:
            place, names = f"{place}.mlp", ("gate_proj", "up_proj", "down_proj")
        gate, up, down = names
        each = [f"{place}.experts.{expert}" for expert in range(experts.count)]
        shared_gate = f"{place}.shared_expert_gate"
        return ExpertWeights(
            shape=experts,
            router=self._linear([f"{place}.gate"], hidden, [experts.count]),
            gate_ups=tuple(
                self._linear([f"{one}.{gate}", f"{one}.{up}"], hidden, [inner, inner])
                for one in each
            ),
            downs=tuple(self._linear([f"{one}.{down}"], inner, [hidden]) for one in each),
            shared_gate=(
                self._linear([shared_gate], hidden, [1])
                if f"{shared_gate}.weight" in self._files
                else None
            ),
        )

    def _linear(self, names: list[str], inputs: int, outputs: Iterable[int]) -> Linear:
        """Layers with the same input, fused into one."""
        sizes = list(outputs)
        weights = [
            self._matrix(f"{name}.weight", size, inputs)
            for name, size in zip(names, sizes, strict=True)
        ]
        weight_OI = torch.cat(weights) if len(weights) > 1 else weights[0]
        if not any(f"{name}.bias" in self._files for name in names):
            return Linear(weight_OI, dtype=self._dtype)
        biases = [
            self._tensor(f"{name}.bias", size)
            if f"{name}.bias" in self._files
            else torch.zeros(size, dtype=self._dtype, device=self._device)
            for name, size in zip(names, sizes, strict=True)
        ]
        return Linear(weight_OI, torch.cat(biases), dtype=self._dtype)

    def _norm(self, name: str) -> Tensor:
        weight_D = self._tensor(f"{name}.weight")
        if not self._shape.norm_offset:
            return weight_D
        # In float32: bfloat16 has two digits around 1, while weights around 0 have more.
        return weight_D.float() + self._shape.norm_offset

    def _matrix(self, name: str, *sizes: int) -> Tensor:
        return self._found(name, sizes, self._held_in)

    def _tensor(self, name: str, *sizes: int) -> Tensor:
        """A norm or bias, which is small and stored in the compute dtype."""
        return self._found(name, sizes, self._dtype)

    def _found(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._files:
            raise BaseModelFormatError(f"the model's files have no tensor {name!r}")
        found: Tensor = self._files[name].get_tensor(name)
        self._used.add(name)
        if found.dtype not in _FLOATS:
            raise BaseModelFormatError(
                f"the tensor {name!r} has the dtype {found.dtype}, which suggests quantisation",
                remedy="use the original, unquantised model",
            )
        if sizes and tuple(found.shape) != sizes:
            raise BaseModelFormatError(
                f"the tensor {name!r} is {list(found.shape)}; config.json requires {list(sizes)}"
            )
        return found.to(device=self._device, dtype=dtype).contiguous()
