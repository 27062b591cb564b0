"""Which models `transformer.py` computes, and what their `config.json` says in its terms.

A configuration is read as it is written; nothing is taken for granted that would change numbers: a
setting that is not known to be harmless in its family makes the model one that we do not compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.errors import BaseModelFormatError
from tinsmith.model.architecture import Activation, Architecture, Experts, LayerShape, Rope

Config = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def is_known(config: Config) -> bool:
    """Whether the model is of a family that `transformer.py` computes."""
    return architecture_name(config) in _FAMILIES


def architecture_name(config: Config) -> str:
    """What `transformers` calls the model's class; `?` if the configuration does not tell."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "?"


def read_architecture(config: Config) -> Architecture:
    """What a configuration describes.

    Raises:
        BaseModelFormatError: It is of a family that we do not compute, or of one that we do with
            a setting that we do not.
    """
    name = architecture_name(config)
    family = _FAMILIES.get(name)
    if family is None:
        raise BaseModelFormatError(
            f"models of the kind {name} are not known",
            remedy=f"known are {', '.join(sorted(_FAMILIES))}",
        )
    try:
        return family(name, config)
    except KeyError as exc:
        raise BaseModelFormatError(f"config.json of a {name} has no {exc.args[0]!r}") from exc


# What families have in common


