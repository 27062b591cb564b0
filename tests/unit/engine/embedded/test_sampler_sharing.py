"""How samples share the sampler: turns, memory, cancels, faults."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.sample_works import lora, prompt_of, run, statistics, work
from tests.numerics.small_models import make_model
from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.engine.base import SampleEvent, SampleOutcome, SampleTokens, SampleWork, WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler, SamplerSettings
from tinsmith.engine.embedded.prefill_queue import MOST_PREFILLING
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.lora import LoraLayout
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import ClosedError, NotFoundError, ValidationError
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams
from tinsmith.types.requests import SampleRequest

C = CHUNK_TOKENS
W = WeightsId("w")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_base_model(folder, dtype=torch.float32)


@pytest.fixture
def sampler(model: Transformer, folder: Path) -> BatchedSampler:
    return BatchedSampler(model, tokenizer_folder=folder)


def _outcomes(events: list[SampleEvent]) -> dict[str, SampleOutcome]:
    return {event.work_id: event for event in events if isinstance(event, SampleOutcome)}


def test_waiting_samples_allocate_no_result_memory(sampler: BatchedSampler) -> None:
    """Many may wait, each with a long prompt and many questions about it."""
    prompt, k, waiting = prompt_of(400), 100, 50
    asked: dict[str, Any] = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": k,
        "prompt_alt_tokens_k": k,
    }
    works = [work(str(number), prompt, **asked) for number in range(waiting)]

    tracemalloc.start()
    for one in works:
        sampler.admit(one)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    prompt_logprobs = len(prompt) * k * (np.int32().nbytes + np.float32().nbytes)
    assert taken < waiting * prompt_logprobs / 10


def _errors(sampler: BatchedSampler) -> dict[str, BaseException | None]:
    """How all samples end."""
    found: dict[str, BaseException | None] = {}
    while sampler.samples:
        for work_id, outcome in _outcomes(sampler.step()).items():
            assert work_id not in found
            found[work_id] = outcome.error
    return found


def _is_empty(sampler: BatchedSampler) -> bool:
    """Nothing is held but prompts that may come again."""
    held = statistics(sampler)
    return (
        held.taken_bytes == held.waiting == held.prefilling == held.running == sampler.samples == 0
    )


def test_a_step_without_samples_returns_no_events(sampler: BatchedSampler) -> None:
    """It returns at once."""
    assert sampler.step() == []


def test_sequences_of_a_sample_share_one_prefill(sampler: BatchedSampler) -> None:
    """The prompt is computed once, and each sequence has chances of its own."""
    prompt = prompt_of(C + 9)

    found = run(sampler, work(prompt=prompt, num_samples=5, max_tokens=6))["it"]

    assert statistics(sampler).prefilled_tokens == len(prompt)
    assert statistics(sampler).sampled_tokens == 5 * 6
    assert len({tuple(one.tokens) for one in found.sequences}) == 5
    assert found.prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_of_one_prompt_share_its_prefill(sampler: BatchedSampler, samples: int) -> None:
    """Those that come together wait for the first to have read it; hits are told."""
    prompt = prompt_of(2 * C + 9)
    works = [work(str(n), prompt, seed=n, num_samples=samples) for n in range(4)]

    found = run(sampler, *works)
    later = run(sampler, work("later", prompt, num_samples=samples))["later"]

    assert statistics(sampler).prefilled_tokens == len(prompt)
    assert [found[str(n)].prompt_cache_hit_tokens for n in range(4)] == [0, *[len(prompt)] * 3]
    assert later.prompt_cache_hit_tokens == len(prompt)


def test_prefill_starts_after_a_prefix_shared_with_another_prompt(sampler: BatchedSampler) -> None:
    """By whole chunks, also while the other is still being read."""
    start = prompt_of(2 * C)
    one, other = start + prompt_of(C, 1), start + prompt_of(20, 2)

    found = run(sampler, work("one", one), work("other", other))
    third = run(sampler, work("third", start + prompt_of(30, 3)))["third"]

    assert found["other"].prompt_cache_hit_tokens == 2 * C
    assert third.prompt_cache_hit_tokens == 2 * C
    assert statistics(sampler).prefilled_tokens == len(one) + 20 + 30


def test_positions_with_prompt_logprobs_are_not_taken_from_the_prefix_cache(
    sampler: BatchedSampler,
) -> None:
    """What it is about is computed; what comes before may be reused."""
    prompt = prompt_of(2 * C + 9)
    run(sampler, work("first", prompt))

    asked = run(sampler, work("all", prompt, prompt_logprobs=True))["all"]
    last = run(sampler, work("last", prompt, prompt_logprobs=True, prompt_logprobs_last_n=5))

    assert asked.prompt_cache_hit_tokens == 0
    assert last["last"].prompt_cache_hit_tokens == 2 * C
    assert asked.prompt_logprobs is not None
    assert last["last"].prompt_logprobs == [*[None] * (2 * C + 4), *asked.prompt_logprobs[-5:]]


def test_a_long_prompt_does_not_delay_others(model: Transformer) -> None:
    """Running sequences get a token in every step, and short prompts are read in between."""
    settings = SamplerSettings(busy_prefill_tokens=C, prefill_tokens=C)
    sampler = BatchedSampler(model, settings=settings)
    sampler.admit(work("running", max_tokens=40, is_streamed=True))
    sampler.step()
    sampler.admit(work("long", prompt_of(3 * C), is_streamed=True))
    sampler.admit(work("short", prompt_of(9), is_streamed=True))

    first: dict[str, int] = {}
    for step in range(8):
        told = {event.work_id for event in sampler.step()}
        assert "running" in told
        for name in told:
            first.setdefault(name, step)

    assert first["short"] == 1  # the long one had the first turn
    assert first["long"] == 3


def test_many_long_prompts_delay_a_short_one_by_one_step(model: Transformer) -> None:
    """It is read between them, and not when one of them is done."""
    settings = SamplerSettings(busy_prefill_tokens=C, prefill_tokens=C)
    sampler = BatchedSampler(model, settings=settings)
    for index in range(MOST_PREFILLING + 2):
        prompt = prompt_of(3 * C, index)
        sampler.admit(work(f"long-{index}", prompt, max_tokens=1, is_streamed=True))
    sampler.step()
    sampler.admit(work("short", prompt_of(9), max_tokens=1, is_streamed=True))

    first: dict[str, int] = {}
    step = 0
    while sampler.samples:
        step += 1
        for event in sampler.step():
            first.setdefault(event.work_id, step)

    assert first.pop("short") <= MOST_PREFILLING + 1 < min(first.values())


def test_streamed_tokens_equal_those_of_the_result(sampler: BatchedSampler) -> None:
    """In order, one at a time, with their log-probabilities; others tell only their end."""
    sampler.admit(work("streamed", num_samples=2, max_tokens=9, is_streamed=True))
    sampler.admit(work("quiet", max_tokens=9))
    told: dict[int, list[SampleTokens]] = {0: [], 1: []}
    outcomes: dict[str, SampleOutcome] = {}
    while sampler.samples:
        events = sampler.step()
        outcomes |= _outcomes(events)
        for event in events:
            if isinstance(event, SampleTokens):
                assert event.work_id == "streamed"
                assert "streamed" not in _outcomes(events) or len(event.tokens) == 1
                told[event.sequence].append(event)

    result = outcomes["streamed"].result
    assert result is not None
    for index, sequence in enumerate(result.sequences):
        assert [token for one in told[index] for token in one.tokens] == sequence.tokens
        assert [lp for one in told[index] for lp in one.logprobs] == sequence.logprobs


# Ends


def test_a_sequence_ends_at_its_token_limit_or_its_stop(sampler: BatchedSampler) -> None:
    """The stop is its last token; without a limit it goes to the end of the context."""
    free = run(sampler, work("free", max_tokens=30))["free"].sequences[0]
    stop = free.tokens[11]
    until = free.tokens.index(stop) + 1
    prompt = prompt_of(500)

    stopped = run(sampler, work("stopped", max_tokens=30, stop=[stop]))["stopped"].sequences[0]
    endless = run(sampler, work("endless", prompt, max_tokens=None))["endless"].sequences[0]

    assert (free.stop_reason, len(free.tokens)) == ("length", 30)
    assert (stopped.stop_reason, stopped.tokens) == ("stop", free.tokens[:until])
    assert (endless.stop_reason, len(endless.tokens)) == ("length", 512 - 500)


def test_stop_strings_are_found_in_the_sampled_text(sampler: BatchedSampler, folder: Path) -> None:
    """By the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    free = run(sampler, work("free", max_tokens=60))["free"].sequences[0]
    text = tokenizer.decode(free.tokens, skip_special_tokens=False)
    clean = [place for place in range(len(text) - 1) if "\ufffd" not in text[place : place + 2]]
    stop = text[clean[-1] : clean[-1] + 2]
    until = next(
        count
        for count in range(1, 61)
        if stop in tokenizer.decode(free.tokens[:count], skip_special_tokens=False)
    )

    found = run(sampler, work("it", max_tokens=60, stop=stop))["it"].sequences[0]

    assert (found.stop_reason, found.tokens) == ("stop", free.tokens[:until])


