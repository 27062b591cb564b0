"""Loads models of other families, computed by the code of `transformers`.

Nothing is assumed about such a model without a test. It first runs with its original code, then
with our attention and linear layers: on a packed batch, from a KV cache, and backward. Unless the
logits match it is rejected. This catches models with other kinds of attention or with additional
state, whatever they are called. A model for another compute dtype is tested in float32 first.

If weights are stored in a narrower dtype than the compute dtype, this applies to linear layers and
plain embeddings; everything else is widened once.

`transformers` is imported only when such a model is loaded.
"""

# T row of the batch, V vocabulary

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from tinsmith.engine.model.architecture import Architecture, Group, LayerShape, LinearShape
from tinsmith.engine.model.families import architecture_name, token_ids
from tinsmith.engine.model.head import Head
from tinsmith.engine.model.kv_cache import CachedAttention, CachedSegment, KvBuffer, SequenceKv
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformers_model import (
    ATTENTION_NAME,
    AdaptedLinear,
    Observer,
    TransformersModel,
    attend,
    with_recomputation,
)
from tinsmith.errors import BaseModelFormatError

LENGTHS = (13, 6)
"""Lengths of the test sequences."""
CHUNKS = (8, 1, 4)
"""How the first of them is split when it is cached."""
TOLERANCE = {torch.float32: 1e-3}
OTHER_TOLERANCE = 0.2
"""Maximum relative error of the logits. Half precision has less than three digits, and may choose
other experts; the test in float32 is the one that counts."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts; they get no adapters."""

_log = logging.getLogger(__name__)


def load_with_transformers(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    held_in: torch.dtype,
    device: str,
) -> TransformersModel:
    """Load a base model of any family that `transformers` implements.

    Args:
        folder: With `config.json` and safetensors. Code in the folder is never run.
        config: From `read_config`.
        dtype: The compute dtype.
        held_in: The dtype to store linear layers and embeddings in; falls back to `dtype` for
            models whose code casts inputs to a layer's dtype.
        device: The device to load to.

    Raises:
        BaseModelFormatError: `transformers` has no such model, or it is not plain causal attention.
    """
    wanted = _Wanted(folder, architecture_name(config), config, dtype, held_in, device)
    with torch.no_grad():
        if dtype != torch.float32:
            # A missing part may change the logits by less than rounding in `dtype` does.
            _chosen(wanted._replace(dtype=torch.float32))
            gc.collect()  # modules form cycles, and memory may not hold the model twice
        made = _chosen(wanted)
    _log.info("%s: computed by the code of transformers", wanted.name)
    return made


