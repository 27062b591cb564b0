"""Errors as plain data, and back: their class by name, message, remedy and notes.

Only errors of this package and Python's own are created by name; any other arrives as a
`RuntimeError` that says what it was. An error that is not ours, and so may be a bug, takes its
traceback along as a note.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

import msgspec

from tinsmith import errors
from tinsmith.errors import APIResponseValidationError, TinkerError

MOST_CHARACTERS = 20_000
"""Of a message or a note; longer ones are cut."""

_Plain = str | int | float | bool | None


class SentError(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way."""

    name: str
    arguments: tuple[_Plain, ...] = ()
    remedy: str | None = None
    notes: tuple[str, ...] = ()
    extra: dict[str, str | bool | None] = {}
    """Attributes of some of our classes, by name."""


def _is_allowed(one: object) -> bool:
    # The others have more arguments than a message.
    others = (APIResponseValidationError, UnicodeError, ExceptionGroup)
    return isinstance(one, type) and issubclass(one, Exception) and not issubclass(one, others)


_ALLOWED: dict[str, type[Exception]] = {
    name: one for name, one in {**vars(builtins), **vars(errors)}.items() if _is_allowed(one)
}
_EXTRA = ("reason", "is_lasting")


def sent(error: BaseException) -> SentError:
    """An error as plain data."""
    kind = type(error)
    arguments = tuple(_plain(one) for one in error.args)
    notes = tuple(str(one)[:MOST_CHARACTERS] for one in getattr(error, "__notes__", ()))
    if isinstance(error, TinkerError) and _ALLOWED.get(kind.__name__) is kind:
        extra = {name: vars(error)[name] for name in _EXTRA if name in vars(error)}
        return SentError(kind.__name__, arguments, error.remedy, notes, extra)
    where = "".join(traceback.format_exception(error))[-MOST_CHARACTERS:]
    notes = (*notes, f"in the engine's process:\n{where}")
    if _ALLOWED.get(kind.__name__) is not kind:
        return SentError(
            "RuntimeError", (f"{kind.__name__}: {error}"[:MOST_CHARACTERS],), None, notes
        )
    return SentError(kind.__name__, arguments, None, notes)


def received(plain: SentError) -> BaseException:
    """The error that plain data stands for."""
    kind = _ALLOWED.get(plain.name, RuntimeError)
    try:
        error: BaseException = kind(*plain.arguments)
    except TypeError:
        error = RuntimeError(f"{plain.name}: {plain.arguments}")
    if isinstance(error, TinkerError):
        error.remedy = plain.remedy
        for name in _EXTRA:
            if name in plain.extra:
                setattr(error, name, plain.extra[name])
    for note in plain.notes:
        error.add_note(note)
    return error


def _plain(value: Any) -> _Plain:
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    if (
        value is None
        or type(value) in (bool, float)
        or (type(value) is int and -(2**63) <= value < 2**63)
    ):
        return value  # type: ignore[no-any-return]
    return str(value)[:MOST_CHARACTERS]
