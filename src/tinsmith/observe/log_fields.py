"""Logs with fields: which request, tenant, session and model a line is about.

`bind(tenant="…", model="…")` gives these fields to every line that its task logs from there on, and
to those of tasks that it starts: an exchange of the server is a task, and its fields end with it.
Formatters write them: as text for people, as JSON for programs. One line of log is one line of
output, whatever is in it, and what looks like a key is masked before it is written.

Field names are those of `FIELDS`, and docs/reference/metrics.md lists them.
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
    "request": "one HTTP exchange; the answer's `X-Request-Id`",
    "endpoint": "the route, by the name of its endpoint",
    "tenant": "whose request it is",
    "session": "the session's id",
    "model": "the id of a model, a sampler or another line of commands",
    "command": "the id of a command, which its client polls for",
    "kind": "what a command asks for, or what a batch is of",
    "status": "the HTTP status that was answered",
    "duration_ms": "how long it took, in milliseconds",
    "body_bytes": "how large the body was",
    "batch": "the number of a batch",
    "commands": "how many commands there are in it",
    "tokens": "how many tokens",
    "checkpoint": "the path of a checkpoint",
    "error": "the class of an error",
}
"""Every field and what it says."""

_current: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "tinsmith_log_fields", default=MappingProxyType({})
)
# Keys of ours, and tokens in three parts: `eyJ….….…`.
_SECRETS = re.compile(r"tml-[\w-]{4,}|eyJ[\w-]{4,}\.[\w-]+\.[\w-]+")
# Signed addresses: whoever has one has the file.
_TICKETS = re.compile(r"(/downloads/)[\w-]{4,}\.[\w-]+")
_PASSWORDS = re.compile(r"(\w+://[^\s/:@]*):[^\s/@]+@")


def bind(**fields: Any) -> None:
    """Add fields to every line that this task logs from here on; a None is left out."""
    assert fields.keys() <= FIELDS.keys(), f"not in FIELDS: {fields.keys() - FIELDS.keys()}"
    known = {name: value for name, value in fields.items() if value is not None}
    _current.set({**_current.get(), **known})


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line: those around it, and those that it was given as `extra`."""
    own = record.__dict__
    return {**_current.get(), **{name: own[name] for name in FIELDS if name in own}}


def without_secrets(text: str) -> str:
    """The text with keys, tokens, signatures and passwords of addresses masked."""
    text = _TICKETS.sub(r"\1***", text)
    return _PASSWORDS.sub(r"\1:***@", _SECRETS.sub(lambda found: f"{found[0][:3]}***", text))


class TextFormatter(logging.Formatter):
    """`2026-11-16T05:00:00.123Z INFO  tinsmith.server: message  tenant=a model=b`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, with a traceback indented below it if there is one."""
        fields = fields_of(record)
        pairs = " ".join(f"{name}={_on_one_line(str(value))}" for name, value in fields.items())
        message = _on_one_line(_message(record))
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}"
        trace = "".join(f"\n    {_on_one_line(part)}" for part in _trace(self, record).splitlines())
        return without_secrets(f"{line}  {pairs}" if pairs else line) + without_secrets(trace)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, the fields, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; no field is called as one of the first four."""
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
    """Send all logs of this process to one stream, stderr by default; for a process of our own.

    Other libraries are held to warnings, unless `level` asks for less.

    Returns:
        A function that puts everything back.
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
    except (TypeError, ValueError):  # a log call must not fail where it stands
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
