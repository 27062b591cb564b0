"""The forward and its attention, against `transformers` and the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.numerics.small_models import FAMILIES, VOCABULARY, change_config, make_model
from tinsmith.engine.model.attention import masked_attention
from tinsmith.engine.model.kv_cache import CachedAttention, CachedSegment, KvBuffer, SequenceKv
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer
from tinsmith.engine.model.transformers_model import TransformersModel
from tinsmith.errors import BaseModelFormatError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
OLDER: list[tuple[str, dict[str, Any], list[str], dict[str, Any]]] = [
    ("Llama", {"mlp_bias": True}, [], {}),
    ("Llama", {}, ["rope_parameters", "rms_norm_eps"], {}),
    ("Llama", {}, [], {"layer_types": ["full_attention"] * 2, "sliding_window": 7}),
    ("Mistral", {}, [], {"layer_types": ["sliding_attention", "full_attention"]}),
    ("Mixtral", {}, ["rope_parameters", "rms_norm_eps"], {}),
    ("Qwen2", {}, [], {"attention_bias": False}),
    ("Qwen3", {**SLIDING, "max_window_layers": 1}, ["layer_types"], {}),
    ("Qwen3Moe", {**SLIDING, "max_window_layers": 1}, [], {}),
    ("Qwen2Moe", {**SLIDING, "max_window_layers": 1}, ["layer_types"], {}),
    ("SmolLM3", {"no_rope_layers": None, "num_hidden_layers": 4}, ["no_rope_layers"], {}),
    ("SmolLM3", SLIDING, ["layer_types", "rope_parameters"], {}),
    ("Gemma", {}, ["hidden_activation"], {"hidden_act": "gelu"}),
    ("Gemma", {}, ["hidden_activation"], {"hidden_act": "silu"}),
    ("Gemma", {"tie_word_embeddings": False}, ["tie_word_embeddings"], {}),
    ("Gemma2", {}, ["attn_logit_softcapping", "final_logit_softcapping", "layer_types"], {}),
    ("Gemma3", {}, ["layer_types", "rope_parameters"], {"sliding_window_pattern": 2}),
    (
        "Gemma3",
        {},
        ["rope_parameters"],
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
]
"""By family: what a model is made with, and what of its configuration is left out or another."""
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"rope_scaling": YARN}),
    ("Qwen2", {"rope_scaling": YARN}),
    ("Qwen3", {"rope_scaling": YARN}),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("Llama", {"hidden_act": "relu"}),
    ("Gemma3", {"attn_logit_softcapping": 3.0}),
]
"""By family: what our own code does not compute."""


def _tokens(count: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=chance)


def _pack(lengths: list[int]) -> tuple[list[PackedSegment], torch.Tensor]:
    """Stretches of these lengths one after another, and the positions of their rows."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [PackedSegment(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    return segments, torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, tmp_path: Path) -> None:
    """Each family's own differences are computed: norms, biases, windows, caps, experts."""
    theirs = make_model(tmp_path, family)
    ours = load_base_model(tmp_path)
    lengths = [19, 1, 30]
    segments, positions = _pack(lengths)
    tokens = _tokens(sum(lengths))

    with torch.no_grad():
        hidden = ours.forward(tokens, positions, PackedAttention(segments))
        logits = ours.head.logits(hidden)
        wanted = torch.cat(
            [theirs(tokens[one.start : one.end][None]).logits[0] for one in segments]
        )

    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Llama-scaled", "Qwen3", "Gemma3"])
def test_distant_positions_match_transformers(family: str, tmp_path: Path) -> None:
    """Angles grow with the distance, and so does what is rounded off in their frequencies."""
    context = 131_072
    theirs = make_model(
        tmp_path, family, head_dim=64, max_position_embeddings=context, sliding_window=4096
    )
    ours = load_base_model(tmp_path)
    tokens = _tokens(40)
    positions = torch.cat([torch.arange(10), torch.arange(context - 30, context)])

    with torch.no_grad():
        hidden = ours.forward(tokens, positions, PackedAttention([PackedSegment(0, 40)]))
        seen = torch.ones(1, 40)  # else what is not a step apart counts as another sequence
        wanted = theirs(tokens[None], position_ids=positions[None], attention_mask=seen).logits[0]

    torch.testing.assert_close(ours.head.logits(hidden), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "settings", "without", "values"), OLDER)