def test_the_eos_token_is_a_stop_unless_stops_are_given(sampler: BatchedSampler) -> None:
    """The model's end token is 2; sampled hot it comes before long."""
    options: dict[str, Any] = {"temperature": 100.0, "max_tokens": 60, "num_samples": 40}

    ended = run(sampler, work("ended", stop=None, **options))["ended"]
    free = run(sampler, work("free", **options))["free"]

    reasons = Counter(one.stop_reason for one in ended.sequences)
    assert reasons["stop"] > 0
    for one, other in zip(ended.sequences, free.sequences, strict=True):
        assert (one.tokens[-1] == 2) == (one.stop_reason == "stop")
        assert other.tokens[: len(one.tokens)] == one.tokens
        assert other.stop_reason == "length"


def test_invalid_sampling_work_is_rejected(model: Transformer) -> None:
    """At once, with a message, and nothing stays behind."""
    sampler = BatchedSampler(
        model, settings=SamplerSettings(kv_bytes=200 * 512)
    )  # about 150 tokens
    image = ModelInput(
        [EncodedTextChunk([1]), ImageChunk(data=b"x", format="png", expected_tokens=1)]
    )
    with pytest.raises(NotFoundError):
        sampler.admit(work(weights="unknown"))
    for bad in (
        work(stop="text"),
        work(num_samples=0),
        work(prompt=prompt_of(512)),
        work(prompt=[1, 300]),
        work(prompt=[-1]),
        work(max_tokens=400),
        work(prompt=prompt_of(400)),
    ):
        with pytest.raises(ValidationError):
            sampler.admit(bad)
    request = SampleRequest(prompt=image, sampling_params=SamplingParams(max_tokens=1))
    with pytest.raises(ValidationError):
        sampler.admit(SampleWork(work_id="i", base_model="m", weights_id=None, request=request))

    assert _is_empty(sampler)
    assert sampler.step() == []


