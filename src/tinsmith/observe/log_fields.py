"""Structured logs: fields for the request, tenant, session and model of a log line.

`bind(tenant="…", model="…")` adds fields to all lines that the current task, and the tasks it
starts, log from then on. Every HTTP request is handled in its own task. The formatters write text
for people or JSON for programs. A record is always one line of output, and secrets are masked.

`FIELDS` defines the field names; docs/reference/metrics.md lists them.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TextIO

FIELDS = {
    "request": "one HTTP request; the response's `X-Request-Id`",
    "endpoint": "the name of the endpoint",
    "tenant": "the tenant of the request",
    "session": "the session's id",
    "model": "the id of a model, a sampler or another queue of commands",
    "command": "the id of a command, which its client polls",
    "kind": "the kind of a command or a batch",
    "status": "the HTTP status",
    "duration_ms": "the duration in milliseconds",
    "body_bytes": "the size of the body",
    "batch": "the number of a batch",
    "commands": "the number of commands in it",
    "tokens": "the number of tokens",
    "checkpoint": "the path of a checkpoint",
    "error": "the class of an error",
}
"""All fields and their meaning."""

_current: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "tinsmith_log_fields", default=MappingProxyType({})
)
# API keys, and JWTs: `eyJ….….…`.
_SECRETS = re.compile(r"tml-[\w-]{4,}|eyJ[\w-]{4,}\.[\w-]+\.[\w-]+")
# Signed URLs, which give access to a file.
_TICKETS = re.compile(r"(/downloads/)[\w-]{4,}\.[\w-]+")
_PASSWORDS = re.compile(r"(\w+://[^\s/:@]*):[^\s/@]+@")


def bind(**fields: Any) -> None:
    """Add fields to all lines that this task logs from now on; None is ignored."""
    assert fields.keys() <= FIELDS.keys(), f"not in FIELDS: {fields.keys() - FIELDS.keys()}"
    known = {name: value for name, value in fields.items() if value is not None}
    _current.set({**_current.get(), **known})


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line: those bound, and those passed as `extra`."""
    own = record.__dict__
    return {**_current.get(), **{name: own[name] for name in FIELDS if name in own}}


def without_secrets(text: str) -> str:
    """The text with keys, tokens, signatures and passwords in URLs masked."""
    text = _TICKETS.sub(r"\1***", text)
    return _PASSWORDS.sub(r"\1:***@", _SECRETS.sub(lambda found: f"{found[0][:3]}***", text))


class TextFormatter(logging.Formatter):
    """`2026-11-16T05:00:00.123Z INFO  tinsmith.service.api: message  tenant=a model=b`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the indented traceback if there is one."""
        fields = fields_of(record)
        pairs = " ".join(f"{name}={_on_one_line(str(value))}" for name, value in fields.items())
        message = _on_one_line(_message(record))
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}"
        trace = "".join(f"\n    {_on_one_line(part)}" for part in _trace(self, record).splitlines())
        return without_secrets(f"{line}  {pairs}" if pairs else line) + without_secrets(trace)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `message`, the fields, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; no field has the name of one of the first four."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(_message(record)),
            **{name: _plain(value) for name, value in fields_of(record).items()},
        }
        if trace := _trace(self, record):
            line["traceback"] = without_secrets(trace)
        return json.dumps(line, allow_nan=False)


def configure_logging(
    *, level: str = "info", format_: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> Callable[[], None]:
    """Send all logs of this process to one stream, stderr by default.

    Other libraries log at `level` or from warnings on, whichever is less.

    Returns:
        A function that restores the previous configuration.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else TextFormatter())
    chosen: int = logging.getLevelNamesMapping()[level.upper()]
    root, ours = logging.getLogger(), logging.getLogger("tinsmith")
    before = (root.handlers[:], root.level, ours.level)
    root.handlers[:] = [handler]
    root.setLevel(max(chosen, logging.WARNING))
    ours.setLevel(chosen)

    def restore() -> None:
        root.handlers[:], root_level, our_level = before
        root.setLevel(root_level)
        ours.setLevel(our_level)

    return restore


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # a log call must not raise
        return f"{record.msg} {record.args}"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return record.stack_info or ""


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _on_one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # JSON has no NaN
    return without_secrets(str(value))
