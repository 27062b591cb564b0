"""Models that `transformers` computes, with our attention and adapters in them."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from tests.numerics.small_models import OTHERS, VOCABULARY, make_model
from tinsmith.checkpoints.format import read_adapter
from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    PassWork,
    SampleOutcome,
    SampleWork,
    StepWork,
    WeightsId,
)
from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings
from tinsmith.engine.model.kv_cache import CachedAttention, CachedSegment, KvBuffer, SequenceKv
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.lora import LoraLayout, LoraSpan
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer
from tinsmith.engine.model.transformers_model import TransformersModel
from tinsmith.errors import BaseModelFormatError
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)
from tinsmith.types.requests import SampleRequest

LENGTHS = [19, 1, 30]
STRETCHES = [PackedSegment(0, 19), PackedSegment(19, 20), PackedSegment(20, 50)]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
A = AdapterId("a")
WAIT_S = 60
Sampled: TypeAlias = tuple[list[int], list[float]]
"""Tokens, and the log-probability of each."""


@pytest.fixture(scope="module", params=OTHERS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Transformer]:
    """A model as `transformers` has it, and as we do."""
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, request.param), load_base_model(folder)


def _tokens(count: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=chance)


def test_logits_match_transformers(both: tuple[Any, Transformer]) -> None:
    """Of each sequence of a pack, longer than the windows."""
    theirs, ours = both
    tokens = _tokens(50)

    with torch.no_grad():
        logits = ours.head.logits(ours.forward(tokens, POSITIONS, PackedAttention(STRETCHES)))
        wanted = torch.cat(
            [theirs(tokens[one.start : one.end][None]).logits[0] for one in STRETCHES]
        )

    assert isinstance(ours, TransformersModel)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def test_decoding_with_a_kv_cache_equals_a_single_prefill(both: tuple[Any, Transformer]) -> None:
    """A prompt in chunks, a shared run and single tokens give what one pass over all gives."""
    _, ours = both
    tokens, positions = _tokens(40), torch.arange(40)
    keys = SequenceKv(None, _run(ours))
    rows: list[Tensor] = []

    with torch.no_grad():
        wanted = ours.forward(tokens, positions, PackedAttention([PackedSegment(0, 40)]))
        for number, here in enumerate(positions.split([16, 9, 1, 1, 13])):
            if number == 2:
                keys = SequenceKv(keys.own, _run(ours))
            attention = CachedAttention([CachedSegment(0, len(here), keys, keys.own.length)])
            rows.append(ours.forward(tokens[here], here, attention))

    torch.testing.assert_close(torch.cat(rows), wanted, rtol=1e-4, atol=1e-5)


def _run(model: Transformer) -> KvBuffer:
    return KvBuffer(model.architecture, model.dtype, model.device)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_match_peft(
    both: tuple[Any, Transformer], recomputes: bool, tmp_path: Path
) -> None:
    """For every layer that an adapter sits on, under the name that `peft` has for it."""
    plain, ours = both
    layout, flat = _adapter(ours)
    tokens, gradients = _tokens(50), torch.randn(50, ours.architecture.hidden)
    theirs, layers = _with_peft(plain, tmp_path, layout, flat)
    scale = float(getattr(plain.config, "logit_scale", 1.0))
    scale /= float(getattr(plain.config, "logits_scaling", 1.0))
    for one in STRETCHES:
        hidden = theirs.base_model.model.base_model(tokens[one.start : one.end][None])[0][0]
        (hidden * scale * gradients[one.start : one.end]).sum().backward()

    lora = layout.fused(flat, torch.float32, gradients=torch.zeros_like(flat))
    spans = [LoraSpan(0, 50, lora)]
    rows = ours.forward(tokens, POSITIONS, PackedAttention(STRETCHES), spans, recomputes=recomputes)
    rows.backward(gradients)

    found = layout.factors(lora.gradients())
    assert len(found) == len(layers) >= 8
    for name, (a_RI, b_OR) in found.items():
        for ours_, theirs_ in ((a_RI, layers[name].lora_A), (b_OR, layers[name].lora_B)):
            wanted = theirs_["default"].weight.grad
            torch.testing.assert_close(
                ours_, wanted, rtol=1e-3, atol=float(wanted.abs().max()) * 1e-4
            )


def _adapter(model: Transformer) -> tuple[LoraLayout, Tensor]:
    layout = LoraLayout(model.architecture, 4, attention=True, mlp=True, unembed=False)
    chance = torch.Generator().manual_seed(1)
    return layout, layout.fresh("1") + 0.02 * torch.randn(layout.size, generator=chance)


def _with_peft(
    plain: Any, folder: Path, layout: LoraLayout, flat: Tensor
) -> tuple[Any, dict[str, Any]]:
    """A copy of the model with the same adapter on it, and the layers that have it."""
    import peft

    plain.save_pretrained(folder)
    copy = type(plain).from_pretrained(folder)
    factors = layout.factors(flat)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=list(factors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of layers that are Conv1D
        theirs = peft.get_peft_model(copy, config)
    named = dict(theirs.named_modules())
    layers = {name: named[f"base_model.model.{name}"] for name in factors}
    with torch.no_grad():
        for name, (a_RI, b_OR) in factors.items():
            layers[name].lora_A["default"].weight.copy_(a_RI)
            layers[name].lora_B["default"].weight.copy_(b_OR)
    return theirs, layers


def test_passes_of_several_threads_do_not_interfere(tmp_path: Path) -> None:
    """Each has its own sequences and adapter."""
    make_model(tmp_path, "GPTNeoX")
    model = load_base_model(tmp_path)
    layout, flat = _adapter(model)
    given = [(_tokens(12, seed), layout.fused(flat * seed, torch.float32)) for seed in range(4)]
    found: list[list[Tensor]] = [[] for _ in given]
    start = threading.Barrier(len(given))

    def one(number: int) -> Tensor:
        tokens, lora = given[number]
        attention = PackedAttention([PackedSegment(0, 5), PackedSegment(5, 12)])
        positions = torch.tensor([*range(5), *range(7)])
        with torch.no_grad():
            return model.forward(tokens, positions, attention, [LoraSpan(0, 12, lora)])

    def many(number: int) -> None:
        start.wait(WAIT_S)
        found[number] += [one(number) for _ in range(10)]

    wanted = [one(number) for number in range(len(given))]
    threads = [threading.Thread(target=many, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [len(rows) for rows in found] == [10] * len(given)
    for rows, right in zip(found, wanted, strict=True):
        for row in rows:
            torch.testing.assert_close(row, right)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("Mamba", {}, "not all of its layers are attention"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
        ("Bloom", {}, "its attention"),
    ],
)
def test_the_error_names_an_unsupported_kind_of_attention(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    make_model(tmp_path, family, **settings)

    with pytest.raises(BaseModelFormatError, match=f"{family}ForCausalLM.*{why}"):
        load_base_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mismatch_below_rounding_error_is_rejected_too(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """A part of Gemma 3n looks at the ids of tokens, which its decoder does not get from us."""
    kinds = ["sliding_attention", "full_attention"] * 2
    make_model(
        tmp_path,
        "Gemma3n",
        num_hidden_layers=4,
        layer_types=kinds,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        intermediate_size=[80] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
    )

    with pytest.raises(BaseModelFormatError, match=r"Gemma3nForCausalLM.*relative error"):
        load_base_model(tmp_path, dtype=dtype)


@pytest.mark.parametrize("family", OTHERS)
def test_models_are_loaded_in_bfloat16(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)

    assert load_base_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_model_whose_converted_logits_differ_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because what scales its logits has a name that we would not know."""
    from tinsmith.engine.model.load_with_transformers import _Conversion

    make_model(tmp_path, "Granite")
    monkeypatch.setattr(_Conversion, "_logits_scale", lambda *_: 1.0)

    with pytest.raises(BaseModelFormatError, match="relative error 200"):
        load_base_model(tmp_path)