def _shared(name: str, config: Config) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    return {
        "name": name,
        "vocabulary": config["vocab_size"],
        "hidden": hidden,
        "inner": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": size,
        "max_context": config["max_position_embeddings"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_act", "silu")),
        "attention_scale": 1.0 / math.sqrt(size),
        "ties_embeddings": config.get("tie_word_embeddings", False),
        "eos_tokens": _numbers(config.get("eos_token_id")),
    }


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise BaseModelFormatError(f"the activation {name!r} is not known")
    return _ACTIVATIONS[name]


def _numbers(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refuse(name: str, config: Config, **harmless: object) -> None:
    """Refuse settings that have another value than the one that changes nothing."""
    for key, value in harmless.items():
        if config.get(key, value) not in (value, None):
            raise BaseModelFormatError(f"a {name} with {key} = {config[key]!r} is not known")


def _rope(config: Config, *, theta: float | None = None, kind: str | None = None) -> Rope:
    """From the settings of either form: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind is not None and kind in given:
        given = given[kind] or {}
    base = theta or given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for settings in (config, given):  # of these families `transformers` has none that heeds it
        _refuse(architecture_name(config), settings, partial_rotary_factor=1.0)
    plain = [base ** (-2 * pair / size) for pair in range(size // 2)]
    scaling = given.get("rope_type") or given.get("type") or "default"
    if scaling == "default":
        return Rope(tuple(plain))
    if scaling == "linear":
        return Rope(tuple(one / given["factor"] for one in plain))
    if scaling == "llama3":
        return Rope(tuple(_llama3(one, given) for one in plain))
    raise BaseModelFormatError(f"the scaling {scaling!r} of positions is not known")


def _llama3(frequency: float, given: Config) -> float:
    """Slow turns are slowed further, fast ones are left, and those between are blended."""
    turns = given["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    if turns < low:
        return float(frequency / given["factor"])
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return float((1 - share) * frequency / given["factor"] + share * frequency)


def _layers(config: Config, window: int | None = None) -> tuple[LayerShape, ...]:
    """All alike, but that those called sliding see the window alone."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * count
    return tuple(
        LayerShape(window=window if kind == "sliding_attention" else None) for kind in kinds[:count]
    )


# The families


def _llama(name: str, config: Config) -> Architecture:
    _refuse(name, config, mlp_bias=False, pretraining_tp=1)
    return Architecture(**_shared(name, config), layers=_layers(config), ropes=(_rope(config),))


def _mistral(name: str, config: Config) -> Architecture:
    window = config.get("sliding_window")
    layers = tuple(LayerShape(window=window) for _ in range(config["num_hidden_layers"]))
    return Architecture(**_shared(name, config), layers=layers, ropes=(_rope(config),))


def _qwen(name: str, config: Config) -> Architecture:
    return Architecture(
        **_shared(name, config),
        layers=_qwen_layers(config),
        ropes=(_rope(config),),
        has_qk_norm=name.startswith("Qwen3"),
    )


def _qwen_layers(config: Config) -> tuple[LayerShape, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if config.get("layer_types") or window is None:
        return _layers(config, window)
    first = config.get("max_window_layers", config["num_hidden_layers"])
    return tuple(
        LayerShape(window=window if index >= first else None)
        for index in range(config["num_hidden_layers"])
    )


def _qwen_experts(name: str, config: Config) -> Architecture:
    experts = Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        inner=config["moe_intermediate_size"],
        normalises=config.get("norm_topk_prob", False),
        shared_inner=config.get("shared_expert_intermediate_size") or 0,
    )
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    layers = tuple(
        LayerShape(
            window=layer.window,
            experts=experts if index not in dense and (index + 1) % step == 0 else None,
        )
        for index, layer in enumerate(_qwen_layers(config))
    )
    return Architecture(
        **_shared(name, config),
        layers=layers,
        ropes=(_rope(config),),
        has_qk_norm=name.startswith("Qwen3"),
    )


def _mixtral(name: str, config: Config) -> Architecture:
    experts = Experts(
        count=config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        inner=config["intermediate_size"],
        normalises=True,
    )
    window = config.get("sliding_window")
    layers = tuple(
        LayerShape(window=window, experts=experts) for _ in range(config["num_hidden_layers"])
    )
    return Architecture(**_shared(name, config), layers=layers, ropes=(_rope(config),))


def _smollm3(name: str, config: Config) -> Architecture:
    # 1 where positions matter, as the setting's own documentation has it
    turns = config.get("no_rope_layers") or [1] * config["num_hidden_layers"]
    layers = tuple(
        LayerShape(window=layer.window, rope=0 if turned else None)
        for layer, turned in zip(_layers(config, config.get("sliding_window")), turns, strict=True)
    )
    return Architecture(**_shared(name, config), layers=layers, ropes=(_rope(config),))


def _gemma_shared(name: str, config: Config) -> dict[str, Any]:
    shared = _shared(name, config)
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    shared["activation"] = _activation(activation)
    shared["ties_embeddings"] = config.get("tie_word_embeddings", True)
    shared["norm_offset"] = 1.0
    shared["embedding_scale"] = math.sqrt(config["hidden_size"])
    return shared


def _gemma(name: str, config: Config) -> Architecture:
    return Architecture(
        **_gemma_shared(name, config), layers=_layers(config), ropes=(_rope(config),)
    )


def _gemma2(name: str, config: Config) -> Architecture:
    shared = _gemma_shared(name, config)
    shared["attention_scale"] = 1.0 / math.sqrt(config["query_pre_attn_scalar"])
    return Architecture(
        **shared,
        layers=_gemma_layers(config, every=2),
        ropes=(_rope(config),),
        has_post_norms=True,
        attention_softcap=config.get("attn_logit_softcapping"),
        logits_softcap=config.get("final_logit_softcapping"),
    )


def _gemma3(name: str, config: Config) -> Architecture:
    shared = _gemma_shared(name, config)
    shared["attention_scale"] = 1.0 / math.sqrt(config["query_pre_attn_scalar"])
    layers = tuple(
        LayerShape(window=layer.window, rope=0 if layer.window is None else 1)
        for layer in _gemma_layers(config, every=config.get("sliding_window_pattern", 6))
    )
    local = config.get("rope_local_base_freq")
    nearby = {**config, "rope_scaling": None, "rope_theta": local} if local else config
    return Architecture(
        **shared,
        layers=layers,
        ropes=(_rope(config, kind="full_attention"), _rope(nearby, kind="sliding_attention")),
        has_qk_norm=True,
        has_post_norms=True,
        attention_softcap=config.get("attn_logit_softcapping"),
        logits_softcap=config.get("final_logit_softcapping"),
    )


def _gemma_layers(config: Config, *, every: int) -> tuple[LayerShape, ...]:
    """Each layer at a multiple of `every` sees everything, the others a window."""
    if config.get("layer_types"):
        return _layers(config, config["sliding_window"])
    return tuple(
        LayerShape(window=None if (index + 1) % every == 0 else config["sliding_window"])
        for index in range(config["num_hidden_layers"])
    )


_FAMILIES: dict[str, Callable[[str, Config], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "Qwen2MoeForCausalLM": _qwen_experts,
    "Qwen3MoeForCausalLM": _qwen_experts,
    "MixtralForCausalLM": _mixtral,
    "SmolLM3ForCausalLM": _smollm3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
