"""The embedded engine: trains and samples with PyTorch in this process.

Two threads compute: one trains, running calls in order, and one samples concurrently. Both use the
same base models, which never change; sampler weights are copies. Adapters are saved from a frozen
copy while training continues.

Batches with uploaded losses have their own threads, since such a loss may compute for minutes.

Calls on the same adapter run in call order, calls on different adapters concurrently
(`engine/call_order.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    SampleEvent,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
    has_uploaded_loss,
)
from tinsmith.engine.call_order import AdapterCallOrder
from tinsmith.engine.embedded import adapter_state as files
from tinsmith.engine.embedded.adapter_state import AdapterState
from tinsmith.engine.embedded.batched_sampler import BatchedSampler, SamplerSettings
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings, free_threads
from tinsmith.engine.embedded.model_loading import choose_device, choose_dtypes, load_models
from tinsmith.engine.embedded.sampler_thread import SamplerThread, closed
from tinsmith.engine.embedded.trainer import Trainer
from tinsmith.engine.files.adapter_files import check_base, known_model, model_to_train
from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.kernels.library import kernels
from tinsmith.engine.model.lora import FusedLora
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import NotFoundError, ValidationError

BATCHES_PER_CALL = 4
"""Maximum packed batches that one `train` call should fill."""

MOST_SEQUENCES = 512
"""Maximum sequences per sampler step, where they cost little more than one."""
UPLOADED_LOSS_THREADS = 2
"""Concurrent batches with uploaded losses. Each may take `pass_bytes` of memory."""

_log = logging.getLogger(__name__)

R = TypeVar("R")


class EmbeddedEngine(Engine):
    """Base models, adapters and samplers in this process.

    Args:
        models: The base models to load, and their aliases.
        settings: None for the defaults.
    """

    name = files.NAME
    samples_concurrently = True

    def __init__(
        self, models: Sequence[EmbeddedModel], settings: EmbeddedSettings | None = None
    ) -> None:
        self._given = tuple(models)
        self._settings = settings or EmbeddedSettings()
        self._models: dict[str, BaseModel] = {}
        self._transformers: dict[str, Transformer] = {}
        self._adapters: dict[AdapterId, AdapterState] = {}
        """Changed only on the training thread."""
        self._samplers: dict[str, BatchedSampler] = {}
        self._weights: dict[WeightsId, BatchedSampler] = {}
        self._order = AdapterCallOrder()
        self._training: ThreadPoolExecutor | None = None
        self._uploaded: ThreadPoolExecutor | None = None
        self._trainer: Trainer | None = None
        self._adapter_bytes: int | None = None
        self._sampling: SamplerThread | None = None

    async def open(self) -> None:
        """Load the base models and start the training and sampling threads.

        Raises:
            BaseModelError: A model cannot be loaded.
            ValidationError: The device in the settings is not available.
        """
        threads = self._settings.threads or free_threads()
        self._training, self._uploaded = (
            ThreadPoolExecutor(
                workers, name, initializer=torch.set_num_threads, initargs=(threads,)
            )
            for workers, name in (
                (1, "tinsmith-trainer"),
                (UPLOADED_LOSS_THREADS, "tinsmith-uploaded-loss"),
            )
        )
        try:
            self._transformers = await self._on_thread(self._load)
            self._adapter_bytes = self._settings.adapter_bytes or self._free_bytes()
            self._models = {
                one.name: _base_model(one, self._transformers[one.name].architecture)
                for one in self._given
            }
            self._trainer = Trainer(self._transformers, pass_bytes=self._settings.pass_bytes)
            self._samplers = self._make_samplers(threads)
            self._sampling = SamplerThread(self._samplers, threads)
        except BaseException:
            await self.close()
            raise

    def _load(self) -> dict[str, Transformer]:
        device = choose_device(self._settings.device)
        types = choose_dtypes(self._settings.dtype, device)
        _log.info(
            "computing in %s on %s with %d threads, %s",
            *(str(types.computed).removeprefix("torch."), device, torch.get_num_threads()),
            "by PyTorch alone" if device != "cpu" or kernels() is None else "with compiled kernels",
        )
        return load_models(self._given, types, device)

    def _free_bytes(self) -> int | None:
        """What a GPU has free for adapters; None on the CPU, and if nothing is left."""
        devices = {model.device for model in self._transformers.values()}
        if not devices or any(one.type != "cuda" for one in devices):
            return None
        free = min(torch.cuda.mem_get_info(one)[0] for one in devices)
        left = free - self._settings.kv_bytes - self._settings.pass_bytes
        return left if left > 0 else None

    def _make_samplers(self, threads: int) -> dict[str, BatchedSampler]:
        """One sampler per model, under all of its names; they divide the KV memory."""
        made: dict[int, BatchedSampler] = {}
        folders = {id(self._transformers[one.name]): one.folder for one in self._given}
        kv_bytes = self._settings.kv_bytes // max(1, len(folders))
        for model in self._transformers.values():
            if id(model) not in made:
                made[id(model)] = BatchedSampler(
                    model,
                    tokenizer_folder=folders[id(model)],
                    settings=_sampler_settings(model, threads, kv_bytes),
                )
        return {name: made[id(model)] for name, model in self._transformers.items()}

    async def close(self) -> None:
        """Stop the training and sampling threads and release the models; running calls fail."""
        trainings, sampling = (self._training, self._uploaded), self._sampling
        self._training = self._uploaded = self._sampling = None
        if self._trainer is not None:
            self._trainer.close()
        if sampling is not None:
            await sampling.close()
        for training in trainings:
            if training is not None:
                await asyncio.to_thread(training.shutdown, cancel_futures=True)
        self._adapters.clear()
        self._weights.clear()
        self._samplers.clear()
        self._transformers.clear()

    async def _on_thread(
        self, run: Callable[[], R], *adapters: AdapterId, has_uploaded_loss: bool = False
    ) -> R:
        """Run a function on the training thread, after all earlier calls.

        Args:
            run: The function.
            adapters: The adapters that it uses.
            has_uploaded_loss: Run it on another thread, after the earlier calls on these adapters.
        """
        if self._training is None:
            raise closed()
        try:
            async with self._order.after_earlier_calls(adapters):
                threads = self._uploaded if has_uploaded_loss else self._training
                if threads is None:
                    raise closed()
                return await asyncio.get_running_loop().run_in_executor(threads, run)
        except asyncio.CancelledError:
            if self._training is None:  # closed while this was waiting
                raise closed() from None
            raise

    def base_models(self) -> tuple[BaseModel, ...]:
        """The loaded base models, aliases included."""
        return tuple(self._models.values())

    def capacity(self) -> EngineCapacity:
        """The configured limits and the current number of adapters and samples."""
        return EngineCapacity(
            most_adapters=self._settings.most_adapters,
            adapters=len(self._adapters),
            most_samples=self._settings.most_samples,
            samples=0 if self._sampling is None else self._sampling.samples,
            batch_tokens=self._batch_tokens(),
            adapter_bytes=self._adapter_bytes,
        )

    def _batch_tokens(self) -> int:
        """Few packed batches per call: more gain nothing, and others would wait for all of them."""
        most = self._settings.batch_tokens
        return most if self._trainer is None else min(most, BATCHES_PER_CALL * self._trainer.rows)

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Create an adapter with fresh weights, on the training thread."""

        def run() -> None:
            model = self._checked(spec)
            made = files.fresh_adapter(spec, model.architecture, str(model.device))
            self._adapters[spec.adapter_id] = made

        await self._on_thread(run, spec.adapter_id)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter from saved files, on the training thread."""

        def run() -> None:
            model = self._checked(spec)
            check_base(self._models, folder, spec.base_model)
            made = files.load_adapter(spec, model.architecture, folder, parts, str(model.device))
            self._adapters[spec.adapter_id] = made

        await self._on_thread(run, spec.adapter_id)

    def _checked(self, spec: AdapterSpec) -> Transformer:
        """The base model, if it can be trained with this spec."""
        model = model_to_train(self._models, spec)
        transformer = self._transformers[model.name]
        if not files.layout_of(transformer.architecture, spec.lora).size:
            raise ValidationError(
                f"these settings train no layer of {model.name}",
                remedy="enable train_attn, train_mlp or train_unembed",
            )
        return transformer

    def _model(self, name: str) -> BaseModel:
        return known_model(self._models, name)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Copy the adapter on the training thread, then write the copy while training continues."""

        def run() -> AdapterState:
            if adapter_id not in self._adapters:
                raise NotFoundError(f"model {adapter_id} is not loaded")
            return self._adapters[adapter_id].frozen_copy()

        frozen = await self._on_thread(run, adapter_id)
        model = self._model(frozen.spec.base_model)
        await asyncio.to_thread(
            files.save_adapter,
            frozen,
            folder,
            parts,
            base_model=model.source or model.name,
            ties_embeddings=self._transformers[model.name].architecture.ties_embeddings,
        )

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Unload an adapter after all earlier calls on it; no error if it is not loaded."""
        if self._training is not None:
            await self._on_thread(lambda: self._adapters.pop(adapter_id, None), adapter_id)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether the adapter is loaded."""
        return adapter_id in self._adapters

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run a batch of works on the training thread; uploaded losses run on another thread."""
        trainer = self._trainer
        if trainer is None:
            raise closed()
        return await self._on_thread(
            lambda: trainer.train(batch, self._adapters),
            *(work.adapter_id for work in batch),
            has_uploaded_loss=has_uploaded_loss(batch),
        )

    # Sampling

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Read sampler weights on a worker thread and pass them to the sampler of their model."""
        if self._sampling is None:
            raise closed()
        model = self._model(base_model)
        transformer = self._transformers[model.name]

        def read() -> FusedLora:
            check_base(self._models, folder, base_model)
            layout, flat = files.load_weights(transformer.architecture, folder)
            return layout.fused(flat.to(transformer.device), transformer.dtype, is_frozen=True)

        lora = await asyncio.to_thread(read)
        if self._sampling is None:
            raise closed()
        sampler = self._weights[weights_id] = self._samplers[base_model]
        self._sampling.call(partial(sampler.add_weights, weights_id, lora))

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights once no admitted sample uses them; unknown ids are ignored."""
        sampler = self._weights.pop(weights_id, None)
        if sampler is not None and self._sampling is not None:
            self._sampling.call(partial(sampler.drop_weights, weights_id))

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether the sampler weights are loaded."""
        return weights_id in self._weights

    def admit(self, sample: SampleWork) -> None:
        """Add a sample to the running batch; no effect if it is already admitted."""
        if self._sampling is None:
            raise closed()
        if self._sampling.is_admitted(sample.work_id):
            return
        model = self._model(sample.base_model)
        weights = sample.weights_id
        if weights is not None and self._weights.get(weights) is not self._samplers[model.name]:
            raise NotFoundError(f"weights {sample.weights_id} are not loaded")
        self._sampling.admit(sample)

    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next token boundary; unknown ids are ignored."""
        if self._sampling is not None:
            self._sampling.cancel(work_id)

    async def step_sampler(self) -> list[SampleEvent]:
        """The new events of the sampling thread; waits briefly for one if samples are admitted."""
        return [] if self._sampling is None else await self._sampling.events()


def _sampler_settings(model: Transformer, threads: int, kv_bytes: int) -> SamplerSettings:
    """Large steps for throughput, and short ones while tenants share the sampler.

    A step reads all weights, however few rows it has, and then computes each row. With much compute
    per memory bandwidth, hundreds of rows give the most tokens per second. But a tenant with one
    sample waits for the rows of others: 16 rows per CPU thread make a step two to three times as
    long.
    """
    if model.device.type != "cpu":
        return SamplerSettings(
            kv_bytes=kv_bytes, most_sequences=MOST_SEQUENCES, shared_rows=MOST_SEQUENCES // 2
        )
    shared_rows = min(MOST_SEQUENCES // 2, 16 * threads)
    is_fast = model.dtype == torch.bfloat16
    return SamplerSettings(
        kv_bytes=kv_bytes,
        most_sequences=MOST_SEQUENCES if is_fast else min(MOST_SEQUENCES, 8 * shared_rows),
        shared_rows=shared_rows,
    )


def _base_model(given: EmbeddedModel, architecture: Architecture) -> BaseModel:
    return BaseModel(
        name=given.name,
        vocabulary=architecture.vocabulary,
        max_context=architecture.max_context,
        eos_tokens=architecture.eos_tokens,
        tokenizer_id=given.tokenizer_id or str(given.folder),
        architecture=architecture.name,
        alias_of=given.alias_of,
        source=given.source or str(given.folder),
        layers={
            name: (outputs, shape.inputs)
            for shape in architecture.linears()
            for name, outputs in shape.parts
        },
    )
