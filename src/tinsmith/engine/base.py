"""The contract of every engine; `tests/contract/test_engine.py` tests each engine against it.

An engine holds base models, which never change, and *adapters*: LoRA weights under training, each
with its optimizer state and the gradients accumulated since its last step. Separately it holds
*sampler weights*: immutable copies of what an adapter was at some point.

Every engine guarantees:

- A work is atomic. One that fails (NaN, out of memory, unknown loss) leaves its adapter exactly as
  it was, fails alone, and does not stop the engine.
- Results depend on the works alone, not on what shared the batch or on timing. The same works in
  the same order from the same state give the same adapter, bit for bit, on the same machine. Crash
  recovery relies on this.
- Requests were validated when they were accepted (`service/api/request_checks.py`): token ids are
  inside the vocabulary and shapes match. An engine may rely on that, but an invalid request must
  not crash it.
- An error that the user can fix is a `TinkerError` with a message for the user. Any other exception
  is a bug or a machine failure.

An engine may consist of several *replicas* (`engine/fleet`), each with base models, adapters and
sampler weights of its own. A replica can be lost while the others continue. Works on the adapters
that it held then fail with `AdapterLostError`, until the adapters are created or loaded again;
`watch_replicas` tells which they are.

All methods are called from one event loop. Coroutines may compute and must not block the loop;
plain methods return immediately. `train`, `step_sampler`, `save_adapter` and the `load_…` methods
run one at a time in call order, unless the engine documents that it does better. A `train` call
with uploaded losses, which may run for minutes, delays no call on other adapters. Calls on the
same adapter always take effect in call order.

Knows nothing of HTTP, tenants or the ledger.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NewType, Self

import msgspec

from tinsmith.errors import NotFoundError, TinkerError
from tinsmith.types import (
    CustomLossGraph,
    CustomLossInput,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
    OptimStepResponse,
    SampleResponse,
)
from tinsmith.types.requests import SampleRequest

AdapterId = NewType("AdapterId", str)
"""The id of the model (in the API's sense) that the adapter belongs to."""
WeightsId = NewType("WeightsId", str)
"""The id of sampler weights: their checkpoint path, or the sampling session they were made for."""


# Models and adapters


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that adapters are trained on and samples are drawn from."""

    name: str
    """The name that clients use. A suffix after `:` marks a stand-in for the model of that name."""
    vocabulary: int
    """Number of token ids; valid ids are `0 … vocabulary - 1`."""
    max_context: int
    """Maximum tokens of one sequence, prompt and completion together. After a prompt of exactly
    this length one more token can be sampled, since it is never fed back."""
    eos_tokens: tuple[int, ...] = ()
    tokenizer_id: str | None = None
    """What a client loads the tokenizer from: a hub id or a local folder."""
    architecture: str | None = None
    alias_of: str | None = None
    """The primary name of the same model, if this entry is an alias."""
    max_rank: int = 256
    takes_images: bool = False
    source: str | None = None
    """What other programs load it from: its hub id, or the folder it was loaded from."""
    layers: dict[str, tuple[int, int]] = {}
    """The outputs and inputs of each linear layer that can have an adapter, by name; empty where
    the engine does not say."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable configuration of an adapter."""

    adapter_id: AdapterId
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig


class AdapterParts(enum.Flag):
    """Which parts of an adapter `save_adapter` writes and `load_adapter` reads."""

    WEIGHTS = enum.auto()
    OPTIMIZER = enum.auto()
    GRADIENTS = enum.auto()
    CHECKPOINT = WEIGHTS | OPTIMIZER
    """A user's training checkpoint."""
    SNAPSHOT = WEIGHTS | OPTIMIZER | GRADIENTS
    """Everything: training resumes from it bit for bit."""


# Training


class CustomLossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded loss. Its operations were checked against the allow-list at upload."""

    loss_id: str
    inputs: tuple[CustomLossInput, ...]
    graph: CustomLossGraph


class PassWork(msgspec.Struct, frozen=True, kw_only=True, tag="pass"):
    """A forward pass over data, and a backward pass if `with_gradients`.

    Gradients accumulate in the adapter until its next `StepWork`.
    """

    work_id: str
    adapter_id: AdapterId
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: dict[str, float | str] = {}
    with_gradients: bool = True
    custom_loss: CustomLossSpec | None = None
    """The uploaded loss, if `loss_fn` is `custom`."""

    @property
    def tokens(self) -> int:
        """Number of input positions in all data."""
        return sum(datum.model_input.length for datum in self.data)


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer step over the accumulated gradients, which are then reset to zero."""

    work_id: str
    adapter_id: AdapterId
    params: OptimParams


TrainingWork = PassWork | StepWork


def has_uploaded_loss(works: Sequence[TrainingWork]) -> bool:
    """Whether any of the works uses an uploaded loss."""
    return any(isinstance(one, PassWork) and one.custom_loss is not None for one in works)


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one work: a result or an error."""

    work_id: str
    result: ForwardBackwardOutput | OptimStepResponse | None = None
    error: BaseException | None = None


# Sampling


class SampleWork(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences to sample from one prompt."""

    work_id: str
    base_model: str
    weights_id: WeightsId | None
    """The sampler weights; None for the plain base model."""
    request: SampleRequest
    is_streamed: bool = False
    """Whether `SampleTokens` events are wanted before the outcome."""
    owner: str = ""
    """The tenant. Owners share the sampler fairly; see `Engine.step_sampler`."""


class SampleTokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of one sequence of a streamed work, in order."""

    work_id: str
    sequence: int
    """Index of the sequence, below `request.num_samples`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class SampleOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The outcome of a sample work: all its sequences, or an error."""

    work_id: str
    result: SampleResponse | None = None
    error: BaseException | None = None


SampleEvent = SampleTokens | SampleOutcome


# The engine


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an engine and its current load."""

    most_adapters: int
    adapters: int
    most_samples: int
    """Maximum number of sample works admitted at the same time."""
    samples: int
    batch_tokens: int
    """Target for the tokens of one `train` call; a single larger work is allowed."""
    adapter_bytes: int | None = None
    """Memory for adapters; None if it is not known."""


class ReplicaChange(msgspec.Struct, frozen=True, kw_only=True):
    """A replica was lost, or can be used now."""

    replica: str
    lost: str | None = None
    """Why it was lost; None if it can be used, or has room again."""
    adapters: frozenset[AdapterId] = frozenset()
    """The adapters that were lost with it."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, for operators."""

    name: str
    state: str
    """`running`, `starting`, `restarting`, `draining` or `drained`."""
    duty: str
    device: str
    threads: int
    base_models: tuple[str, ...]
    pid: int | None
    adapters: tuple[str, ...]
    most_adapters: int
    weights: int
    """How many sampler weights it holds."""
    samples: int
    """How many samples it is drawing."""
    load: float
    """The share of the last minute in which it was computing."""
    losses: int
    """How often it was lost."""
    last_loss: str | None
    restarts_in_s: float | None
    """When it is started again, if it waits for that."""


class Engine(abc.ABC):
    """Trains adapters and samples from base models; the module's docstring has the guarantees."""

    name: str
    """The name of the engine in settings."""
    samples_concurrently: bool = False
    """Whether sampling runs beside training, so that neither waits for the other."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def open(self) -> None:
        """Load the base models. Must be called first."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release all resources; running calls fail. May be called more than once."""

    async def wait_lost(self) -> TinkerError:
        """Return the reason once the engine has lost its state; it can then be opened again.

        Calls that are running at that point fail with `EngineLostError`. An engine that lives in
        this process cannot be lost, and never returns from here.
        """
        never: asyncio.Future[TinkerError] = asyncio.get_running_loop().create_future()
        return await never

    # Replicas

    def replica_of(self, adapter_id: AdapterId) -> str:
        """The name of the replica that holds an adapter, or that held it when it was lost.

        Adapters on one replica share batches; `train` calls for different replicas run
        concurrently. An engine that is not divided has one replica without a name.
        """
        del adapter_id
        return ""

    def replica_for(self, sample: SampleWork) -> str:
        """The name of the replica that would draw a sample if it were admitted now."""
        del sample
        return ""

    def watch_replicas(self, tell: Callable[[ReplicaChange], None]) -> None:
        """Have each change of a replica told, before any call fails because of it.

        `tell` replaces the one of an earlier call. An engine that is not divided is lost as a whole
        (`wait_lost`), and tells nothing here.
        """
        del tell

    def replicas(self) -> tuple[ReplicaReport, ...]:
        """All replicas; none for an engine that is not divided."""
        return ()

    def drain(self, replica: str, *, is_drained: bool = True) -> None:
        """Move everything off a replica and close it; or, if not `is_drained`, use it again.

        Returns at once; `replicas` shows how far it is.

        Raises:
            NotFoundError: There is no such replica.
            ValidationError: Nothing could take its place.
        """
        del is_drained
        raise NotFoundError(f"there is no replica {replica!r}")

    @abc.abstractmethod
    def base_models(self) -> tuple[BaseModel, ...]:
        """All model names that a client may use, aliases included."""

    @abc.abstractmethod
    def capacity(self) -> EngineCapacity:
        """The current limits and load."""

    # Adapters

    @abc.abstractmethod
    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Create an adapter with fresh weights, determined by `spec.lora.seed`.

        Without a seed the adapter's id determines them, so that a replay creates the same weights.
        An existing adapter of this id is replaced.

        Raises:
            NotFoundError: There is no such base model.
            ValidationError: The base model cannot be trained with this configuration.
            NoReplicaError: No replica that serves the base model has room now.
        """

    @abc.abstractmethod
    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter from files that `save_adapter` wrote.

        Parts that are not requested start fresh: no moments, no gradients, step 0.

        Raises:
            ValidationError: The files do not match the spec (base model, rank or layers), or a
                requested part is missing.
        """

    @abc.abstractmethod
    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Write an adapter's files (`checkpoints/format.py`) into an empty folder.

        Saves the state after all works submitted before this call. Syncing the files to disk is
        left to the caller.
        """

    @abc.abstractmethod
    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Unload an adapter and free its memory; no error if it is not loaded."""

    @abc.abstractmethod
    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether the adapter is loaded."""

    # Training

    @abc.abstractmethod
    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run a batch of works; returns one outcome per work, in the same order.

        Works on one adapter take effect in the given order. Works on different adapters share
        forward and backward passes where possible. A work on an adapter that is not loaded fails.
        """

    # Sampling

    @abc.abstractmethod
    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Load sampler weights from files of `save_adapter`; loading them twice is no error.

        Raises:
            ValidationError: The files do not match the base model.
        """

    @abc.abstractmethod
    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights once no admitted sample uses them; unknown ids are ignored."""

    @abc.abstractmethod
    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether the sampler weights are loaded."""

    @abc.abstractmethod
    def admit(self, sample: SampleWork) -> None:
        """Add a sample to the running batch at the next token boundary.

        Its weights must be loaded. Admitting an id that is already admitted has no effect.
        """

    @abc.abstractmethod
    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next token boundary; unknown ids are ignored.

        Its events may already be on their way here from another process. The caller ignores them.
        """

    @abc.abstractmethod
    async def step_sampler(self) -> list[SampleEvent]:
        """Sample the next token (or a few) of every admitted sample and return the new events.

        Returns an empty list at once if nothing is admitted. An engine that samples concurrently
        waits here until there is an event. Each work has exactly one outcome, whose result
        includes the tokens streamed before.

        A step may skip samples of an owner with many of them in favour of owners with few. The
        first token of an owner's only sample comes after a bounded number of steps, however many
        samples of other owners were admitted earlier.
        """
