"""What every engine promises. `tests/contract/test_engine.py` holds each variant to it.

An engine holds base models, which never change, and *adapters*: LoRA weights that are trained, each
with its optimizer state and the gradients gathered since its last step. It holds *sampler weights*
apart from them: immutable, made from what an adapter once was.

True of every engine:

- Work is done whole or not at all. A work that fails (a NaN, not enough memory, an unknown loss)
  leaves its adapter exactly as it was, fails alone, and leaves the engine alive.
- Numbers depend on what was asked and on nothing else: not on what shared the batch, nor on when it
  ran. The same works in the same order from the same start give the same adapter, bit for bit, on
  the same machine. Recovery after a crash rests on that.
- Requests were checked when they were accepted (`server/checks.py`): ids are inside the vocabulary,
  shapes fit. An engine may rely on that for its safety, and must still not die of a bad one.
- Errors that a user can mend are `TinkerError`s with a message for them; any other is a fault.

Methods are called from one event loop. Those that compute are coroutines and do not hold it up;
those that are not return at once. An engine runs one coroutine of `train`, `step_sampler`,
`save_adapter` and `load_…` after another, in the order in which they were called, unless it says
that it can do better. A call of `train` whose works have uploaded losses, which may compute for
minutes, holds up no call about other adapters. Calls about one adapter always take effect in the
order in which they were made.

Knows nothing of HTTP, tenants or the ledger.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NewType, Self

import msgspec

from tinsmith.errors import TinkerError
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
"""The id of the model whose weights they are."""
WeightsId = NewType("WeightsId", str)
"""The id of sampler weights: their path, or the sampling session that they were made for."""


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that adapters are trained on and samples are drawn from."""

    name: str
    """What clients call it; everything after `:` says that it is a stand-in."""
    vocabulary: int
    """Token ids are below this."""
    max_context: int
    """Tokens that one sequence may have, prompt and sample together. One more can be drawn after a
    prompt that has them all: it is not read."""
    eos_tokens: tuple[int, ...] = ()
    tokenizer_id: str | None = None
    """What a client loads the tokenizer by: an id or a local folder."""
    architecture: str | None = None
    alias_of: str | None = None
    """The first name of the same model, if this is another one."""
    max_rank: int = 256
    takes_images: bool = False
    source: str | None = None
    """What other programs find it by: its id on the hub, or the folder that it was loaded from."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter is made of; it never changes."""

    adapter_id: AdapterId
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig


class CustomLossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded loss, checked against the allow-list when it came."""

    loss_id: str
    inputs: tuple[CustomLossInput, ...]
    graph: CustomLossGraph


class PassWork(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over data; with gradients they add up in the adapter until its next step."""

    work_id: str
    adapter_id: AdapterId
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: dict[str, float | str] = {}
    with_gradients: bool = True
    custom_loss: CustomLossSpec | None = None

    @property
    def tokens(self) -> int:
        """How many positions the pass goes over."""
        return sum(datum.model_input.length for datum in self.data)


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the optimizer over the gathered gradients, which are cleared."""

    work_id: str
    adapter_id: AdapterId
    params: OptimParams


TrainingWork = PassWork | StepWork


def has_uploaded_loss(works: Sequence[TrainingWork]) -> bool:
    """Whether one of the works computes an uploaded loss."""
    return any(isinstance(one, PassWork) and one.custom_loss is not None for one in works)


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one work ended: with a result or with an error."""

    work_id: str
    result: ForwardBackwardOutput | OptimStepResponse | None = None
    error: BaseException | None = None