def test_the_error_names_an_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["OddForCausalLM"], "model_type": "odd"}'
    )

    with pytest.raises(BaseModelFormatError, match="OddForCausalLM"):
        load_base_model(tmp_path)


def test_without_transformers_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Phi3ForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(BaseModelFormatError, match=r"Phi3ForCausalLM.*tinsmith\[server\]"):
        load_base_model(tmp_path)


@pytest.mark.parametrize("family", ["GPT2", "Phi3"])
def test_the_engine_trains_saves_and_samples_a_transformers_model(
    family: str, tmp_path: Path
) -> None:
    """The loss falls, `peft` loads what is saved, and samples are those of `generate` with it."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    make_model(base, family, eos_token_id=None)
    saved.mkdir()
    prompt = [5, 6, 7, 8, 9]

    losses, (tokens, logprobs) = asyncio.run(_trained(base, saved, prompt))

    assert losses[-1] < 0.9 * losses[0]
    wanted, wanted_logprobs = _generated(base, saved, prompt)
    assert tokens == wanted
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)
    config = read_adapter(saved).lora_config()
    assert (config.train_attn, config.train_mlp, config.train_unembed) == (True, True, False)


async def _trained(base: Path, saved: Path, prompt: list[int]) -> tuple[list[float], Sampled]:
    tokens = [*prompt, *range(100, 120)]
    inputs: dict[str, Any] = {"target_tokens": [*tokens[1:], 120], "weights": [1.0] * len(tokens)}
    data = (Datum(ModelInput.from_ints(tokens), inputs),)
    work = PassWork(work_id="p", adapter_id=A, data=data, loss_fn="cross_entropy")
    step = StepWork(work_id="s", adapter_id=A, params=AdamParams(learning_rate=0.02))
    lora = LoraConfig(rank=4, seed=1, train_unembed=False)
    spec = AdapterSpec(adapter_id=A, base_model="base", lora=lora, optimizer=AdamOptimizerConfig())
    models = [EmbeddedModel(name="base", folder=base)]
    async with EmbeddedEngine(models, EmbeddedSettings(threads=1, dtype="float32")) as engine:
        await engine.create_adapter(spec)
        losses: list[float] = []
        for _ in range(12):
            passed, stepped = await engine.train([work, step])
            assert (passed.error, stepped.error) == (None, None)
            result: Any = passed.result
            losses.append(result.metrics["loss:sum"])
        await engine.save_adapter(A, saved, AdapterParts.WEIGHTS)
        weights_id = WeightsId("weights")
        await engine.load_weights(weights_id, "base", saved)
        params = SamplingParams(max_tokens=12, temperature=0.0)
        request = SampleRequest(prompt=ModelInput.from_ints(prompt), sampling_params=params)
        engine.admit(
            SampleWork(work_id="w", base_model="base", weights_id=weights_id, request=request)
        )
        return losses, await asyncio.wait_for(_sampled(engine), WAIT_S)


async def _sampled(engine: EmbeddedEngine) -> Sampled:
    while True:
        for event in await engine.step_sampler():
            if isinstance(event, SampleOutcome):
                assert event.result is not None, event.error
                sequence: Any = event.result.sequences[0]
                return list(sequence.tokens), list(sequence.logprobs)


def _generated(base: Path, saved: Path, prompt: list[int]) -> Sampled:
    import peft
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of layers that are Conv1D
        model: Any = peft.PeftModel.from_pretrained(plain, str(saved))
    given = torch.tensor([prompt])
    made = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=12,
        do_sample=False,
    )
    tokens = made[0, len(prompt) :]
    with torch.no_grad():
        logprobs = model(made).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()
