"""Samples of several owners in one sampler: who has few does not wait for who has many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.sample_works import prompt_of, run, statistics, work
from tests.numerics.small_models import make_model
from tinsmith.engine.base import SampleOutcome, SampleWork
from tinsmith.engine.embedded.batched_sampler import BatchedSampler, SamplerSettings
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import SampleResponse

CONTEXT = 2000
MANY_STEPS = 2_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, max_position_embeddings=CONTEXT)
    return load_base_model(folder, dtype=torch.float32)


def _many(count: int, **fields: Any) -> list[SampleWork]:
    options = {"prompt": 9, "max_tokens": 300, **fields}
    length = options.pop("prompt")
    return [work(f"a{n}", prompt_of(length, n), owner="a", seed=n, **options) for n in range(count)]


def _steps_of(sampler: BatchedSampler, asked: SampleWork) -> tuple[int, SampleResponse]:
    """How many steps it takes from when it is admitted, and what is drawn."""
    sampler.admit(asked)
    for step in range(1, MANY_STEPS):
        for event in sampler.step():
            if event.work_id == asked.work_id and isinstance(event, SampleOutcome):
                assert event.result is not None, event.error
                return step, event.result
    raise AssertionError("it does not end")


def _step(sampler: BatchedSampler, steps: int) -> None:
    for _ in range(steps):
        sampler.step()


TOKENS = 16
FEW: dict[str, dict[str, Any]] = {
    "one": {"prompt": prompt_of(20)},
    "a group": {"prompt": prompt_of(20), "num_samples": 4},
    "more than a chunk": {"prompt": prompt_of(3 * CHUNK_TOKENS + 9)},
}


@pytest.mark.parametrize("kind", FEW)
def test_a_single_sample_starts_immediately_despite_many_of_another_owner(
    model: Transformer, kind: str
) -> None:
    """All places are taken, and more samples wait for one."""
    asked = work("b", owner="b", max_tokens=TOKENS, **FEW[kind])
    expected = run(BatchedSampler(model), asked)["b"]
    sampler = BatchedSampler(model, settings=SamplerSettings(most_sequences=32, shared_rows=8))
    for one in _many(100):
        sampler.admit(one)
    _step(sampler, 5)

    steps, found = _steps_of(sampler, asked)

    assert steps <= TOKENS + 10
    assert found.sequences == expected.sequences


@pytest.mark.parametrize("kind", FEW)
def test_others_are_preempted_for_an_owners_only_sample_when_memory_is_short(
    model: Transformer, kind: str
) -> None:
    """They are paused, and draw in the end what they would have drawn."""
    asked = work("b", owner="b", max_tokens=TOKENS, **FEW[kind])
    many = _many(12, max_tokens=200)
    expected = run(BatchedSampler(model), asked, *many)
    sampler = BatchedSampler(model, settings=SamplerSettings(kv_bytes=1200 * 512))
    for one in many:
        sampler.admit(one)
    while not statistics(sampler).preemptions:  # memory is full
        sampler.step()

    steps, found = _steps_of(sampler, asked)

    assert steps <= TOKENS + 20
    assert found.sequences == expected["b"].sequences
    rest = run(sampler)
    assert rest.keys() == {one.work_id for one in many}
    for name, response in rest.items():
        assert response.sequences == expected[name].sequences


def test_a_long_prompt_is_prefilled_round_robin_with_those_of_another_owner(
    model: Transformer,
) -> None:
    """However many the other one is reading."""
    long = 10 * CHUNK_TOKENS
    asked = work("b", prompt_of(long, 99), owner="b", max_tokens=1)
    sampler = BatchedSampler(model)
    for one in _many(20, prompt=CONTEXT - 10, max_tokens=2):
        sampler.admit(one)
    _step(sampler, 2)

    steps, _ = _steps_of(sampler, asked)

    assert steps <= 12


def test_an_owner_of_many_samples_progresses_while_another_keeps_submitting(
    model: Transformer,
) -> None:
    """Its samples end, in the order in which they came."""
    sampler = BatchedSampler(model, settings=SamplerSettings(most_sequences=32, shared_rows=8))
    for one in _many(60, max_tokens=10):
        sampler.admit(one)
    ended: list[str] = []
    for number in range(MANY_STEPS):
        sampler.admit(work(f"b{number}", prompt_of(9, number), owner="b", max_tokens=4))
        events = sampler.step()
        ended += [one.work_id for one in events if one.work_id.startswith("a")]
        if len(ended) == 60:
            break

    assert sorted(ended, key=lambda name: int(name[1:])) == ended
    assert len(ended) == 60


def test_a_prompt_being_prefilled_by_another_owner_is_not_waited_for(model: Transformer) -> None:
    """The other one may be held back meanwhile."""
    prompt = prompt_of(10 * CHUNK_TOKENS)
    sampler = BatchedSampler(model, settings=SamplerSettings(most_sequences=8, shared_rows=2))
    for one in _many(8):
        sampler.admit(one)
    _step(sampler, 5)
    sampler.admit(work("a", prompt, owner="a"))
    _step(sampler, 1)

    steps, _ = _steps_of(sampler, work("b", prompt, owner="b", max_tokens=1))

    assert steps <= 15


def _drawn(sampler: BatchedSampler, others: tuple[str, ...] = ()) -> int:
    """How many tokens one step draws."""
    before = statistics(sampler).sampled_tokens
    sampler.step(others)
    return statistics(sampler).sampled_tokens - before


def test_a_step_is_limited_while_another_owner_waits(model: Transformer) -> None:
    """Also one whose samples are of another base model; alone, an owner has whole steps."""
    sampler = BatchedSampler(model, settings=SamplerSettings(most_sequences=32, shared_rows=8))
    for one in _many(40):
        sampler.admit(one)
    _step(sampler, 5)

    assert _drawn(sampler) == 32
    assert _drawn(sampler, ("b",)) == 8
    assert _drawn(sampler) == 32


def test_owners_share_a_step_equally_up_to_their_need(model: Transformer) -> None:
    """The largest has no more than twice the least, and a step no more than it may."""
    sampler = BatchedSampler(model, settings=SamplerSettings(most_sequences=48, shared_rows=8))
    for one in _many(40):
        sampler.admit(one)
    for number in range(10):
        sampler.admit(work(f"b{number}", prompt_of(9, number), owner="b", max_tokens=300))
    _step(sampler, 10)
    assert _drawn(sampler) == 20 + 10

    for number in range(10, 60):
        sampler.admit(work(f"b{number}", prompt_of(9, number), owner="b", max_tokens=300))
    _step(sampler, 10)
    assert _drawn(sampler) == 48