class _Wanted(NamedTuple):
    """The arguments of `load_with_transformers`."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    dtype: torch.dtype
    held_in: torch.dtype
    device: str


def _chosen(wanted: _Wanted) -> TransformersModel:
    name, dtype, held_in = wanted.name, wanted.dtype, wanted.held_in
    if held_in != dtype:
        try:
            return _converted(wanted)
        except BaseModelFormatError as exc:
            # Only the text: the error references the model, and log handlers may keep it.
            _log.warning("%s: stored in %s instead of %s: %s", name, dtype, held_in, str(exc))
        gc.collect()
    return _converted(wanted._replace(held_in=dtype))


def _converted(wanted: _Wanted) -> TransformersModel:
    model = _loaded(wanted.folder, wanted.name, wanted.held_in, wanted.device)
    if wanted.held_in != wanted.dtype:
        _widen_others(model, wanted.dtype)
    return _Conversion(wanted.name, wanted.config, model, wanted.dtype).model()


def _loaded(folder: Path, name: str, dtype: torch.dtype, device: str) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as exc:
        raise BaseModelFormatError(
            f"{name} models need transformers, which is not installed",
            remedy="pip install 'tinsmith[server]'",
        ) from exc
    transformers.AttentionInterface.register(ATTENTION_NAME, attend)
    shows_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as exc:  # any error of the library
        raise BaseModelFormatError(f"transformers cannot load this {name}: {exc!s:.500}") from exc
    finally:
        if shows_bars:
            transformers.utils.logging.enable_progress_bar()
    if type(model).__name__ != name:
        raise BaseModelFormatError(f"{name} is not a causal language model")
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers would have initialised them randomly
        raise BaseModelFormatError(f"the model's files have no tensor {missing[0]!r}")
    return model.to(device).eval().requires_grad_(False)


class _Conversion:
    """Converts and tests one model."""

    def __init__(
        self, name: str, config: Mapping[str, Any], model: Any, dtype: torch.dtype
    ) -> None:
        self._name = name
        self._config = config
        self._model = model
        self._dtype = dtype
        self._embedding = model.get_input_embeddings()
        self._device = self._embedding.weight.device

    def model(self) -> TransformersModel:
        sequences = self._sequences()
        wanted = self._own_logits(sequences)
        output, output_name = self._output()
        self._replace(output)
        scale = self._logits_scale(output)
        linear = _linear_of(output, self._dtype)
        head = Head(linear, getattr(self._settings, "final_logit_softcapping", None))
        found = self._first_architecture(output.weight.shape[0])
        made = self._made(found, head, scale)
        observer, rows = self._run_packed(made, sequences)
        made = self._made(self._architecture(observer, found, output, output_name), head, scale)
        self._compare(head.logits(rows), torch.cat(wanted))
        self._compare(head.logits(self._run_cached(made, sequences[0])), wanted[0])
        self._try_backward(made, sequences)
        return made

    @property
    def _settings(self) -> Any:
        return self._model.config.get_text_config()

    @property
    def _layers(self) -> int:
        return int(self._settings.num_hidden_layers)

    def _made(self, architecture: Architecture, head: Head, scale: float) -> TransformersModel:
        return TransformersModel(
            architecture,
            self._embedding,
            self._model.base_model,
            head,
            dtype=self._dtype,
            device=self._device,
            logits_scale=scale,
        )

    def _refuse(self, why: str) -> BaseModelFormatError:
        return BaseModelFormatError(
            f"{self._name} models are not supported: {why}",
            remedy="docs/models.md lists the supported models",
        )

    # Conversion

    def _output(self) -> tuple[nn.Linear, str]:
        """The output layer and its name."""
        output = self._model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise self._refuse("its output layer is not linear")
        if output.weight.shape[0] != self._embedding.weight.shape[0]:
            raise self._refuse("its embedding and output layer have different vocabularies")
        names = [name for name, module in self._model.named_modules() if module is output]
        return output, names[0]

    def _logits_scale(self, output: nn.Linear) -> float:
        """The factor of the logits, under the names that models use for it."""
        scale = float(getattr(self._settings, "logit_scale", None) or 1.0)
        scale /= float(getattr(self._settings, "logits_scaling", None) or 1.0)
        if scale != 1.0 and output.bias is not None:
            raise self._refuse("its logits are scaled and have a bias")
        return scale

    def _replace(self, output: nn.Linear) -> None:
        """Replace its attention and linear layers by ours."""
        self._model.set_attn_implementation(ATTENTION_NAME)
        if self._model.config._attn_implementation != ATTENTION_NAME:
            raise self._refuse("its attention cannot be replaced")
        for name, module in list(self._model.named_modules()):
            if _is_linear(module) and module is not output:
                parent, _, last = name.rpartition(".")
                made = AdaptedLinear(name, _linear_of(module, self._dtype))
                setattr(self._model.get_submodule(parent), last, made)

        for module in self._model.modules():
            if isinstance(module, nn.ModuleList) and all(map(_has_attention, module)):
                for layer in module:
                    layer.forward = with_recomputation(layer.forward)

    # Inspection

    def _first_architecture(self, vocabulary: int) -> Architecture:
        """What the settings say; the rest is observed in the first pass."""
        settings = self._settings
        context = getattr(settings, "max_position_embeddings", None)
        if not isinstance(context, int):
            raise self._refuse("its context length is unknown")
        rope = getattr(settings, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond it, RoPE changes for all positions, earlier ones included.
            context = rope.get("original_max_position_embeddings") or context
        return Architecture(
            name=self._name,
            vocabulary=vocabulary,
            hidden=settings.hidden_size,
            inner=0,
            heads=0,
            kv_heads=0,
            head_size=0,
            max_context=context,
            layers=(),
            ropes=(),
            norm_epsilon=0.0,
            eos_tokens=token_ids(self._config.get("eos_token_id")),
        )

    def _architecture(
        self, observer: Observer, found: Architecture, output: nn.Linear, output_name: str
    ) -> Architecture:
        calls = observer.attentions
        indices = [getattr(call[0], "layer_idx", None) for call in calls]
        if not calls or indices != list(range(self._layers)):
            raise self._refuse("not all of its layers are attention")
        shapes = {(q.shape[1:], k.shape[1:], v.shape[1:]) for _, _, q, k, v in calls}
        if len(shapes) != 1:
            raise self._refuse("its layers have heads of different sizes")
        ((q_HD, k_GD, v_GD),) = shapes
        if k_GD != v_GD or q_HD[1] != k_GD[1]:
            raise self._refuse("its keys and values have different sizes")
        layers = tuple(LayerShape(window=rule.window, rope=None) for _, rule, *_ in calls)
        self._check_windows(layers)
        linears = self._linears(observer, output_name, output)
        mlp = [shape.parts[0][1] for shape in linears if shape.group == "mlp"]
        values: dict[str, Any] = {
            "inner": max(mlp, default=found.hidden),
            "heads": q_HD[0],
            "kv_heads": k_GD[0],
            "head_size": k_GD[1],
            "layers": layers,
            "ties_embeddings": output.weight is self._embedding.weight,
            "found_linears": linears,
        }
        return msgspec.structs.replace(found, **values)

    def _check_windows(self, layers: tuple[LayerShape, ...]) -> None:
        """Check that our attention gets the windows that its masks would have."""
        window = getattr(self._settings, "sliding_window", None)
        kinds = getattr(self._settings, "layer_types", None)
        if kinds is None:
            return
        wanted = {"full_attention": None, "sliding_attention": window}
        for kind, layer in zip(kinds, layers, strict=False):
            if kind not in wanted or layer.window != wanted[kind]:
                raise self._refuse(f"a layer has {kind} with a window of {layer.window}")

    def _linears(
        self, observer: Observer, output_name: str, output: nn.Linear
    ) -> tuple[LinearShape, ...]:
        """The layers that can have adapters: those that each token goes through once."""
        attentions = {id(call[0]) for call in observer.attentions}
        places = tuple(
            f"{name}." for name, one in self._model.named_modules() if id(one) in attentions
        )
        called = [name for name, _ in observer.linears]
        shapes: list[LinearShape] = []
        for name, rows in observer.linears:
            is_router = name.rpartition(".")[2] in _ROUTERS
            if rows != sum(LENGTHS) or called.count(name) != 1 or is_router:
                continue
            weight = self._model.get_submodule(name).weight
            group: Group = "attention" if name.startswith(places) else "mlp"
            part = (name, weight.shape[0])
            shapes.append(LinearShape(0, name, group, weight.shape[1], (part,)))
        vocabulary, hidden = output.weight.shape
        head = LinearShape(-1, "head", "unembed", hidden, ((output_name, vocabulary),))
        return (*shapes, head)

    # Tests

    def _sequences(self) -> list[Tensor]:
        vocabulary = self._embedding.weight.shape[0]
        tokens_T = (torch.arange(sum(LENGTHS), device=self._device) * 7919 + 17) % vocabulary
        return list(tokens_T.split(list(LENGTHS)))

    def _own_logits(self, sequences: list[Tensor]) -> list[Tensor]:
        try:
            with _widened_linears(self._model, self._dtype):
                return [self._model(one[None], use_cache=False).logits[0] for one in sequences]
        except Exception as exc:  # arbitrary model code
            raise self._refuse(f"its own code fails: {exc!s:.300}") from exc

    def _run_packed(
        self, model: TransformersModel, sequences: list[Tensor]
    ) -> tuple[Observer, Tensor]:
        observer = Observer()
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        segments = [
            PackedSegment(end - len(one), end) for one, end in zip(sequences, ends, strict=True)
        ]
        positions_T = torch.cat([torch.arange(length) for length in LENGTHS]).to(self._device)
        attention = PackedAttention(segments)
        try:
            rows = model.forward(torch.cat(sequences), positions_T, attention, observer=observer)
        except BaseModelFormatError as exc:
            raise self._refuse(str(exc)) from exc
        except Exception as exc:  # as above
            raise self._refuse(f"its code fails on a packed batch: {exc!s:.300}") from exc
        return observer, rows

    def _try_backward(self, model: TransformersModel, sequences: list[Tensor]) -> None:
        """Test the backward; code that changes our outputs in place gets copies."""
        for gives_copies in (False, True):
            for module in self._model.modules():
                if isinstance(module, AdaptedLinear):
                    module.gives_copies = gives_copies
            try:
                with torch.enable_grad():
                    self._run_packed(model, sequences)[1].sum().backward()
            except (BaseModelFormatError, RuntimeError) as exc:
                if gives_copies:
                    raise self._refuse(f"its backward fails: {exc!s:.300}") from exc
            else:
                return

    def _run_cached(self, model: TransformersModel, tokens_T: Tensor) -> Tensor:
        kv = KvBuffer(model.architecture, model.dtype, model.device)
        keys = SequenceKv(None, kv)
        positions_T = torch.arange(len(tokens_T), device=self._device)
        rows: list[Tensor] = []
        for tokens, positions in zip(
            tokens_T.split(list(CHUNKS)), positions_T.split(list(CHUNKS)), strict=True
        ):
            attention = CachedAttention([CachedSegment(0, len(tokens), keys, kv.length)])
            rows.append(model.forward(tokens, positions, attention))
        return torch.cat(rows)

    def _compare(self, found_TV: Tensor, wanted_TV: Tensor) -> None:
        wanted_TV = wanted_TV.float()
        off = float((found_TV - wanted_TV).norm() / wanted_TV.norm())
        if not off <= TOLERANCE.get(self._dtype, OTHER_TOLERANCE):
            raise self._refuse(
                f"it is not plain causal attention, or computes its logits differently "
                f"(relative error {off:.1%})"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _has_attention(layer: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") for module in layer.modules())


def _linear_of(module: Any, dtype: torch.dtype) -> Linear:
    weight_OI = module.weight if isinstance(module, nn.Linear) else module.weight.T.contiguous()
    bias_O = module.bias
    return Linear(weight_OI.detach(), None if bias_O is None else bias_O.detach(), dtype=dtype)


def _widen_others(model: nn.Module, dtype: torch.dtype) -> None:
    """Widen all but linear layers and plain embeddings, whose rows are widened at look-up."""
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    plain = [one for one in embeddings if type(one) is nn.Embedding]
    held = {id(one.weight) for one in (*plain, *filter(_is_linear, model.modules()))}
    held -= {id(one.weight) for one in embeddings if one not in plain}  # these do arithmetic
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and id(tensor) not in held:
            tensor.data = tensor.data.to(dtype)
    for one in plain:
        one.register_forward_hook(lambda _module, _args, rows: rows.to(dtype))


@contextlib.contextmanager
def _widened_linears(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run its own linear layers in `dtype`, widening one at a time."""

    def widen(module: Any, _: Any) -> None:
        module.held = module.weight.data
        module.weight.data = module.held.to(dtype)

    def restore(module: Any, _args: Any, _made: Any) -> None:
        module.weight.data = module.held
        del module.held

    linears = [one for one in model.modules() if _is_linear(one) and one.weight.dtype != dtype]
    hooks = [one.register_forward_pre_hook(widen) for one in linears]
    hooks += [one.register_forward_hook(restore) for one in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
