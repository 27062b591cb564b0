"""The embedded engine: base models in this process, trained and sampled with PyTorch.

Two threads compute. One trains: calls queue on it in their order. The other samples, and goes on
while the first one trains. Base models never change, and both use the same; sampler weights are
copies. Files are written of what an adapter was, beside the training that goes on.

Batches with uploaded losses have threads of their own: such a loss may compute for minutes, and
others go on training meanwhile.
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

from tinsmith.engines.adapter_files import check_base, known_model, model_to_train
from tinsmith.engines.adapter_turns import AdapterTurns
from tinsmith.engines.base import (
    AdapterId,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    SampleEvent,
    SampleWork,
    Saved,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
    has_uploaded_loss,
)
from tinsmith.engines.embedded import adapters as files
from tinsmith.engines.embedded.adapters import Adapter
from tinsmith.engines.embedded.loading import chosen_device, chosen_types, load_models
from tinsmith.engines.embedded.sampler import Sampler, SamplerSettings
from tinsmith.engines.embedded.sampler_thread import SamplerThread, closed
from tinsmith.engines.embedded.settings import EmbeddedModel, EmbeddedSettings, free_threads
from tinsmith.engines.embedded.trainer import Trainer
from tinsmith.errors import NotFoundError, ValidationError
from tinsmith.model.architecture import Architecture
from tinsmith.model.kernels.library import kernels
from tinsmith.model.lora import FusedLora
from tinsmith.model.transformer import Transformer

PACKS_AT_A_TIME = 4
"""How many packs one call of `train` should fill at most."""

MOST_SEQUENCES = 512
"""How many sequences take part in a step of the sampler, where these cost little more than one."""
UPLOADED_LOSS_THREADS = 2
"""How many batches with uploaded losses run at a time. Each may take `pass_bytes` of memory."""

_log = logging.getLogger(__name__)

R = TypeVar("R")


class EmbeddedEngine(Engine):
    """See the top of the module."""

    name = files.NAME
    samples_apart = True

    def __init__(
        self, models: Sequence[EmbeddedModel], settings: EmbeddedSettings | None = None
    ) -> None:
        self._given = tuple(models)
        self._settings = settings or EmbeddedSettings()
        self._models: dict[str, BaseModel] = {}
        self._transformers: dict[str, Transformer] = {}
        self._adapters: dict[AdapterId, Adapter] = {}
        """Changed on the training thread alone."""
        self._samplers: dict[str, Sampler] = {}
        self._weights: dict[WeightsId, Sampler] = {}
        self._turns = AdapterTurns()
        self._training: ThreadPoolExecutor | None = None
        self._uploaded: ThreadPoolExecutor | None = None
        self._trainer: Trainer | None = None
        self._sampling: SamplerThread | None = None

    async def open(self) -> None:
        """`Engine.open`.

        Raises:
            BaseModelError: A model cannot be loaded.
            ValidationError: The settings ask for a device that is not there.
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
        device = chosen_device(self._settings.device)
        types = chosen_types(self._settings.dtype, device)
        _log.info(
            "computing in %s on %s, threads: %d, %s",
            *(str(types.computed).removeprefix("torch."), device, torch.get_num_threads()),
            "by PyTorch alone" if device != "cpu" or kernels() is None else "with compiled kernels",
        )
        return load_models(self._given, types, device)

    def _make_samplers(self, threads: int) -> dict[str, Sampler]:
        """One for each model, under all of its names; the memory for keys is shared out."""
        made: dict[int, Sampler] = {}
        folders = {id(self._transformers[one.name]): one.folder for one in self._given}
        kv_bytes = self._settings.kv_bytes // max(1, len(folders))
        for model in self._transformers.values():
            if id(model) not in made:
                made[id(model)] = Sampler(
                    model,
                    tokenizer_folder=folders[id(model)],
                    settings=_sampler_settings(model, threads, kv_bytes),
                )
        return {name: made[id(model)] for name, model in self._transformers.items()}

    async def close(self) -> None:
        """`Engine.close`."""
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
        """Run on the training thread, after everything that was asked before.

        Args:
            run: What to run.
            adapters: What it is about.
            has_uploaded_loss: It runs on another thread, after what was asked about these adapters.
        """
        if self._training is None:
            raise closed()
        try:
            async with self._turns.turn(adapters):
                threads = self._uploaded if has_uploaded_loss else self._training
                if threads is None:
                    raise closed()
                return await asyncio.get_running_loop().run_in_executor(threads, run)
        except asyncio.CancelledError:
            if self._training is None:  # it was closed before this had its turn
                raise closed() from None
            raise

    def base_models(self) -> tuple[BaseModel, ...]:
        """`Engine.base_models`."""
        return tuple(self._models.values())

    def capacity(self) -> EngineCapacity:
        """`Engine.capacity`."""
        return EngineCapacity(
            most_adapters=self._settings.most_adapters,
            adapters=len(self._adapters),
            most_samples=self._settings.most_samples,
            samples=0 if self._sampling is None else self._sampling.samples,
            batch_tokens=self._batch_tokens(),
        )

    def _batch_tokens(self) -> int:
        """More than a few packs gain nothing together, and others would wait for all of them."""
        most = self._settings.batch_tokens
        return most if self._trainer is None else min(most, PACKS_AT_A_TIME * self._trainer.rows)

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """`Engine.create_adapter`."""

        def run() -> None:
            model = self._checked(spec)
            made = files.fresh_adapter(spec, model.architecture, str(model.device))
            self._adapters[spec.adapter_id] = made

        await self._on_thread(run, spec.adapter_id)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: Saved) -> None:
        """`Engine.load_adapter`."""

        def run() -> None:
            model = self._checked(spec)
            check_base(self._models, folder, spec.base_model)
            made = files.load_adapter(spec, model.architecture, folder, parts, str(model.device))
            self._adapters[spec.adapter_id] = made

        await self._on_thread(run, spec.adapter_id)

    def _checked(self, spec: AdapterSpec) -> Transformer:
        """The base model, if it can be trained so."""
        model = model_to_train(self._models, spec)
        transformer = self._transformers[model.name]
        if not files.layout_of(transformer.architecture, spec.lora).size:
            raise ValidationError(
                f"of {model.name} nothing is trained with these settings",
                remedy="set one of train_attn, train_mlp and train_unembed",
            )
        return transformer

    def _model(self, name: str) -> BaseModel:
        return known_model(self._models, name)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: Saved) -> None:
        """`Engine.save_adapter`."""

        def run() -> Adapter:
            if adapter_id not in self._adapters:
                raise NotFoundError(f"model {adapter_id} is not loaded")
            return self._adapters[adapter_id].as_it_is()

        as_it_was = await self._on_thread(run, adapter_id)
        model = self._model(as_it_was.spec.base_model)
        await asyncio.to_thread(
            files.save_adapter,
            as_it_was,
            folder,
            parts,
            base_model=model.source or model.name,
            ties_embeddings=self._transformers[model.name].architecture.ties_embeddings,
        )

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """`Engine.drop_adapter`."""
        if self._training is not None:
            await self._on_thread(lambda: self._adapters.pop(adapter_id, None), adapter_id)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """`Engine.has_adapter`."""
        return adapter_id in self._adapters

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """`Engine.train`."""
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
        """`Engine.load_weights`."""
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
        self._sampling.ask(partial(sampler.add_weights, weights_id, lora))

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """`Engine.drop_weights`."""
        sampler = self._weights.pop(weights_id, None)
        if sampler is not None and self._sampling is not None:
            self._sampling.ask(partial(sampler.drop_weights, weights_id))

    def has_weights(self, weights_id: WeightsId) -> bool:
        """`Engine.has_weights`."""
        return weights_id in self._weights

    def admit(self, sample: SampleWork) -> None:
        """`Engine.admit`."""
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
        """`Engine.cancel`."""
        if self._sampling is not None:
            self._sampling.cancel(work_id)

    async def step_sampler(self) -> list[SampleEvent]:
        """`Engine.step_sampler`."""
        return [] if self._sampling is None else await self._sampling.events()


def _sampler_settings(model: Transformer, threads: int, kv_bytes: int) -> SamplerSettings:
    """Steps as large as pay off, and short ones where tenants share them.

    A step reads all weights, however few rows it has, and then computes for each row. Where there
    is much arithmetic for the memory, hundreds of rows draw the most tokens a second. A tenant that
    has one sample waits for the rows of others: 16 of them on a CPU's thread make a step two to
    three times as long.
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
    )