# Memory


def test_memory_is_bounded_and_every_sample_completes(model: Transformer) -> None:
    """Sequences wait for room; prompts that may come again make it."""
    limit = 400 * 512  # a token takes 512 bytes
    sampler = BatchedSampler(model, settings=SamplerSettings(kv_bytes=limit))
    for index in range(8):
        prompt = prompt_of(30 + 11 * index, index)
        sampler.admit(work(str(index), prompt, num_samples=1 + 3 * (index % 2), max_tokens=20))

    ended: set[str] = set()
    most_running = 0
    while sampler.samples:
        outcomes = _outcomes(sampler.step())
        ended |= {name for name, outcome in outcomes.items() if outcome.error is None}
        held = statistics(sampler)
        assert held.taken_bytes + held.cached_bytes <= limit
        most_running = max(most_running, held.running)

    assert len(ended) == 8
    assert 1 < most_running < 8
    assert _is_empty(sampler)


def test_a_cached_prompt_does_not_block_the_next_sample(model: Transformer) -> None:
    """What would be reused takes the room that is needed: it is read again instead."""
    sampler = BatchedSampler(model, settings=SamplerSettings(kv_bytes=560 * 512))
    prompt = prompt_of(200)
    run(sampler, work("first", prompt, max_tokens=2))

    found = run(sampler, work("second", prompt, max_tokens=180))

    assert len(found["second"].sequences[0].tokens) == 180


