"""The model families that `transformer.py` supports: from `config.json` to an `Architecture`.

A setting that might change numbers and is not implemented makes the model unsupported; nothing is
silently ignored.
"""

# D pair of dimensions of a head

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.model.architecture import Activation, Architecture, Experts, LayerShape, Rope
from tinsmith.errors import BaseModelFormatError

Config = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def is_known(config: Config) -> bool:
    """Whether the model's family is supported by `transformer.py`."""
    return architecture_name(config) in _FAMILIES


def architecture_name(config: Config) -> str:
    """The model class in `transformers`; `?` if the configuration does not name it."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "?"


def token_ids(value: object) -> tuple[int, ...]:
    """EOS token ids, from a number or a list.

    Raises:
        BaseModelFormatError: They are not numbers.
    """
    given = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(one, int) or isinstance(one, bool) for one in given):
        raise BaseModelFormatError(
            f"eos_token_id is {value!r:.60}; it must be a token id or a list of them"
        )
    return tuple(given)


def read_architecture(config: Config) -> Architecture:
    """The architecture that a configuration describes.

    Raises:
        BaseModelFormatError: The family or a setting is not supported.
    """
    name = architecture_name(config)
    family = _FAMILIES.get(name)
    if family is None:
        raise BaseModelFormatError(
            f"{name} models are not supported",
            remedy=f"supported are {', '.join(sorted(_FAMILIES))}",
        )
    try:
        return family(name, config)
    except KeyError as exc:
        raise BaseModelFormatError(f"config.json of {name} has no {exc.args[0]!r}") from exc
    except (AttributeError, TypeError, ValueError, ArithmeticError) as exc:
        if isinstance(exc, BaseModelFormatError):
            raise
        raise BaseModelFormatError(f"config.json of {name} is invalid: {exc}") from exc


# Shared by families


def _shared(name: str, config: Config, *, ties: bool = False) -> dict[str, Any]:
    _refuse(name, config, is_causal=True, use_bidirectional_attention=False)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    size = config.get("head_dim") or hidden // heads
    return {
        "name": name,
        "vocabulary": _count(config, "vocab_size"),
        "hidden": hidden,
        "inner": _count(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": size,
        "max_context": _count(config, "max_position_embeddings"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_act", "silu")),
        "attention_scale": 1.0 / math.sqrt(size),
        "ties_embeddings": config.get("tie_word_embeddings", ties),
        "eos_tokens": token_ids(config.get("eos_token_id")),
    }


def _count(config: Config, key: str) -> int:
    """A required setting that must be an integer of at least 1."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BaseModelFormatError(
            f"config.json has {key} = {value!r:.60}; it must be a positive integer"
        )
    return value


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise BaseModelFormatError(f"the activation {name!r} is not supported")
    return _ACTIVATIONS[name]


def _refuse(name: str, config: Config, **harmless: object) -> None:
    """Reject settings whose value is not the neutral one."""
    for key, value in harmless.items():
        if config.get(key, value) not in (value, None):
            raise BaseModelFormatError(f"{name} with {key} = {config[key]!r} is not supported")


