"""Samples that give way to others when memory is short, and go on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.sample_works import lora, prompt_of, run, statistics, work
from tests.numerics.small_models import make_model
from tinsmith.engine.base import SampleOutcome, SampleTokens, SampleWork, WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler, SamplerSettings
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engine.model.kv_cache import PAGE_TOKENS, KvBuffer
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import SampleResponse

TOKEN_BYTES = 512
"""What a token takes in the models here."""
CONTEXT = 200
"""How long sequences become that nothing limits."""
ROOM = 450
"""For so many tokens there is memory: two sequences that nothing limits."""
W = WeightsId("w")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, max_position_embeddings=CONTEXT)
    return load_base_model(folder, dtype=torch.float32)


def _small(model: Transformer, tokens: int = ROOM) -> BatchedSampler:
    """A sampler with room for so many tokens."""
    settings = SamplerSettings(kv_bytes=tokens * TOKEN_BYTES)
    sampler = BatchedSampler(model, settings=settings)
    sampler.add_weights(W, lora(model, 1))
    return sampler


def _bits(response: SampleResponse) -> list[tuple[bytes, bytes]]:
    return [
        (one.tokens_np.tobytes(), one.logprobs_np.tobytes())
        for one in response.sequences
        if one.logprobs_np is not None
    ]


def _freely(model: Transformer, *works: SampleWork) -> dict[str, SampleResponse]:
    """The answers where memory is plenty; `test_sampler.py` compares such with each alone."""
    sampler = BatchedSampler(model)
    sampler.add_weights(W, lora(model, 1))
    found = run(sampler, *works)
    assert statistics(sampler).preemptions == 0
    return found


def _run_bounded(sampler: BatchedSampler, works: list[SampleWork]) -> tuple[dict[str, Any], int]:
    """The answers in the order in which they came, and how many sequences ran at once."""
    limit = sampler._settings.kv_bytes
    for one in works:
        sampler.admit(one)
    found, most = dict[str, SampleResponse](), 0
    while sampler.samples:
        for event in sampler.step():
            if isinstance(event, SampleOutcome):
                assert event.result is not None, event.error
                found[event.work_id] = event.result
        held = statistics(sampler)
        assert held.taken_bytes + held.cached_bytes <= limit
        most = max(most, held.running)
    held = statistics(sampler)
    assert held.taken_bytes == held.waiting == held.prefilling == held.running == 0
    return found, most


def test_many_samples_without_a_token_limit_match_samples_run_alone(
    model: Transformer,
) -> None:
    """Each may fill nearly half of the memory."""
    works = [
        work(str(number), prompt_of(40, number), seed=number, max_tokens=None)
        for number in range(7)
    ]
    expected = _freely(model, *works)
    sampler = _small(model)

    found, most = _run_bounded(sampler, works)

    assert most >= 4
    assert statistics(sampler).preemptions > 0
    for name, response in found.items():
        assert len(response.sequences[0].tokens) == CONTEXT - 40
        assert _bits(response) == _bits(expected[name])
    assert next(iter(found)) == "0"  # the oldest never gives way


def test_short_samples_without_a_token_limit_do_not_wait_for_unneeded_memory(
    model: Transformer,
) -> None:
    """As when a model ends its answers: forty of a few tokens run at once, and none is paused."""
    free = [work(str(n), prompt_of(9, n), seed=n, max_tokens=12) for n in range(40)]
    stops = {
        name: response.sequences[0].tokens[-1]
        for name, response in run(BatchedSampler(model), *free).items()
    }
    works = [
        work(str(n), prompt_of(9, n), seed=n, max_tokens=None, stop=[stops[str(n)]])
        for n in range(40)
    ]
    sampler = _small(model, 64 * 90)

    _, most = _run_bounded(sampler, works)

    assert most == 40
    assert statistics(sampler).preemptions == 0


KINDS: dict[str, dict[str, Any]] = {
    "one token": {"prompt": prompt_of(1)},
    "more than a chunk": {"prompt": prompt_of(CHUNK_TOKENS + 9), "max_tokens": 60},
    "many": {"prompt": prompt_of(50), "num_samples": 6},
    "adapter": {"prompt": prompt_of(90), "weights": "w", "num_samples": 3},
    "filtered": {"prompt": prompt_of(40), "top_k": 9, "top_p": 0.9, "temperature": 0.9},
    "asking": {
        "prompt": prompt_of(70),
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "prompt_alt_tokens_k": 2,
        "topk_sample_logprobs": 2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_sample_is_the_same(model: Transformer, kind: str) -> None:
    """Bit for bit, whatever it asks for; it came last, so it is the one that gives way."""
    asked = work(kind, **{"max_tokens": 100, **KINDS[kind]})
    expected = _freely(model, asked)[asked.work_id]
    others = [work(f"o-{n}", prompt_of(30, n), seed=n, max_tokens=None) for n in range(3)]
    sampler = _small(model)

    found, _ = _run_bounded(sampler, [*others, asked])

    assert statistics(sampler).preemptions > 0
    assert _bits(found[kind]) == _bits(expected)
    assert found[kind]._parts()[:4] == expected._parts()[:4]
    assert found[kind].prompt_alt_tokens == expected.prompt_alt_tokens


@pytest.mark.parametrize("options", [{"num_samples": 9}, {"num_samples": 9, "weights": "w"}])
def test_sequences_of_one_sample_preempt_each_other(
    model: Transformer, options: dict[str, Any]
) -> None:
    """A group without a limit, in memory for two of its sequences."""
    asked = work("it", prompt_of(20), max_tokens=None, **options)
    expected = _freely(model, asked)[asked.work_id]
    sampler = _small(model)

    found, most = _run_bounded(sampler, [asked])

    assert most > 2
    assert statistics(sampler).preemptions > 0
    assert _bits(found["it"]) == _bits(expected)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("Mistral", torch.float32), ("Gemma2", torch.float32), ("Llama", torch.bfloat16)],
)
def test_preempted_samples_of_other_models_are_the_same(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """With windows that sequences outgrow, capped scores, and rounded keys."""
    window = {} if family == "Llama" else {"sliding_window": 70}
    make_model(tmp_path, family, max_position_embeddings=CONTEXT, **window)
    other = load_base_model(tmp_path, dtype=dtype)
    token_bytes = BatchedSampler(other)._memory.token_bytes
    works = [
        work(str(n), prompt_of(20, n), seed=n, max_tokens=None, num_samples=1 + n % 2)
        for n in range(4)
    ]
    expected = run(BatchedSampler(other), *works)
    sampler = BatchedSampler(other, settings=SamplerSettings(kv_bytes=ROOM * token_bytes))

    found, _ = _run_bounded(sampler, works)

    assert statistics(sampler).preemptions > 0
    for name, response in found.items():
        assert _bits(response) == _bits(expected[name])


def test_a_stream_has_each_token_once_whatever_was_preempted(model: Transformer) -> None:
    """In order; what is read again is not told again."""
    works = [
        work(str(n), prompt_of(20, n), max_tokens=None, num_samples=1 + n % 2, is_streamed=True)
        for n in range(6)
    ]
    sampler = _small(model)
    for one in works:
        sampler.admit(one)
    told: dict[tuple[str, int], list[int]] = {}
    found: dict[str, SampleResponse] = {}
    while sampler.samples:
        for event in sampler.step():
            if isinstance(event, SampleTokens):
                told.setdefault((event.work_id, event.sequence), []).extend(event.tokens)
            elif event.result is not None:
                found[event.work_id] = event.result

    assert statistics(sampler).preemptions > 0
    assert told == {
        (name, index): one.tokens
        for name, response in found.items()
        for index, one in enumerate(response.sequences)
    }


def _until_paused(sampler: BatchedSampler, works: list[SampleWork]) -> None:
    for one in works:
        sampler.admit(one)
    while not statistics(sampler).preemptions:
        assert sampler.samples == len(works)
        sampler.step()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_preempted_sample_can_be_cancelled(model: Transformer, samples: int) -> None:
    """Nothing more is told of it, nothing of it stays, and the others are as they are alone."""
    works = [
        work(str(n), prompt_of(20, n), max_tokens=None, num_samples=number, is_streamed=True)
        for n, number in enumerate([1, 1, 1, samples])
    ]
    sampler = _small(model)
    expected = _freely(model, *works)
    _until_paused(sampler, works)

    sampler.cancel("3")  # the youngest
    events = []
    while sampler.samples:
        events += sampler.step()

    assert "3" not in {event.work_id for event in events}
    held = statistics(sampler)
    assert held.taken_bytes == held.waiting == held.prefilling == held.running == 0
    for event in events:
        if isinstance(event, SampleOutcome):
            assert event.result is not None
            assert _bits(event.result) == _bits(expected[event.work_id])
    again = run(sampler, works[3])["3"]
    assert _bits(again) == _bits(expected["3"])


def test_a_preempted_sample_resumes_with_weights_that_were_unloaded(model: Transformer) -> None:
    """Its prompt is read again with them, and nobody else finds what was read."""
    works = [work(str(n), prompt_of(90, n), "w", seed=n, max_tokens=None) for n in range(4)]
    expected = _freely(model, *works)
    sampler = _small(model)
    _until_paused(sampler, works)

    sampler.drop_weights(W)
    found, _ = _run_bounded(sampler, [])

    assert len(found) == 4
    for name, response in found.items():
        assert _bits(response) == _bits(expected[name])
    assert statistics(sampler).cached_bytes == 0


def test_a_preempted_sample_that_fails_to_resume_fails_alone(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it goes on after a pause; the others do not notice."""
    works = [work(str(n), prompt_of(20, n), seed=n, max_tokens=None) for n in range(4)]
    expected = _freely(model, *works)
    sampler = _small(model)
    _until_paused(sampler, works)
    hidden: Callable[..., torch.Tensor] = model.forward
    drawn = expected["3"].sequences[0].tokens[:20]

    def failing(tokens_T: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        tokens = tokens_T.tolist()
        if any(tokens[place : place + 20] == drawn for place in range(len(tokens))):
            raise MemoryError("no room for these rows")
        return hidden(tokens_T, *args, **options)

    monkeypatch.setattr(model, "forward", failing)
    ends: dict[str, SampleOutcome] = {}
    while sampler.samples:
        for event in sampler.step():
            assert isinstance(event, SampleOutcome)
            ends[event.work_id] = event

    assert isinstance(ends["3"].error, MemoryError)
    for name in ("0", "1", "2"):
        result = ends[name].result
        assert result is not None
        assert _bits(result) == _bits(expected[name])
    assert statistics(sampler).taken_bytes == 0


def test_fail_all_ends_preempted_samples_too(model: Transformer) -> None:
    """As when the engine closes."""
    works = [work(str(n), prompt_of(20, n), max_tokens=None) for n in range(3)]
    works.append(work("3", prompt_of(20), max_tokens=None, num_samples=2))
    sampler = _small(model)
    _until_paused(sampler, works)

    events = sampler.fail_all(RuntimeError("closed"))

    assert {event.work_id for event in events} == {"0", "1", "2", "3"}
    held = statistics(sampler)
    assert held.taken_bytes == held.waiting == held.prefilling == held.running == 0


MANY_STEPS = 2_000
"""More than anything here takes."""


def _ends(sampler: BatchedSampler) -> dict[str, SampleOutcome]:
    """How all samples end, which they do after some steps."""
    ends: dict[str, SampleOutcome] = {}
    for _ in range(MANY_STEPS):
        for event in sampler.step():
            if isinstance(event, SampleOutcome):
                ends[event.work_id] = event
        if not sampler.samples:
            return ends
    raise AssertionError(f"{sampler.samples} samples do not end")


def test_a_group_ends_that_finds_its_prompt_in_a_buffer_that_was_longer(model: Transformer) -> None:
    """What is kept of a sequence's run takes no more than a prompt that was read for the group."""
    prompt = prompt_of(60)
    single = work("single", prompt, max_tokens=None)
    group = work("group", prompt, max_tokens=140, num_samples=2)
    expected = _freely(model, group)["group"]
    sampler = _small(model, 353)  # just enough for a sequence of the group
    run(sampler, single)

    sampler.admit(group)
    found = _ends(sampler)["group"].result

    assert found is not None
    assert found.prompt_cache_hit_tokens == 60
    assert _bits(found) == _bits(expected)


def test_a_group_without_memory_for_its_second_sequence_fails_alone(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one had begun in the same step."""
    works = [work("other", prompt_of(20, 1)), work("group", prompt_of(20), num_samples=3)]
    expected = _freely(model, *works)
    sampler = _small(model, 4 * ROOM)
    reserve, asked = KvBuffer.reserve, list[int]()

    def failing(self: KvBuffer, length: int) -> None:
        if not self.room and length == PAGE_TOKENS:  # a run of a sequence's own
            asked.append(length)
            if len(asked) == 2:
                raise MemoryError("no room for this run")
        reserve(self, length)

    monkeypatch.setattr(KvBuffer, "reserve", failing)
    for one in works:
        sampler.admit(one)
    ends = _ends(sampler)

    assert isinstance(ends["group"].error, MemoryError)
    other = ends["other"].result
    assert other is not None
    assert _bits(other) == _bits(expected["other"])
    assert statistics(sampler).taken_bytes == 0


def test_a_preempted_group_does_not_wait_for_later_samples(model: Transformer) -> None:
    """Short ones come all the time, and there would always be room for one of them."""
    sampler = _small(model)
    _until_paused(
        sampler,
        [
            work("first", prompt_of(20, 1), max_tokens=None),
            work("group", prompt_of(20, 2), max_tokens=None, num_samples=2),
        ],
    )
    ended = list[str]()
    for number in range(MANY_STEPS):
        sampler.admit(work(str(number), prompt_of(9, number), max_tokens=20))
        ended += [one.work_id for one in sampler.step() if isinstance(one, SampleOutcome)]
        if "group" in ended:
            break

    assert "group" in ended