def test_unset_configuration_fields_default_as_in_transformers(
    family: str,
    settings: dict[str, Any],
    without: list[str],
    values: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Programs write what they know of, and families differ in what they take for granted."""
    make_model(tmp_path, family, **settings)
    change_config(tmp_path, without, **values)

    ours = load_base_model(tmp_path)

    assert not isinstance(ours, TransformersModel)
    _assert_logits(ours, tmp_path)


@pytest.mark.parametrize(("family", "settings"), UNKNOWN)
def test_a_setting_that_our_code_does_not_support_falls_back_to_transformers(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    make_model(tmp_path, family, **settings)

    ours = load_base_model(tmp_path)

    assert isinstance(ours, TransformersModel)
    _assert_logits(ours, tmp_path)


def _assert_logits(ours: Transformer, folder: Path) -> None:
    """They are those of the folder's model in `transformers`, for each sequence of a pack."""
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs.eval()
    lengths = [19, 1, 30]
    segments, positions = _pack(lengths)
    tokens = _tokens(sum(lengths))
    with torch.no_grad():
        logits = ours.head.logits(ours.forward(tokens, positions, PackedAttention(segments)))
        wanted = torch.cat(
            [theirs(tokens[one.start : one.end][None]).logits[0] for one in segments]
        )
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "values", "why"),
    [
        ("Llama", {"is_causal": False}, "is_causal"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 2}, "window"),
        ("Llama", {"max_position_embeddings": None}, "max_position_embeddings = None"),
        ("Llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("Llama", {"head_dim": "16"}, "is invalid"),
        ("Mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("Qwen2", {"rope_scaling": "yarn"}, "is invalid"),
        ("Mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok = None"),
        ("Llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ("Phi3", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ("Llama", {"architectures": None}, 'has no "architectures"'),
        ("Llama", {"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_the_error_names_an_unsupported_setting(
    family: str, values: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """Models that see what comes, and files that cannot be what was meant."""
    make_model(tmp_path, family)
    change_config(tmp_path, **values)

    with pytest.raises(BaseModelFormatError, match=why):
        load_base_model(tmp_path)


@pytest.mark.parametrize(
    "family", ["Llama", "Llama-threefold", "Qwen3", "Gemma2", "Mistral", "Qwen3Moe"]
)
def test_decoding_with_a_kv_cache_equals_a_single_prefill(family: str, tmp_path: Path) -> None:
    """A prompt in chunks, a shared run and single tokens give what one pass over all gives."""
    make_model(tmp_path, family)
    model = load_base_model(tmp_path)
    tokens = _tokens(40)

    with torch.no_grad():
        wanted = model.forward(tokens, torch.arange(40), PackedAttention([PackedSegment(0, 40)]))
        found, _ = _run_cached(model, tokens, [16, 9, 1, 1, 13], shared_after=2)

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _run_cached(
    model: Transformer, tokens: torch.Tensor, chunks: list[int], shared_after: int
) -> tuple[torch.Tensor, SequenceKv]:
    """Hidden rows of a sequence that is read in chunks; after some, what was read is shared."""
    keys = SequenceKv(None, _run(model))
    rows: list[torch.Tensor] = []
    place = 0
    for number, chunk in enumerate(chunks):
        if number == shared_after:
            keys = SequenceKv(keys.own, _run(model))
        positions = torch.arange(place, place + chunk)
        attention = CachedAttention([CachedSegment(0, chunk, keys, keys.own.length)])
        rows.append(model.forward(tokens[positions], positions, attention))
        place += chunk
    return torch.cat(rows), keys


def _run(model: Transformer) -> KvBuffer:
    return KvBuffer(model.architecture, model.dtype, model.device)


@pytest.mark.parametrize("family", ["Llama", "Llama-threefold"])
def test_a_row_does_not_depend_on_other_sequences_in_the_batch(family: str, tmp_path: Path) -> None:
    """Tokens that are drawn in one step come out the same, bit for bit, alone and among others."""
    make_model(tmp_path, family)
    model = load_base_model(tmp_path)
    prompts = [_tokens(length, seed=length) for length in (5, 21, 64, 17, 3, 40, 2)]

    with torch.no_grad():
        kept = [_run_cached(model, prompt, [len(prompt)], 9)[1] for prompt in prompts]
        copies = [SequenceKv(keys.own, _run(model)) for keys in kept]
        together = _next_rows(model, copies)
        alone = [_next_rows(model, [SequenceKv(keys.own, _run(model))]) for keys in kept]

    assert torch.equal(together, torch.cat(alone))


def _next_rows(model: Transformer, sequences: list[SequenceKv]) -> torch.Tensor:
    positions = torch.tensor([keys.length for keys in sequences])
    segments = [
        CachedSegment(row, row + 1, keys, keys.own.length) for row, keys in enumerate(sequences)
    ]
    return model.forward(positions % 7 + 5, positions, CachedAttention(segments))


def _gradients(q: Any, k: Any, v: Any, out: torch.Tensor) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, generator=chance)
    return list(torch.autograd.grad((out * weights).sum(), (q, k, v)))


def test_a_shared_prefix_gives_the_results_and_gradients_of_each_sequence_in_full() -> None:
    """The parts are joined as if they had been one."""
    from tinsmith.engine.model.attention import AttentionRule

    chance = torch.Generator().manual_seed(3)
    prefix, tails = 11, [4, 4, 1, 7]
    rows = prefix + sum(tails)
    q, k, v = (
        torch.randn(rows, heads, 16, generator=chance).requires_grad_() for heads in (6, 2, 2)
    )
    segments, place = [PackedSegment(0, prefix)], prefix
    for tail in tails:
        segments.append(PackedSegment(place, place + tail, (0, prefix)))
        place += tail
    rule = AttentionRule(0.3)

    out = PackedAttention(segments).attend(0, rule, q, k, v)

    parts = [_full(q, k, v, one) for one in segments]
    wanted = torch.cat(parts)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for found, right in zip(_gradients(q, k, v, out), _gradients(q, k, v, wanted), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_partial_rope_is_left_to_transformers(tmp_path: Path) -> None:
    """Llama's own code does not heed the setting; to do so would give other numbers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    make_model(tmp_path, rope_parameters=rope)

    ours = load_base_model(tmp_path)

    assert isinstance(ours, TransformersModel)
    _assert_logits(ours, tmp_path)


class _LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return made


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("queries", [700, 300])
def test_masked_attention_matches_the_formula_without_holding_all_scores(
    softcap: float | None, window: int | None, queries: int
) -> None:
    """With its gradients; some queries are the last of more keys."""
    keys = 700
    chance = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(rows, heads, 8, generator=chance).requires_grad_()
        for rows, heads in ((queries, 4), (keys, 2), (keys, 2))
    )

    with _LargestTensor() as largest:  # type: ignore[no-untyped-call]
        out = masked_attention(q, k, v, 0.4, window, softcap)
        found = _gradients(q, k, v, out)

    scores = q.transpose(0, 1) @ k.repeat_interleave(2, 1).permute(1, 2, 0) * 0.4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    gap = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    seen = (gap >= 0) & (gap < (window or keys))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = (weights @ v.repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for one, right in zip(found, _gradients(q, k, v, wanted), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    assert largest.numbers <= 128 * keys * 4


def test_norms_with_an_offset_keep_their_precision_in_bfloat16(tmp_path: Path) -> None:
    """Gemma's weights are around 0: 1 is added to them, and must not swallow them."""
    whole = make_model(tmp_path, "Gemma")
    weight = whole.model.norm.weight.detach().to(torch.bfloat16).float()

    model = load_base_model(tmp_path, dtype=torch.bfloat16)

    assert torch.equal(model._final_norm_D, weight + 1)
    segments, positions = _pack([9])
    hidden = model.forward(_tokens(9), positions, PackedAttention(segments))
    hidden.sum().backward()
    assert hidden.dtype == torch.bfloat16


def test_the_residual_stream_is_float32_in_bfloat16_models_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way forth and back: in bfloat16 each layer would round away what others added."""
    make_model(tmp_path, "Gemma3")
    model = load_base_model(tmp_path, dtype=torch.bfloat16)
    stream: list[torch.Tensor] = []
    layer = model._layer

    def kept(index: int, x_TD: torch.Tensor, *rest: Any) -> Any:
        x_TD.retain_grad()
        stream.append(x_TD)
        return layer(index, x_TD, *rest)

    monkeypatch.setattr(model, "_layer", kept)
    segments, positions = _pack([9])

    hidden = model.forward(_tokens(9), positions, PackedAttention(segments))
    hidden.sum().backward()

    assert hidden.dtype == torch.bfloat16
    assert {one.dtype for one in stream} == {torch.float32}
    assert {one.grad.dtype for one in stream if one.grad is not None} == {torch.float32}


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, one: PackedSegment) -> torch.Tensor:
    """A stretch with all that it sees, by the formula."""
    before = list(range(*one.prefix)) if one.prefix else []
    keys = [*before, *range(one.start, one.end)]
    k, v = (x[keys].repeat_interleave(3, 1).transpose(0, 1) for x in (k, v))
    scores = q[one.start : one.end].transpose(0, 1) @ k.transpose(1, 2) * 0.3
    seen = torch.ones(one.end - one.start, len(keys)).tril(len(before)).bool()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