def test_samples_start_in_order(model: Transformer) -> None:
    """One that needs much is not passed by smaller ones for ever."""
    sampler = BatchedSampler(model, settings=SamplerSettings(kv_bytes=400 * 512))
    sampler.admit(work("running", max_tokens=30))
    sampler.step()
    sampler.admit(work("large", prompt_of(100), max_tokens=120, is_streamed=True))
    for index in range(3):
        sampler.admit(work(f"small-{index}", max_tokens=3, is_streamed=True))

    order: list[str] = []
    while sampler.samples:
        order += [one.work_id for one in sampler.step() if isinstance(one, SampleTokens)]

    assert list(dict.fromkeys(order)) == ["large", "small-0", "small-1", "small-2"]


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_a_cancelled_sample_is_gone_at_the_next_step(sampler: BatchedSampler, steps: int) -> None:
    """Waiting, being read or running: nothing is told of it and its memory is free."""
    sampler.admit(work("it", prompt_of(3 * C), num_samples=3, max_tokens=50, is_streamed=True))
    sampler.admit(work("single", prompt_of(3 * C, 1), max_tokens=50, is_streamed=True))
    for _ in range(steps):
        sampler.step()

    sampler.cancel("it")
    sampler.cancel("single")
    sampler.cancel("unknown")

    assert sampler.samples == 0
    assert sampler.step() == []
    assert _is_empty(sampler)
    run(sampler, work("it"))  # the id may come again


