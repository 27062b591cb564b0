"""The fake engine: keeps the whole contract of `engines/base.py` at thousands of commands a second.

Small works are computed on the event loop, large ones on a thread; one after another in either
case, in the order of the calls. Works with uploaded losses are computed on threads beside them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tinsmith.engines.adapter_files import check_base, known_model, model_to_train
from tinsmith.engines.adapter_turns import AdapterTurns
from tinsmith.engines.base import (
    AdapterId,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    PassWork,
    SampleEvent,
    SampleOutcome,
    SampleWork,
    Saved,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
    has_uploaded_loss,
)
from tinsmith.engines.fake import arithmetic, files
from tinsmith.engines.fake.arithmetic import Array, Vocabulary
from tinsmith.engines.fake.sampling import Draws, RunningSample
from tinsmith.engines.fake.training import Adapter
from tinsmith.errors import ClosedError, NotFoundError, ValidationError

VOCABULARY = 200_000
"""So large that the ids of any tokenizer fit."""
MAX_CONTEXT = 131_072
SMALL_TOKENS = 4096
"""Up to so many tokens are computed on the event loop; a thread would cost more than it saves."""
SMALL_WORKS = 16
LOOP_S = 0.005
"""How long the sampler computes before others on the event loop have their turn."""
PREFIX_TOKENS = 64
"""Prompts are remembered in pieces of so many tokens."""
MOST_PREFIXES = 100_000
MOST_DRAWS = 64
"""For so many pairs of weights and settings the sampler remembers what follows from them."""

R = TypeVar("R")


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the fake engine behaves; tests make it slow or small."""

    tokens_per_step: int = 8
    """How many tokens of each sequence one step of the sampler draws."""
    step_s: float = 0.0
    """How long each step of the sampler takes at least."""
    batch_s: float = 0.0
    """How long each training batch takes at least."""
    most_adapters: int = 1024
    most_samples: int = 2048
    batch_tokens: int = 65_536


def fake_model(
    name: str, tokenizer_id: str | None = None, alias_of: str | None = None
) -> BaseModel:
    """A base model of the fake engine: any name will do."""
    return BaseModel(
        name=name,
        vocabulary=VOCABULARY,
        max_context=MAX_CONTEXT,
        eos_tokens=(arithmetic.EOS,),
        tokenizer_id=tokenizer_id or name.partition(":")[0],
        architecture="fake",
        alias_of=alias_of,
        takes_images=True,
    )


