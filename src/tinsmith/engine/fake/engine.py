"""The fake engine: the contract of `engine/base.py` over a table of logits, for tests.

It runs built-in losses only and refuses uploaded ones. Calls run one at a time, in call order:
small ones on the event loop, large ones on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    PassWork,
    SampleEvent,
    SampleOutcome,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.fake import arithmetic, files
from tinsmith.engine.fake.arithmetic import Array, Vocabulary
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fake.sampling import Draws, RunningSample
from tinsmith.engine.fake.training import Adapter
from tinsmith.engine.files.adapter_files import check_base, known_model, model_to_train
from tinsmith.errors import ClosedError, NotFoundError, ValidationError

VOCABULARY = 200_000
"""Large enough for the ids of any tokenizer."""
MAX_CONTEXT = 131_072
SMALL_TOKENS = 4096
"""Batches of up to this many tokens run on the event loop; a thread would cost more."""
SMALL_WORKS = 16
LOOP_S = 0.005
"""How long the sampler computes before it yields to the event loop."""
MOST_DRAWS = 64
"""Pairs of weights and sampling parameters whose distributions are cached."""


def fake_model(
    name: str, tokenizer_id: str | None = None, alias_of: str | None = None
) -> BaseModel:
    """A base model of the fake engine; any name is valid."""
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
    """An engine whose models are tables of logits, determined by the models' names."""

    name = "fake"

    def __init__(self, models: Sequence[BaseModel], settings: FakeSettings | None = None) -> None:
        self._models = {model.name: model for model in models}
        self._settings = settings or FakeSettings()
        self._tables = {
            model.name: arithmetic.base_table(model.alias_of or model.name) for model in models
        }
        self._vocabularies = {
            size: Vocabulary(size) for size in {model.vocabulary for model in models}
        }
        self._adapters: dict[AdapterId, Adapter] = {}
        self._weights: dict[WeightsId, Array] = {}
        self._dropped: set[WeightsId] = set()
        self._samples: dict[str, RunningSample] = {}
        self._draws: dict[tuple[object, ...], Draws] = {}
        self._lock = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """Make the engine ready; there is nothing to load."""
        self._is_open = True

    async def close(self) -> None:
        """Close the engine and drop all samples."""
        self._is_open = False
        self._samples.clear()

    def base_models(self) -> tuple[BaseModel, ...]:
        """The base models that the engine was created with."""
        return tuple(self._models.values())

    def capacity(self) -> EngineCapacity:
        """The configured limits and the current load."""
        return EngineCapacity(
            most_adapters=self._settings.most_adapters,
            adapters=len(self._adapters),
            most_samples=self._settings.most_samples,
            samples=len(self._samples),
            batch_tokens=self._settings.batch_tokens,
            adapter_bytes=self._settings.adapter_bytes,
        )

    @contextlib.asynccontextmanager
    async def _exclusively(self) -> AsyncIterator[None]:
        """Wait for all earlier calls; the lock is first come, first served."""
        async with self._lock:
            if not self._is_open:
                raise ClosedError("the engine is closed")
            yield

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Create an adapter with fresh weights; replaces an existing one."""
        async with self._exclusively():
            base_CK = self._table_to_train(spec)
            seed = spec.adapter_id if spec.lora.seed is None else str(spec.lora.seed)
            weights = arithmetic.fresh_weights(spec.lora, seed)
            self._adapters[spec.adapter_id] = Adapter(spec, base_CK, weights)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter from saved files."""
        async with self._exclusively():
            base_CK = self._table_to_train(spec)
            check_base(self._models, folder, spec.base_model)
            loaded = await asyncio.to_thread(files.load, spec, base_CK, folder, parts)
            self._adapters[spec.adapter_id] = loaded

    def _table_to_train(self, spec: AdapterSpec) -> Array:
        model = model_to_train(self._models, spec)
        if not arithmetic.trained_parts(spec.lora):
            raise ValidationError("one of train_attn, train_mlp and train_unembed must be true")
        return self._tables[model.name]

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Write an adapter's files into an empty folder."""
        async with self._exclusively():
            await asyncio.to_thread(files.save, self._adapter(adapter_id), folder, parts)

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Unload an adapter; no error if it is not loaded."""
        async with self._lock:
            self._adapters.pop(adapter_id, None)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether the adapter is loaded."""
        return adapter_id in self._adapters

    def _adapter(self, adapter_id: AdapterId) -> Adapter:
        if adapter_id not in self._adapters:
            raise NotFoundError(f"model {adapter_id} is not loaded")
        return self._adapters[adapter_id]

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run a batch of works, one after another; each has an outcome of its own."""
        async with self._exclusively():
            started = time.monotonic()
            tokens = sum(work.tokens for work in batch if isinstance(work, PassWork))
            if tokens > SMALL_TOKENS or len(batch) > SMALL_WORKS:
                outcomes = await asyncio.to_thread(self._train_all, batch)
            else:
                outcomes = self._train_all(batch)
            await asyncio.sleep(max(0.0, started + self._settings.batch_s - time.monotonic()))
            return outcomes

    def _train_all(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        return [self._train(work) for work in batch]

    def _train(self, work: TrainingWork) -> TrainingOutcome:
        try:
            adapter = self._adapter(work.adapter_id)
            if isinstance(work, PassWork):
                vocabulary = self._vocabularies[self._models[adapter.spec.base_model].vocabulary]
                passed = adapter.run_pass(work, vocabulary)
                return TrainingOutcome(work_id=work.work_id, result=passed)
            return TrainingOutcome(work_id=work.work_id, result=adapter.step(work))
        except Exception as exc:  # noqa: BLE001 - only this work fails
            return TrainingOutcome(work_id=work.work_id, error=exc)

    # Sampling

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Load sampler weights from saved files."""
        async with self._exclusively():
            base_CK = self._tables[known_model(self._models, base_model).name]
            check_base(self._models, folder, base_model)
            weights = await asyncio.to_thread(files.load_weights, folder)
            self._forget_weights(weights_id)
            self._weights[weights_id] = arithmetic.log_table(base_CK, weights)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights once no admitted sample uses them; unknown ids are ignored."""
        self._dropped.add(weights_id)
        self._forget_unused()

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether the sampler weights are loaded."""
        return weights_id in self._weights and weights_id not in self._dropped

    def admit(self, sample: SampleWork) -> None:
        """Add a sample; no effect if it is already admitted."""
        if sample.work_id not in self._samples:
            model = known_model(self._models, sample.base_model)
            draws = self._draws_for(sample, model)
            self._samples[sample.work_id] = RunningSample(sample, draws, model)

    def _draws_for(self, sample: SampleWork, model: BaseModel) -> Draws:
        """The distributions shared by all samples with these weights and sampling parameters."""
        params = sample.request.sampling_params
        key = (sample.weights_id, model.name, params.temperature, params.top_k, params.top_p)
        if key not in self._draws:
            if sample.weights_id is None:
                table_CK = arithmetic.log_table(self._tables[model.name], {})
            else:
                table_CK = self._weights[sample.weights_id]
            while len(self._draws) >= MOST_DRAWS:
                del self._draws[next(iter(self._draws))]
            self._draws[key] = Draws(table_CK, self._vocabularies[model.vocabulary], params)
        return self._draws[key]

    def cancel(self, work_id: str) -> None:
        """Drop a sample; unknown ids are ignored."""
        self._samples.pop(work_id, None)

    async def step_sampler(self) -> list[SampleEvent]:
        """Sample a few tokens of every admitted sequence and return the new events."""
        if not self._samples:
            return []
        async with self._exclusively():
            started = resumed = time.monotonic()
            events: list[SampleEvent] = []
            for work_id, sample in list(self._samples.items()):
                if work_id not in self._samples:  # cancelled while the event loop ran other tasks
                    continue
                events += self._step(sample)
                if time.monotonic() - resumed > LOOP_S:
                    await asyncio.sleep(0)
                    resumed = time.monotonic()
            await asyncio.sleep(max(0.0, started + self._settings.step_s - time.monotonic()))
            self._forget_unused()
            return events

    def _step(self, sample: RunningSample) -> list[SampleEvent]:
        work_id = sample.work.work_id
        events: list[SampleEvent] = []
        try:
            events += sample.step(self._settings.tokens_per_step)
            if not sample.is_done:
                return events
            events.append(SampleOutcome(work_id=work_id, result=sample.response()))
        except Exception as exc:  # noqa: BLE001 - only this sample fails
            events.append(SampleOutcome(work_id=work_id, error=exc))
        self._samples.pop(work_id, None)
        return events

    def _forget_unused(self) -> None:
        """Free dropped weights that no running sample uses any more."""
        if self._dropped:
            used = {sample.work.weights_id for sample in self._samples.values()}
            for weights_id in self._dropped - used:
                self._forget_weights(weights_id)

    def _forget_weights(self, weights_id: WeightsId) -> None:
        self._dropped.discard(weights_id)
        self._weights.pop(weights_id, None)
        for key in [key for key in self._draws if key[0] == weights_id]:
            del self._draws[key]
