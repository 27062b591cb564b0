"""The messages between an engine's process and its parent.

Both ends begin with a hello, which has the version of this protocol, and refuse another version.
After that, each message is a struct of this module, encoded by `encoding.py`: calls, which are
answered, orders, which are not, replies, and lines of the log. The same messages can travel over
any connection that carries bytes in order (`connection.py`).

A change to a message, or to a type that one contains, changes `VERSION`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    EngineCapacity,
    PassWork,
    SampleEvent,
    SampleWork,
    StepWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.observe.log_fields import fields_of
from tinsmith.types import AdamParams, ForwardBackwardOutput, OptimParamsBase, OptimStepResponse

VERSION = 2
_MAGIC = b"tinsmith engine protocol "
MOST_HELLO_BYTES = 64


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message; on the way it is its name and its fields."""


# Calls, which are answered


class EngineCall(_Message, frozen=True):
    """Run something in the process, and reply with this number."""

    number: int


class OpenEngine(EngineCall, frozen=True):
    """Create the engine and open it."""

    spec: EngineSpec
    log_levels: dict[str, int]


class CreateAdapter(EngineCall, frozen=True):
    """`Engine.create_adapter`."""

    spec: AdapterSpec


class LoadAdapter(EngineCall, frozen=True):
    """`Engine.load_adapter`."""

    spec: AdapterSpec
    folder: str
    parts: int
    digest: str | None = None
    """Of the files, if it is to be checked."""


class SaveAdapter(EngineCall, frozen=True):
    """`Engine.save_adapter`."""

    adapter_id: AdapterId
    folder: str
    parts: int
    wants_digest: bool = False


class DropAdapter(EngineCall, frozen=True):
    """`Engine.drop_adapter`."""

    adapter_id: AdapterId


class SentStep(msgspec.Struct, frozen=True, tag="step"):
    """A `StepWork`, with its settings by class."""

    work_id: str
    adapter_id: AdapterId
    adam: AdamParams | None = None
    other: OptimParamsBase | None = None


class Train(EngineCall, frozen=True):
    """`Engine.train`."""

    works: tuple[PassWork | SentStep, ...]


class LoadWeights(EngineCall, frozen=True):
    """`Engine.load_weights`."""

    weights_id: WeightsId
    base_model: str
    folder: str


class DropWeights(EngineCall, frozen=True):
    """`Engine.drop_weights`."""

    weights_id: WeightsId


class StepSampler(EngineCall, frozen=True):
    """`Engine.step_sampler`."""


# Orders, which are not


class EngineOrder(_Message, frozen=True):
    """Do something in the process, without a reply."""


class AdmitSample(EngineOrder, frozen=True):
    """`Engine.admit`; a sample that is refused has an outcome like others."""

    sample: SampleWork


class CancelSample(EngineOrder, frozen=True):
    """`Engine.cancel`."""

    work_id: str


# From the process


class EngineOpened(msgspec.Struct, frozen=True, array_like=True):
    """The properties of an opened engine."""

    name: str
    samples_concurrently: bool
    base_models: tuple[BaseModel, ...]


class SentOutcome(msgspec.Struct, frozen=True):
    """A `TrainingOutcome`, with its result by class."""

    work_id: str
    passed: ForwardBackwardOutput | None = None
    stepped: OptimStepResponse | None = None
    error: BaseException | None = None


class CallReply(_Message, frozen=True):
    """The answer to a call: one of the results, or an error, and what the engine holds now."""

    number: int
    error: BaseException | None = None
    opened: EngineOpened | None = None
    outcomes: tuple[SentOutcome, ...] = ()
    events: tuple[SampleEvent, ...] = ()
    capacity: EngineCapacity | None = None
    digest: str | None = None


class ChildLogLine(_Message, frozen=True):
    """A log record of the child."""

    record: dict[str, str | int | float | None]


ToChild = (
    OpenEngine
    | CreateAdapter
    | LoadAdapter
    | SaveAdapter
    | DropAdapter
    | Train
    | LoadWeights
    | DropWeights
    | StepSampler
    | AdmitSample
    | CancelSample
)
ToParent = CallReply | ChildLogLine


# The hello


def hello() -> bytes:
    """The first body that each end sends."""
    return _MAGIC + str(VERSION).encode()


def check_hello(body: bytes) -> None:
    """Check the first body of the other end.

    Raises:
        DecodeError: It is no hello.
        ValidationError: The other end has another version of the protocol.
    """
    if not body.startswith(_MAGIC) or len(body) > MOST_HELLO_BYTES:
        raise DecodeError(f"expected the hello of an engine's process, not {body[:40]!r}")
    version = body.removeprefix(_MAGIC)
    if version != str(VERSION).encode():
        raise ValidationError(
            f"the other process speaks version {version.decode('ascii', 'replace')} of the engine "
            f"protocol, and this one version {VERSION}",
            remedy="install the same version of tinsmith for both",
        )


# Works and outcomes


def sent_works(works: tuple[TrainingWork, ...]) -> tuple[PassWork | SentStep, ...]:
    """Works as they are sent."""
    return tuple(one if isinstance(one, PassWork) else _sent_step(one) for one in works)


def _sent_step(work: StepWork) -> SentStep:
    params = work.params
    is_adam = isinstance(params, AdamParams)
    return SentStep(
        work.work_id,
        work.adapter_id,
        params if isinstance(params, AdamParams) else None,
        None if is_adam else params,  # type: ignore[arg-type]  # mypy does not follow is_adam
    )


def received_works(works: tuple[PassWork | SentStep, ...]) -> list[TrainingWork]:
    """Works as the engine takes them."""
    return [one if isinstance(one, PassWork) else _received_step(one) for one in works]


def _received_step(step: SentStep) -> StepWork:
    params = step.adam or step.other
    if params is None:
        raise DecodeError(f"the step {step.work_id} has no settings")
    return StepWork(work_id=step.work_id, adapter_id=step.adapter_id, params=params)


def sent_outcome(outcome: TrainingOutcome) -> SentOutcome:
    """An outcome as it is sent."""
    result = outcome.result
    is_step = isinstance(result, OptimStepResponse)
    return SentOutcome(
        outcome.work_id,
        passed=None if is_step else result,  # type: ignore[arg-type]
        stepped=result if isinstance(result, OptimStepResponse) else None,
        error=outcome.error,
    )


def received_outcome(outcome: SentOutcome) -> TrainingOutcome:
    """An outcome as the caller takes it."""
    return TrainingOutcome(
        work_id=outcome.work_id, result=outcome.passed or outcome.stepped, error=outcome.error
    )


def parts_of(number: int) -> AdapterParts:
    """Which parts a message names."""
    return AdapterParts(number)


# Logs


def log_line(record: logging.LogRecord) -> ChildLogLine:
    """A record with its message formatted, as plain data."""
    trace = "" if record.exc_info is None else logging.Formatter().formatException(record.exc_info)
    return ChildLogLine(
        {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "created": record.created,
            "msecs": record.msecs,
            "pathname": record.pathname,
            "filename": record.filename,
            "lineno": record.lineno,
            "funcName": record.funcName,
            "msg": _text(record),
            "stack_info": trace or record.stack_info,
            **{name: _plain(value) for name, value in fields_of(record).items()},
        }
    )


def replay_log(line: ChildLogLine) -> None:
    """Log a record of the child in this process, under the name of its logger."""
    record = logging.makeLogRecord(line.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # logging must not raise
        return f"{record.msg} {record.args}"


def _plain(value: Any) -> str | int | float | None:
    if type(value) in (str, int, float) or value is None:
        return value  # type: ignore[no-any-return]
    return str(value)