class FakeEngine(Engine):
    """See the top of the module."""

    name = "fake"

    def __init__(self, models: Sequence[BaseModel], settings: FakeSettings | None = None) -> None:
        self._models = {model.name: model for model in models}
        self._settings = settings or FakeSettings()
        self._tables: dict[str, Array] = {}
        self._vocabularies: dict[int, Vocabulary] = {}
        self._adapters: dict[AdapterId, Adapter] = {}
        self._weights: dict[WeightsId, tuple[str, Array]] = {}
        self._dropped: set[WeightsId] = set()
        self._samples: dict[str, RunningSample] = {}
        self._draws: OrderedDict[tuple[object, ...], Draws] = OrderedDict()
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._turns = AdapterTurns()
        self._turn = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """`Engine.open`."""
        for model in self._models.values():
            self._tables[model.name] = arithmetic.base_table(model.alias_of or model.name)
            self._vocabularies.setdefault(model.vocabulary, Vocabulary(model.vocabulary))
        self._is_open = True

    async def close(self) -> None:
        """`Engine.close`."""
        self._is_open = False
        self._samples.clear()

    def base_models(self) -> tuple[BaseModel, ...]:
        """`Engine.base_models`."""
        return tuple(self._models.values())

    def capacity(self) -> EngineCapacity:
        """`Engine.capacity`."""
        return EngineCapacity(
            most_adapters=self._settings.most_adapters,
            adapters=len(self._adapters),
            most_samples=self._settings.most_samples,
            samples=len(self._samples),
            batch_tokens=self._settings.batch_tokens,
        )

    async def _exclusively(self, run: Callable[[], Awaitable[R]], *adapters: AdapterId) -> R:
        async with self._turns.turn(adapters), self._turn:
            if not self._is_open:
                raise ClosedError("the engine is closed")
            return await run()

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """`Engine.create_adapter`."""

        async def run() -> None:
            base_CK = self._checked(spec)
            seed = spec.adapter_id if spec.lora.seed is None else str(spec.lora.seed)
            weights = arithmetic.fresh_weights(spec.lora, seed)
            self._adapters[spec.adapter_id] = Adapter(spec, base_CK, weights)

        await self._exclusively(run, spec.adapter_id)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: Saved) -> None:
        """`Engine.load_adapter`."""

        async def run() -> None:
            base_CK = self._checked(spec)
            check_base(self._models, folder, spec.base_model)
            made = await asyncio.to_thread(files.load, spec, base_CK, folder, parts)
            self._adapters[spec.adapter_id] = made

        await self._exclusively(run, spec.adapter_id)

    def _checked(self, spec: AdapterSpec) -> Array:
        """The table of the base model, if it can be trained so."""
        model = model_to_train(self._models, spec)
        if not arithmetic.trained_parts(spec.lora):
            raise ValidationError("one of train_attn, train_mlp and train_unembed must be true")
        return self._tables[model.name]

    def _model(self, name: str) -> BaseModel:
        return known_model(self._models, name)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: Saved) -> None:
        """`Engine.save_adapter`."""

        async def run() -> None:
            await asyncio.to_thread(files.save, self._adapter(adapter_id), folder, parts)

        await self._exclusively(run, adapter_id)

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """`Engine.drop_adapter`."""
        async with self._turns.turn([adapter_id]), self._turn:
            self._adapters.pop(adapter_id, None)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """`Engine.has_adapter`."""
        return adapter_id in self._adapters

    def _adapter(self, adapter_id: AdapterId) -> Adapter:
        if adapter_id not in self._adapters:
            raise NotFoundError(f"model {adapter_id} is not loaded")
        return self._adapters[adapter_id]

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """`Engine.train`."""

        async def run() -> list[TrainingOutcome]:
            started = time.monotonic()
            tokens = sum(work.tokens for work in batch if isinstance(work, PassWork))
            if has_uploaded_loss(batch) or tokens > SMALL_TOKENS or len(batch) > SMALL_WORKS:
                outcomes = await asyncio.to_thread(self._train_all, batch)
            else:
                outcomes = self._train_all(batch)
            await asyncio.sleep(max(0.0, started + self._settings.batch_s - time.monotonic()))
            return outcomes

        adapters = [work.adapter_id for work in batch]
        if not has_uploaded_loss(batch):
            return await self._exclusively(run, *adapters)
        async with self._turns.turn(adapters):
            if not self._is_open:
                raise ClosedError("the engine is closed")
            return await run()

    def _train_all(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        return [self._train(work) for work in batch]

    def _train(self, work: TrainingWork) -> TrainingOutcome:
        try:
            adapter = self._adapter(work.adapter_id)
            if isinstance(work, PassWork):
                vocabulary = self._vocabularies[self._models[adapter.spec.base_model].vocabulary]
                return TrainingOutcome(
                    work_id=work.work_id, result=adapter.run_pass(work, vocabulary)
                )
            return TrainingOutcome(work_id=work.work_id, result=adapter.step(work))
        except Exception as exc:  # noqa: BLE001 - it is this work's outcome and no other's
            return TrainingOutcome(work_id=work.work_id, error=exc)

    # Sampling

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """`Engine.load_weights`."""

        async def run() -> None:
            base_CK = self._tables[self._model(base_model).name]
            check_base(self._models, folder, base_model)
            weights = await asyncio.to_thread(files.load_weights, folder)
            self._weights[weights_id] = (base_model, arithmetic.log_table(base_CK, weights))
            self._forget_draws(weights_id)
            self._dropped.discard(weights_id)

        await self._exclusively(run)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """`Engine.drop_weights`."""
        if any(sample.work.weights_id == weights_id for sample in self._samples.values()):
            self._dropped.add(weights_id)
        else:
            self._weights.pop(weights_id, None)
            self._forget_draws(weights_id)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """`Engine.has_weights`."""
        return weights_id in self._weights and weights_id not in self._dropped

    def admit(self, sample: SampleWork) -> None:
        """`Engine.admit`."""
        if sample.work_id in self._samples:
            return
        self._samples[sample.work_id] = RunningSample(
            sample,
            self._draws_for(sample),
            self._model(sample.base_model).max_context,
            self._seen_tokens(sample),
        )

    def _draws_for(self, sample: SampleWork) -> Draws:
        """Samples of the same weights and settings share what follows from these alone."""
        params, model = sample.request.sampling_params, self._model(sample.base_model)
        key = (
            model.name,
            sample.weights_id,
            params.temperature,
            params.top_k,
            params.top_p,
        )
        if key not in self._draws:
            if sample.weights_id is None:
                table_CK = arithmetic.log_table(self._tables[model.name], {})
            else:
                table_CK = self._weights[sample.weights_id][1]
            self._draws[key] = Draws(table_CK, self._vocabularies[model.vocabulary], params)
            if len(self._draws) > MOST_DRAWS:
                self._draws.popitem(last=False)
        self._draws.move_to_end(key)
        return self._draws[key]

    def _seen_tokens(self, sample: SampleWork) -> int:
        """How many tokens of the prompt were read before under the same weights."""
        tokens = arithmetic.input_tokens(sample.request.prompt)
        seen, key, is_known = 0, hash((sample.base_model, sample.weights_id)), True
        for start in range(0, len(tokens) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
            key = hash((key, tokens[start : start + PREFIX_TOKENS].tobytes()))
            is_known = is_known and key in self._prefixes
            seen += PREFIX_TOKENS if is_known else 0
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)
        return seen

    def cancel(self, work_id: str) -> None:
        """`Engine.cancel`."""
        self._samples.pop(work_id, None)

    async def step_sampler(self) -> list[SampleEvent]:
        """`Engine.step_sampler`."""
        if not self._samples:
            return []
        return await self._exclusively(self._step)

    async def _step(self) -> list[SampleEvent]:
        started = turn_started = time.monotonic()
        events: list[SampleEvent] = []
        for work_id, sample in list(self._samples.items()):
            if work_id not in self._samples:  # cancelled while others had their turn
                continue
            events += self._step_one(sample)
            if time.monotonic() - turn_started > LOOP_S:
                await asyncio.sleep(0)
                turn_started = time.monotonic()
        await asyncio.sleep(max(0.0, started + self._settings.step_s - time.monotonic()))
        for weights_id in [one for one in self._dropped if not self._is_used(one)]:
            self._dropped.discard(weights_id)
            self._weights.pop(weights_id, None)
            self._forget_draws(weights_id)
        return events

    def _step_one(self, sample: RunningSample) -> list[SampleEvent]:
        work_id = sample.work.work_id
        events: list[SampleEvent] = []
        try:
            events += sample.step(self._settings.tokens_per_step)
            if not sample.is_done:
                return events
            events.append(SampleOutcome(work_id=work_id, result=sample.response()))
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            events.append(SampleOutcome(work_id=work_id, error=exc))
        self._samples.pop(work_id, None)
        return events

    def _forget_draws(self, weights_id: WeightsId) -> None:
        for key in [key for key in self._draws if key[1] == weights_id]:
            del self._draws[key]

    def _is_used(self, weights_id: WeightsId) -> bool:
        return any(sample.work.weights_id == weights_id for sample in self._samples.values())