class SampleWork(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences to draw from one prompt."""

    work_id: str
    base_model: str
    weights_id: WeightsId | None
    """Which sampler weights; None for the base model as it is."""
    request: SampleRequest
    is_streamed: bool = False
    """Whether tokens are wanted as they come."""
    owner: str = ""
    """Whose it is: owners share the engine equally, see `Engine.step_sampler`."""


class SampleTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were drawn for one sequence of a streamed work; they come in order."""

    work_id: str
    sequence: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class SampleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a sample ended: with all its sequences or with an error."""

    work_id: str
    result: SampleResponse | None = None
    error: BaseException | None = None


SampleEvent = SampleTokens | SampleOutcome


class Saved(enum.Flag):
    """What `save_adapter` writes."""

    WEIGHTS = enum.auto()
    OPTIMIZER = enum.auto()
    GRADIENTS = enum.auto()
    CHECKPOINT = WEIGHTS | OPTIMIZER
    """What a user's training checkpoint holds."""
    SNAPSHOT = WEIGHTS | OPTIMIZER | GRADIENTS
    """Everything, so that an adapter loaded from it goes on as if nothing had happened."""


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine can hold and how much it holds."""

    most_adapters: int
    adapters: int
    most_samples: int
    """How many sample works may be admitted at a time."""
    samples: int
    batch_tokens: int
    """How many tokens one call of `train` should have at most; a single larger work is allowed."""


class Engine(abc.ABC):
    """See the top of the module."""

    name: str
    """What settings call it."""
    samples_apart: bool = False
    """Whether samples run beside training, so that neither takes time from the other."""

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
        """Load the base models. Nothing else may be called before."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of everything; what runs ends with an error. May be called again."""

    async def wait_lost(self) -> TinkerError:
        """Return why, once everything that the engine held is gone; it may be opened anew then.

        Calls that are under way fail with an `EngineLostError`. An engine that ends only with this
        process never returns from here.
        """
        never: asyncio.Future[TinkerError] = asyncio.get_running_loop().create_future()
        return await never

    @abc.abstractmethod
    def base_models(self) -> tuple[BaseModel, ...]:
        """Every name that a client may ask for, aliases included."""

    @abc.abstractmethod
    def capacity(self) -> EngineCapacity:
        """How full it is."""

    # Adapters

    @abc.abstractmethod
    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Make an adapter with fresh weights, which `spec.lora.seed` determines.

        Without a seed the adapter's id determines them, so that a replay makes the same. An adapter
        of this id that is there is replaced.

        Raises:
            NotFoundError: There is no such base model.
            ValidationError: The base model cannot be trained so.
        """

    @abc.abstractmethod
    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: Saved) -> None:
        """Make an adapter, or replace the one of this id, from files that `save_adapter` wrote.

        Parts that are not asked for begin afresh: no moments, no gradients, step 0.

        Raises:
            ValidationError: The files do not fit: another base model, rank or layout, or a part
                that is asked for is not there.
        """

    @abc.abstractmethod
    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: Saved) -> None:
        """Write files (`checkpoints/format.py`) into an empty folder; the adapter stays as it is.

        What is written is the adapter as all works given before have left it. Whether the files are
        on the disk is the caller's to see to.
        """

    @abc.abstractmethod
    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Forget an adapter and free its memory; no error if there is none."""

    @abc.abstractmethod
    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether it is loaded."""

    # Training

    @abc.abstractmethod
    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run a batch; one outcome for each work, in the same order.

        Works of one adapter take effect in the order given; works of different adapters share
        passes where they can. A work of an adapter that is not loaded fails.
        """

    # Sampling

    @abc.abstractmethod
    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Make sampler weights ready, from files of `save_adapter`; again is no error.

        Raises:
            ValidationError: The files do not fit.
        """

    @abc.abstractmethod
    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Forget sampler weights once no admitted sample uses them; no error if there are none."""

    @abc.abstractmethod
    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether they are loaded."""

    @abc.abstractmethod
    def admit(self, sample: SampleWork) -> None:
        """Let a sample join at the next token boundary. Its weights are loaded.

        A work whose id is admitted already is not admitted twice.
        """

    @abc.abstractmethod
    def cancel(self, work_id: str) -> None:
        """Drop a sample at the next token boundary; no outcome follows. Unknown ids are ignored."""

    @abc.abstractmethod
    async def step_sampler(self) -> list[SampleEvent]:
        """Draw the next token, or a few, of every admitted sample; tell what came and what ended.

        Returns at once with nothing if none is admitted. An engine whose samples run beside this
        call waits here until there is something to tell. Each work has one outcome; its result
        holds all tokens, also those told before.

        A step may leave out samples of an owner that has many, in favour of owners that have few:
        the first token of an owner's only sample comes after a bounded number of steps, however
        many samples of others were admitted before it.
        """