def _rope(config: Config, *, theta: float = 10_000.0) -> Rope:
    """RoPE from the older or newer form of settings; the older takes precedence.

    Args:
        config: With `rope_parameters`, or with `rope_theta` and `rope_scaling`.
        theta: The family's default base.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return _scaled_rope(config, given, given.get("rope_theta") or config.get("rope_theta") or theta)


def _scaled_rope(config: Config, given: Config, base: float) -> Rope:
    name = architecture_name(config)
    if any(isinstance(one, Mapping) for one in given.values()):
        raise BaseModelFormatError(f"{name} with RoPE settings per layer is not supported")
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for settings in (config, given):  # `transformers` ignores it in these families
        _refuse(name, settings, partial_rotary_factor=1.0)
    # In float32, as in training: at position 100,000 the rounding is a thousandth of a rotation.
    plain_D = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    scaling = given.get("rope_type") or given.get("type") or "default"
    if scaling == "default":
        return Rope(tuple(plain_D.tolist()))
    if scaling == "linear":
        return Rope(tuple((plain_D / given["factor"]).tolist()))
    if scaling == "llama3":
        first_context = given["original_max_position_embeddings"]
        _refuse(name, config, original_max_position_embeddings=first_context)
        return Rope(tuple(_llama3(plain_D, given).tolist()))
    raise BaseModelFormatError(f"the RoPE scaling {scaling!r} is not supported")


def _llama3(plain_D: Tensor, given: Config) -> Tensor:
    """Low frequencies are scaled down, high ones are kept, and those between are interpolated."""
    context, low, high = (
        given[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    slowed_D, tokens_D = plain_D / given["factor"], 2 * math.pi / plain_D
    share_D = (context / tokens_D - low) / (high - low)
    blended_D = (1 - share_D) * plain_D / given["factor"] + share_D * plain_D
    is_slow_D, is_fast_D = tokens_D > context / low, tokens_D < context / high
    return torch.where(is_slow_D, slowed_D, torch.where(is_fast_D, plain_D, blended_D))


def _identical_layers(config: Config, window: int | None = None) -> tuple[LayerShape, ...]:
    """Identical layers, for families that ignore `layer_types`."""
    if window is not None and window < 1:
        raise BaseModelFormatError(f"sliding_window = {window!r} is not positive")
    return (LayerShape(window=window),) * _count(config, "num_hidden_layers")


def _layers(
    config: Config, window: int | None, sliding: Callable[[int], bool]
) -> tuple[LayerShape, ...]:
    """Layers with full attention or a sliding window.

    Args:
        config: `layer_types` has the kind of each layer, if present.
        window: The sliding window.
        sliding: The family's rule for layers with a window, without `layer_types`.
    """
    count = _count(config, "num_hidden_layers")
    rule = ["sliding_attention" if sliding(index) else "full_attention" for index in range(count)]
    kinds = config.get("layer_types") or rule
    windows = {"full_attention": None, "sliding_attention": window}
    if len(kinds) < count or not set(kinds) <= set(windows):
        raise BaseModelFormatError(f"layer_types = {kinds!r:.120} is not supported")
    if "sliding_attention" in kinds and not window:
        raise BaseModelFormatError(
            "layer_types has sliding attention, but config.json has no sliding_window"
        )
    return tuple(LayerShape(window=windows[kind]) for kind in kinds[:count])


# The families


def _llama(name: str, config: Config) -> Architecture:
    _refuse(name, config, pretraining_tp=1)
    return Architecture(
        **_shared(name, config), layers=_identical_layers(config), ropes=(_rope(config),)
    )


def _mistral(name: str, config: Config) -> Architecture:
    window = config.get("sliding_window", 4096)
    has_kinds = bool(config.get("layer_types"))  # then `transformers` treats it as Ministral
    layers = (
        _layers(config, window, lambda _: False) if has_kinds else _identical_layers(config, window)
    )
    return Architecture(**_shared(name, config), layers=layers, ropes=(_rope(config),))


def _qwen(name: str, config: Config) -> Architecture:
    first = config.get("max_window_layers", 28)
    window = _qwen_window(config)
    return Architecture(
        **_shared(name, config),
        layers=_layers(config, window, lambda index: window is not None and index >= first),
        ropes=(_rope(config),),
        has_qk_norm=name.startswith("Qwen3"),
    )


def _qwen_window(config: Config) -> int | None:
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


def _qwen2_experts(name: str, config: Config) -> Architecture:
    window, end = _qwen_window(config), config.get("max_window_layers", 28)
    layers = _layers(
        config, window, lambda index: window is not None and index % 2 == 0 and index < end
    )
    return _qwen_experts(name, config, layers)


def _qwen3_experts(name: str, config: Config) -> Architecture:
    return _qwen_experts(name, config, _identical_layers(config, _qwen_window(config)))


def _qwen_experts(name: str, config: Config, layers: tuple[LayerShape, ...]) -> Architecture:
    experts = Experts(
        count=_count(config, "num_experts" if config.get("num_experts") else "num_local_experts"),
        chosen=_count(config, "num_experts_per_tok"),
        inner=_count(config, "moe_intermediate_size"),
        normalises=config.get("norm_topk_prob", False),
        shared_inner=config.get("shared_expert_intermediate_size") or 0,
    )
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    mixed = tuple(
        LayerShape(
            window=layer.window,
            experts=experts if index not in dense and (index + 1) % step == 0 else None,
        )
        for index, layer in enumerate(layers)
    )
    return Architecture(
        **_shared(name, config),
        layers=mixed,
        ropes=(_rope(config),),
        has_qk_norm=name.startswith("Qwen3"),
    )


def _mixtral(name: str, config: Config) -> Architecture:
    experts = Experts(
        count=_count(config, "num_local_experts"),
        chosen=_count(config, "num_experts_per_tok"),
        inner=_count(config, "intermediate_size"),
        normalises=True,
    )
    shared = {**_shared(name, config), "norm_epsilon": config.get("rms_norm_eps", 1e-5)}
    layers = tuple(
        LayerShape(window=one.window, experts=experts)
        for one in _identical_layers(config, config.get("sliding_window"))
    )
    return Architecture(**shared, layers=layers, ropes=(_rope(config, theta=1e6),))


def _smollm3(name: str, config: Config) -> Architecture:
    count, every = _count(config, "num_hidden_layers"), config.get("no_rope_layer_interval", 4)
    # 1 for layers with RoPE, as the setting's documentation says
    uses_rope = config.get("no_rope_layers") or [(index + 1) % every for index in range(count)]
    if len(uses_rope) < count:
        raise BaseModelFormatError(
            f"no_rope_layers = {uses_rope!r:.120} has fewer entries than layers"
        )
    window = config.get("sliding_window")
    slides = bool(window and config.get("use_sliding_window"))
    layers = tuple(
        LayerShape(window=layer.window, rope=0 if has_rope else None)
        for layer, has_rope in zip(
            _layers(config, window, lambda index: slides and not uses_rope[index]),
            uses_rope,
            strict=False,
        )
    )
    return Architecture(
        **_shared(name, config, ties=True), layers=layers, ropes=(_rope(config, theta=2e6),)
    )


def _gemma_shared(name: str, config: Config, activation: str | None) -> dict[str, Any]:
    # Gemma 2 and 3 ignore `hidden_act`; each sets its activation below.
    shared = _shared(name, {**config, "hidden_act": "silu"}, ties=True)
    shared["activation"] = _activation(activation or "gelu_pytorch_tanh")
    shared["norm_offset"] = 1.0
    shared["embedding_scale"] = math.sqrt(config["hidden_size"])
    return shared


def _gemma(name: str, config: Config) -> Architecture:
    _refuse(name, config, hidden_activation="gelu_pytorch_tanh")  # older versions used it
    activation = config.get("hidden_act")
    # The first releases say `gelu` but mean the tanh approximation.
    shared = _gemma_shared(name, config, None if activation == "gelu" else activation)
    return Architecture(**shared, layers=_identical_layers(config), ropes=(_rope(config),))


def _gemma2(name: str, config: Config) -> Architecture:
    shared = _gemma_shared(name, config, config.get("hidden_activation"))
    shared["attention_scale"] = 1.0 / math.sqrt(config["query_pre_attn_scalar"])
    return Architecture(
        **shared,
        layers=_gemma_layers(config, every=2),
        ropes=(_rope(config),),
        has_post_norms=True,
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        logits_softcap=config.get("final_logit_softcapping", 30.0),
    )


def _gemma3(name: str, config: Config) -> Architecture:
    _refuse(name, config, attn_logit_softcapping=None)  # its code ignores it
    shared = _gemma_shared(name, config, config.get("hidden_activation"))
    shared["attention_scale"] = 1.0 / math.sqrt(config["query_pre_attn_scalar"])
    layers = tuple(
        LayerShape(window=layer.window, rope=0 if layer.window is None else 1)
        for layer in _gemma_layers(config, every=config.get("sliding_window_pattern", 6))
    )
    return Architecture(
        **shared,
        layers=layers,
        ropes=_gemma3_ropes(config),
        has_qk_norm=True,
        has_post_norms=True,
        logits_softcap=config.get("final_logit_softcapping"),
    )


def _gemma3_ropes(config: Config) -> tuple[Rope, Rope]:
    """RoPE of layers with full attention, and of those with a sliding window."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if (given and scaling) or not set(given) <= {"full_attention", "sliding_attention"}:
        raise BaseModelFormatError(
            "rope_parameters must be given for full_attention and sliding_attention"
        )
    far, near = given.get("full_attention") or scaling, given.get("sliding_attention") or {}
    return (
        _scaled_rope(config, far, far.get("rope_theta") or config.get("rope_theta") or 1e6),
        _scaled_rope(
            config, near, near.get("rope_theta") or config.get("rope_local_base_freq") or 1e4
        ),
    )


def _gemma_layers(config: Config, *, every: int) -> tuple[LayerShape, ...]:
    """Every `every`-th layer has full attention, the others a sliding window."""
    return _layers(
        config, config.get("sliding_window", 4096), lambda index: (index + 1) % every != 0
    )


_FAMILIES: dict[str, Callable[[str, Config], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "Qwen2MoeForCausalLM": _qwen2_experts,
    "Qwen3MoeForCausalLM": _qwen3_experts,
    "MixtralForCausalLM": _mixtral,
    "SmolLM3ForCausalLM": _smollm3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