def test_a_sample_cancelled_while_a_step_runs_has_no_outcome(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if that step ended it."""
    sampler = BatchedSampler(model)
    sampler.admit(work("it", max_tokens=1))
    sampler.admit(work("other", prompt_of(6), max_tokens=1))
    logits = model.head.logits

    def cancelling(*args: Any) -> torch.Tensor:
        sampler.cancel("it")
        return logits(*args)

    monkeypatch.setattr(model.head, "logits", cancelling)

    assert [event.work_id for event in sampler.step()] == ["other"]
    assert _is_empty(sampler)


def test_admitting_the_same_id_twice_gives_one_sample(sampler: BatchedSampler) -> None:
    """Also while it runs."""
    sampler.admit(work())
    sampler.admit(work(seed=9))
    sampler.step()
    sampler.admit(work())

    assert sampler.samples == 1
    assert list(_errors(sampler)) == ["it"]


# Weights


def test_dropped_weights_still_serve_the_samples_that_use_them(
    sampler: BatchedSampler, model: Transformer
) -> None:
    """New samples are refused; those admitted end as they would have."""
    sampler.add_weights(W, lora(model, 1))
    expected = run(sampler, work("expected", weights="w", max_tokens=20))["expected"]
    sampler.admit(work("running", weights="w", max_tokens=20))
    sampler.step()
    sampler.admit(work("waiting", weights="w", max_tokens=20))

    sampler.drop_weights(W)
    sampler.drop_weights(WeightsId("unknown"))

    with pytest.raises(NotFoundError):
        sampler.admit(work("late", weights="w"))
    found: dict[str, SampleOutcome] = {}
    while sampler.samples:
        found |= _outcomes(sampler.step())
    for outcome in found.values():
        assert outcome.result is not None
        assert outcome.result.sequences[0].tokens == expected.sequences[0].tokens
    assert statistics(sampler).cached_bytes == 0  # what was read with them goes too


def test_replaced_weights_do_not_reuse_the_prefix_cache_of_the_old_ones(
    sampler: BatchedSampler, model: Transformer
) -> None:
    """Old weights beside new ones are apart from each other."""
    prompt = prompt_of(C + 5)
    sampler.add_weights(W, lora(model, 2))
    expected = run(sampler, work("expected", prompt, "w"))["expected"]
    sampler.add_weights(W, lora(model, 1))
    old = run(sampler, work("old", prompt, "w"))["old"]

    sampler.add_weights(W, lora(model, 2))
    new = run(sampler, work("new", prompt, "w"))["new"]

    assert new.prompt_cache_hit_tokens == 0
    assert new.sequences == expected.sequences != old.sequences


# Faults


def test_weights_that_produce_nan_fail_only_their_own_samples(
    sampler: BatchedSampler, model: Transformer
) -> None:
    """The error says what to do; others are as without them."""
    expected = run(sampler, work("it", num_samples=2))["it"]
    layout = LoraLayout(model.architecture, 2, attention=True, mlp=False, unembed=False)
    broken = torch.full((layout.size,), torch.nan)
    sampler.add_weights(W, layout.fused(broken, model.dtype, is_frozen=True))
    sampler.admit(work("bad", weights="w", num_samples=2))
    sampler.admit(work("asking", weights="w", prompt_logprobs=True))
    sampler.admit(work("it", num_samples=2))

    found: dict[str, SampleOutcome] = {}
    while sampler.samples:
        found |= _outcomes(sampler.step())

    assert isinstance(found["bad"].error, ValidationError)
    assert isinstance(found["asking"].error, ValidationError)
    assert found["it"].result is not None
    assert found["it"].result.sequences == expected.sequences
    assert _is_empty(sampler)


@pytest.mark.parametrize("when", ["reading", "running"])
def test_a_sample_that_cannot_be_computed_fails_alone(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is found by computing the pack in parts; the others' numbers stay what they are."""
    names = [str(index) for index in range(6)]
    expected = {
        name: run(BatchedSampler(model), work(name, prompt_of(20, int(name)), num_samples=2))[name]
        for name in names
    }
    sampler = BatchedSampler(model)
    for name in names:
        sampler.admit(work(name, prompt_of(20, int(name)), num_samples=2))
    if when == "running":
        sampler.step()
    hidden = model.forward
    poison = prompt_of(20, 3)[5] if when == "reading" else expected["3"].sequences[1].tokens[0]
    victims = {
        name
        for name in names
        if poison in prompt_of(20, int(name))
        or (when == "running" and poison in [s.tokens[0] for s in expected[name].sequences])
    }

    def failing(tokens_T: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if poison in tokens_T and failing_now:
            raise MemoryError("no room for these rows")
        return hidden(tokens_T, *args, **options)

    failing_now = [True]
    monkeypatch.setattr(model, "forward", failing)
    found = _outcomes(sampler.step())
    failing_now.clear()
    while sampler.samples:
        found |= _outcomes(sampler.step())

    assert "3" in victims
    for name in names:
        if isinstance(found[name].error, MemoryError):
            assert name in victims
        else:
            result = found[name].result
            assert result is not None
            assert result.sequences == expected[name].sequences
    assert isinstance(found["3"].error, MemoryError)
    assert len(victims) < len(names)
    assert _is_empty(sampler)


def test_all_samples_can_be_failed_with_an_error(sampler: BatchedSampler) -> None:
    """As when the engine closes; samples after that run as ever."""
    sampler.admit(work("running", max_tokens=50, num_samples=2))
    sampler.step()
    sampler.admit(work("reading", prompt_of(3 * C)))
    sampler.step()
    sampler.admit(work("new"))
    error = ClosedError("closed")

    events = _outcomes(sampler.fail_all(error))

    assert {name: outcome.error for name, outcome in events.items()} == dict.fromkeys(
        ["running", "reading", "new"], error
    )
    assert _is_empty(sampler)
    run(sampler, work("running"))


def test_samples_can_be_added_and_cancelled_from_other_threads_during_a_step(
    sampler: BatchedSampler,
) -> None:
    """Each that is not cancelled has one outcome, and at the end nothing is left."""
    count = 40
    is_done = threading.Event()

    def come_and_go() -> None:
        for index in range(count):
            sampler.admit(work(f"kept-{index}", prompt_of(1 + index), max_tokens=3))
            sampler.admit(work(f"gone-{index}", prompt_of(1 + index), max_tokens=500 - 60))
            if index:
                sampler.cancel(f"gone-{index - 1}")
        sampler.cancel(f"gone-{count - 1}")
        is_done.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    ended: Counter[str] = Counter()
    while not is_done.is_set() or sampler.samples:
        ended.update(_outcomes(sampler.step()).keys())
    thread.join()
    sampler.step()

    assert {name for name in ended if name.startswith("kept")} == {
        f"kept-{index}" for index in range(count)
    }
    assert set(ended.values()) == {1}
    assert _is_empty(sampler)
