"""What an engine's two processes say to each other, and how it is framed and made to travel.

A message is its length and its pickle. Both ends are this program, which started itself and gave
the other end of the socket to nobody else: no bytes from outside are ever unpickled. What users
sent travels inside, as the numbers and texts that the server has checked.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from typing import Any, NamedTuple

from tinsmith.engines.base import BaseModel, EngineCapacity
from tinsmith.errors import TinkerError
from tinsmith.observe.log_fields import fields_of

LENGTH_BYTES = 8


class Call(NamedTuple):
    """A coroutine of the engine is to be run and answered."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Order(NamedTuple):
    """A method is to be called, and nothing to be answered."""

    method: str
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """How a call ended."""

    number: int
    result: Any = None
    error: BaseException | None = None
    capacity: EngineCapacity | None = None


class Opened(NamedTuple):
    """What the engine is, once it is open."""

    name: str
    samples_apart: bool
    base_models: tuple[BaseModel, ...]


class LogLine(NamedTuple):
    """A line that the child logged."""

    record: dict[str, Any]


def packed(message: object) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=5)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other process has ended."""
    try:
        head = await reader.readexactly(LENGTH_BYTES)
        body = await reader.readexactly(int.from_bytes(head, "little"))
        return pickle.loads(body)  # noqa: S301 - of ours alone: see the top
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# Errors


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same and can be made in a process without this one's imports.

    Ours and Python's own keep their class, message and remedy. Those that are faults bring along
    where they were raised.
    """
    kind = type(error)
    if isinstance(error, TinkerError) and _survives(error):
        return error
    where = "".join(traceback.format_exception(error))
    if kind.__module__ != "builtins" or not _survives(error):
        error = RuntimeError(f"{kind.__name__}: {error}")
    error.add_note(f"in the engine's process:\n{where}")
    return error


def _survives(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - made here
    except Exception:  # noqa: BLE001 - pickling runs whatever the error's class says
        return False


# Logs


def log_line(record: logging.LogRecord) -> LogLine:
    """A line with its text made, so that nothing of the child has to be known elsewhere."""
    trace = "" if record.exc_info is None else logging.Formatter().formatException(record.exc_info)
    return LogLine(
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


def tell_log(line: LogLine) -> None:
    """Log a line of the child here, under the name of its logger."""
    record = logging.makeLogRecord(line.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # a log call must not fail where it stands
        return f"{record.msg} {record.args}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) or value is None else str(value)
