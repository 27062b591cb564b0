"""The embedded engine, through the interface that the service uses."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.workloads.engine.data import ADAPTERS, RANK, Sequence, prompts, training_batch
from benchmarks.workloads.engine.measure import Turn, settle, warm_up
from benchmarks.workloads.engine.models import adapter_folder, folder_of, size_of
from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    PassWork,
    SampleOutcome,
    SampleTokens,
    SampleWork,
    StepWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine
from tinsmith.engine.embedded.embedded_settings import Dtype, EmbeddedModel, EmbeddedSettings
from tinsmith.engine.embedded.model_loading import choose_dtypes
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
    TensorData,
)
from tinsmith.types.requests import SampleRequest

NAME = "bench/model"
WEIGHTS = WeightsId("bench-weights")
_STEP = AdamParams(learning_rate=1e-4)


class Running:
    """An open engine, for callers that are not in an event loop."""

    def __init__(self, model: str, dtype: Dtype = "float32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.size = size_of(model)
        self.computes_in = choose_dtypes(dtype, "cpu").computed
        self._loop = asyncio.new_event_loop()
        settings = EmbeddedSettings(dtype=dtype, device="cpu", threads=threads)
        self.engine = EmbeddedEngine([EmbeddedModel(name=NAME, folder=folder_of(model))], settings)
        self._loop.run_until_complete(self.engine.open())
        self._numbers = itertools.count()

    def add_adapter(self, adapter_id: str) -> None:
        spec = AdapterSpec(
            adapter_id=AdapterId(adapter_id),
            base_model=NAME,
            lora=LoraConfig(rank=RANK, seed=1, train_unembed=False),
            optimizer=AdamOptimizerConfig(),
        )
        self._loop.run_until_complete(self.engine.create_adapter(spec))

    def save(self, adapter_id: str, folder: Path, parts: AdapterParts) -> None:
        self._loop.run_until_complete(
            self.engine.save_adapter(AdapterId(adapter_id), folder, parts)
        )

    def add_weights(self, model: str) -> None:
        """Sampler weights, those of a fresh adapter, which are kept for other contestants."""
        folder = adapter_folder(model)
        if not folder.exists():
            self.add_adapter("sampled")
            work = Path(tempfile.mkdtemp(dir=folder.parent))
            self.save("sampled", work, AdapterParts.WEIGHTS)
            work.rename(folder)
        self._loop.run_until_complete(self.engine.load_weights(WEIGHTS, NAME, folder))

    def pass_work(self, adapter_id: str, data: tuple[Datum, ...]) -> PassWork:
        return PassWork(
            work_id=f"pass-{next(self._numbers)}",
            adapter_id=AdapterId(adapter_id),
            data=data,
            loss_fn="cross_entropy",
        )

    def step_work(self, adapter_id: str) -> StepWork:
        return StepWork(
            work_id=f"step-{next(self._numbers)}", adapter_id=AdapterId(adapter_id), params=_STEP
        )

    def train(self, works: list[TrainingWork]) -> list[TrainingOutcome]:
        outcomes = self._loop.run_until_complete(self.engine.train(works))
        for one in outcomes:
            if one.error is not None:
                raise one.error
        return outcomes

    def sample(self, works: list[SampleWork], turn: Turn) -> tuple[int, dict[str, float]]:
        """Run them all; how many tokens came, and when the first of each streamed work did."""
        return self._loop.run_until_complete(self._sample(works, turn))

    async def _sample(self, works: list[SampleWork], turn: Turn) -> tuple[int, dict[str, float]]:
        for work in works:
            self.engine.admit(work)
        tokens, ended, first_s = 0, 0, dict[str, float]()
        asked = {work.work_id for work in works}
        while ended < len(works):
            for event in await self.engine.step_sampler():
                if isinstance(event, SampleTokens):
                    first_s.setdefault(event.work_id, turn.since_start_s())
                elif isinstance(event, SampleOutcome):
                    if event.result is None:
                        raise event.error or RuntimeError("no result and no error")
                    if event.work_id in asked:  # not of those that run beside them
                        ended += 1
                        tokens += sum(len(one.tokens) for one in event.result.sequences)
        return tokens, first_s

    def begin(self, works: list[SampleWork]) -> None:
        """Admit samples, and return when the first of them, which is streamed, has tokens."""
        self._loop.run_until_complete(self._begin(works))

    async def _begin(self, works: list[SampleWork]) -> None:
        for work in works:
            self.engine.admit(work)
        while works and not await self.engine.step_sampler():
            pass

    def sample_work(
        self,
        prompt: list[int],
        new: int,
        *,
        samples: int = 1,
        with_lora: bool = False,
        is_streamed: bool = False,
        owner: str = "",
    ) -> SampleWork:
        number = next(self._numbers)
        # No stop: every sample has all its tokens.
        params = SamplingParams(max_tokens=new, seed=number, stop=[], temperature=1.0)
        return SampleWork(
            work_id=f"sample-{number}",
            base_model=NAME,
            weights_id=WEIGHTS if with_lora else None,
            request=SampleRequest(
                num_samples=samples,
                prompt=ModelInput.from_ints(prompt),
                sampling_params=params,
                base_model=NAME,
            ),
            is_streamed=is_streamed,
            owner=owner,
        )


def datums(sequences: list[Sequence]) -> tuple[Datum, ...]:
    """As they come from the wire."""
    return tuple(map(_datum, sequences))


def _datum(sequence: Sequence) -> Datum:
    targets = sequence.tokens[1:]
    uncounted = sequence.first - 1
    weights = [0.0] * uncounted + [1.0] * (len(targets) - uncounted)
    return Datum(
        model_input=ModelInput.from_ints(sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


def training(
    model: str, batch: str, dtype: Dtype = "float32", threads: str = "1"
) -> Callable[[], dict[str, float]]:
    """One pass and one step."""
    running = Running(model, dtype, int(threads))
    running.add_adapter("one")
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        sequences = training_batch(batch, running.size.vocabulary, next(turns))
        works: list[TrainingWork] = [running.pass_work("one", datums(sequences))]
        turn = Turn(running.computes_in)
        running.train([*works, running.step_work("one")])
        tokens = sum(one.positions for one in sequences)
        return turn.figures(tokens, running.size.training_flops(tokens, RANK))

    warm_up(run)
    return run


def adapters(model: str, order: str, dtype: Dtype = "float32") -> Callable[[], dict[str, float]]:
    """A small pass and a step for each of several adapters, `together` or one after `another`."""
    running = Running(model, dtype)
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    for name in names:
        running.add_adapter(name)
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        number = next(turns)
        batches = [
            training_batch("small", running.size.vocabulary, number * ADAPTERS + index)
            for index in range(ADAPTERS)
        ]
        works: list[list[TrainingWork]] = [
            [running.pass_work(name, datums(batch)), running.step_work(name)]
            for name, batch in zip(names, batches, strict=True)
        ]
        turn = Turn(running.computes_in)
        for some in [list(itertools.chain(*works))] if order == "together" else works:
            running.train(some)
        tokens = sum(one.positions for batch in batches for one in batch)
        return turn.figures(tokens, running.size.training_flops(tokens, RANK))

    warm_up(run)
    return run


def sampling(
    model: str,
    count: str,
    prompt: str = "128",
    new: str = "64",
    samples: str = "1",
    lora: str = "",
    dtype: Dtype = "float32",
    threads: str = "1",
) -> Callable[[], dict[str, float]]:
    """So many works at once, each of so many samples; the first token is that of the last one."""
    running = Running(model, dtype, int(threads))
    if lora:
        running.add_weights(model)
    turns = itertools.count(1)

    def run(count: int, new: int) -> dict[str, float]:
        asked = prompts(count, int(prompt), running.size.vocabulary, next(turns))
        works = [
            running.sample_work(
                one, new, samples=int(samples), with_lora=bool(lora), is_streamed=one is asked[-1]
            )
            for one in asked
        ]
        turn = Turn(running.computes_in)
        tokens, first_s = running.sample(works, turn)
        turn.first_tokens(list(first_s.values()))
        read = count * int(prompt)
        return turn.figures(tokens, running.size.sampling_flops(read, tokens))

    run(1, 4)
    settle()
    return lambda: run(int(count), int(new))


def long_among_short(model: str, long: str, shorts: str) -> Callable[[], dict[str, float]]:
    """A long prompt, and short ones right behind it; the first token is that of the short ones."""
    running = Running(model)
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        number = next(turns)
        vocabulary = running.size.vocabulary
        asked = prompts(1, int(long), vocabulary, number)
        asked += prompts(int(shorts), 32, vocabulary, 500 + number)
        works = [
            running.sample_work(
                one, 16, samples=1, with_lora=False, is_streamed=one is not asked[0]
            )
            for one in asked
        ]
        turn = Turn()
        tokens, first_s = running.sample(works, turn)
        turn.first_tokens(list(first_s.values()))
        return turn.figures(tokens, running.size.sampling_flops(sum(map(len, asked)), tokens))

    return run


def beside(model: str, others: str) -> Callable[[], dict[str, float]]:
    """A sample of 16 tokens, while so many of another owner are in the engine."""
    running = Running(model)
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        number, vocabulary = next(turns), running.size.vocabulary
        many = [
            running.sample_work(one, 200, owner="many", is_streamed=place == 0)
            for place, one in enumerate(prompts(int(others), 128, vocabulary, number))
        ]
        [prompt] = prompts(1, 32, vocabulary, 500 + number)
        running.begin(many)
        turn = Turn(running.computes_in)
        work = running.sample_work(prompt, 16, owner="one", is_streamed=True)
        tokens, first_s = running.sample([work], turn)
        turn.first_tokens([first_s[work.work_id]])
        found = turn.figures(tokens, running.size.sampling_flops(len(prompt), tokens))
        for one in many:
            running.engine.cancel(one.work_id)
        return found

    run()
    settle()
    return run
