"""The base classes of the API's types: construction, validation and conversion to plain data.

A `Record` is a response, checked by the decoder that creates it. A `Request` is created by a caller
and checks itself. Both are frozen; `to_plain` converts them to JSON-compatible values, which
`wire/` encodes.

A field that is `None` is omitted; any other value is written, even if it is the default (S26).
Where the API distinguishes a missing field from `null`, the default is `UNSET`, and `None` is
written as `null`.
"""

from __future__ import annotations

import base64
import datetime
import enum
import functools
import math
import types as python_types
import typing
from collections.abc import Callable, Mapping
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple, force_setattr

from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types.buffers import Numbers

__all__ = ["UNSET", "Record", "Request", "UnsetType", "to_plain"]

ArrayWriter: TypeAlias = Callable[[Numbers], Any]
"""Converts an array for plain data: to a list, or to encoded JSON."""

_SCALARS = frozenset({str, int, float, bool, type(None), msgspec.Raw})


class _RecordMeta(msgspec.StructMeta):
    """Makes fields keyword-only, and suggests the nearest field for a misspelt one.

    The tag of a member of a union is an attribute too, under the name that it has in JSON.
    """

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> Any:
        # msgspec inherits every setting but this one.
        made = super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **config})
        tag_field = made.__struct_config__.tag_field
        if tag_field is not None:
            setattr(made, tag_field, made.__struct_config__.tag)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as exc:
            known = cls.__struct_fields__
            config = cls.__struct_config__
            if config.tag is not None and kwargs.get(config.tag_field or "") == config.tag:
                del kwargs[config.tag_field or ""]  # given explicitly, though it is fixed
                return cls(*args, **kwargs)
            for name in kwargs:
                if name not in known:
                    raise _unknown_field(cls.__name__, name, known) from None
            raise TypeError(f"{cls.__name__}: {exc}") from None


def _unknown_field(owner: str, name: str, known: tuple[str, ...]) -> UnknownFieldError:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(known) or 'none'}"
    return UnknownFieldError(f"{owner} has no field {name!r}", remedy=hint)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, metaclass=_RecordMeta):
    """A response of the service. Unknown fields are ignored when it is decoded."""

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude_none: bool = False
    ) -> dict[str, Any]:
        """The fields as dicts and lists, including nested records.

        Args:
            mode: `"json"` also converts datetimes, enums and bytes to JSON types.
            exclude_none: Omit fields that are None, as on the wire.
        """
        plain = to_plain(self, keep_none=not exclude_none)
        if mode == "json":
            plain = msgspec.to_builtins(plain, enc_hook=foreign_to_plain)
        return typing.cast(dict[str, Any], plain)

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """The fields as JSON text."""
        plain = to_plain(self, keep_none=not exclude_none)
        return msgspec.json.encode(plain, enc_hook=foreign_to_plain).decode()

    def model_copy(self, *, update: dict[str, Any] | None = None) -> Self:
        """A copy with the fields of `update` replaced."""
        return msgspec.structs.replace(self, **(update or {}))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Create an instance from a dict, with validation; an instance is returned unchanged."""
        try:
            return msgspec.convert(value, cls, dec_hook=convert_custom)
        except (msgspec.ValidationError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Create an instance from JSON text, with validation."""
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=convert_custom)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    def __str__(self) -> str:
        return repr(self)


class Request(Record):
    """A value created by the caller, with validation; unknown fields are an error."""

    def __post_init__(self) -> None:
        for name, plain_types, declared, default in _checks(type(self)):
            value = getattr(self, name)
            if value is default:
                continue
            if type(value) not in plain_types:
                value = _fitted(type(self), name, declared, value)
                force_setattr(self, name, value)
            if type(value) is float and not math.isfinite(value):
                raise ValidationError(
                    f"invalid {type(self).__name__}.{name} {value}: expected a finite number"
                )

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Create an instance from a dict, with validation; unknown fields are an error."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.__struct_fields__ and name != cls.__struct_config__.tag_field:
                    raise _unknown_field(cls.__name__, str(name), cls.__struct_fields__)
        return super().model_validate(value)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Create an instance from JSON text, with validation; unknown fields are an error."""
        try:
            return cls.model_validate(msgspec.json.decode(text))
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc


@functools.cache
def _checks(cls: type[Request]) -> tuple[tuple[str, frozenset[type], Any, Any], ...]:
    """For each field: its name, types that are always valid, its declared type and default."""
    return tuple(
        (field.name, _plain_types(field.type), field.type, field.default)
        for field in msgspec.structs.fields(cls)
    )


def _plain_types(declared: Any) -> frozenset[type]:
    """The classes whose instances are always valid; none for literals and bounds."""
    if get_origin(declared) in (typing.Union, python_types.UnionType):
        return frozenset[type]().union(*(_plain_types(member) for member in get_args(declared)))
    is_simple = isinstance(declared, type) and declared not in (list, dict)
    return frozenset({declared}) if is_simple else frozenset()


def _fitted(cls: type, name: str, declared: Any, value: Any) -> Any:
    """Convert a value to the type of a field; numpy scalars and numeric text become numbers."""
    value = own_numbers(value)
    try:
        return msgspec.convert(value, declared, dec_hook=convert_custom)
    except (msgspec.ValidationError, UnicodeError) as exc:
        try:
            # Settings are often text: YAML parsers return "1e-4" as a string.
            if isinstance(value, str | float):
                return msgspec.convert(value, declared, strict=False)
        except (msgspec.ValidationError, UnicodeError):
            pass
        raise ValidationError(f"{cls.__name__}.{name}: {exc}") from exc


def own_numbers(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python numbers, also in lists."""
    if isinstance(value, list | tuple):
        return [own_numbers(item) for item in value]
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim")
    return value.tolist() if is_array else value


set_once = object.__setattr__
"""Sets an attribute of a `Frozen` object in its constructor."""


MadeT = TypeVar("MadeT")


def made_once(owner: Any, name: str, make: Callable[[], MadeT]) -> MadeT:
    """The result of `make`, cached in the owner's `_made`."""
    made: dict[str, MadeT] = owner._made
    if name not in made:
        made[name] = make()
    return made[name]


def checked_list(value: Any, what: str) -> list[Any] | None:
    """Check that a value is a list or None.

    Raises:
        ValueError: It is neither.
    """
    if value is not None and not isinstance(value, list):
        raise ValueError(f"Expected {what} to be a list")
    return value


class Frozen:
    """An immutable value with arrays, which msgspec structs cannot have.

    Subclasses return their constructor's arguments from `_parts`, by which they are compared,
    pickled and copied. They convert themselves with `_to_plain` and `_from_plain`.
    """

    __slots__ = ()

    def _parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frozen) or type(other) is not type(self):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        # Most share memory with mutable arrays.
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be changed; create a new {type(self).__name__}"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def _to_plain(self, write_array: ArrayWriter) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no JSON format")


class FrozenModel(Frozen):
    """A frozen value that is a pydantic model in the official SDK, with the usual methods."""

    __slots__ = ()

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> Any:
        """The fields as dicts and lists; the same in every mode."""
        del mode, exclude_none
        return self._to_plain(Numbers.tolist)

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """The fields as JSON text."""
        del exclude_none
        return msgspec.json.encode(self.model_dump(), enc_hook=foreign_to_plain).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; `deep` makes no difference for an immutable value."""
        del deep
        return type(self)(**{**self._arguments(), **(update or {})})

    def _arguments(self) -> dict[str, Any]:
        """The arguments of its constructor."""
        raise NotImplementedError

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Create an instance from JSON text, with validation."""
        try:
            return cls.model_validate(msgspec.json.decode(text))
        except msgspec.DecodeError as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Create an instance from a dict, with validation; an instance is returned unchanged."""
        if isinstance(value, cls):
            return value
        try:
            return cast(Self, convert_custom(cls, value))
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc


def to_plain(
    value: Any, *, write_array: ArrayWriter = Numbers.tolist, keep_none: bool = False
) -> Any:
    """Convert a value to JSON-compatible dicts, lists and scalars.

    Args:
        value: A record, or the value of one of its fields.
        write_array: Converts arrays; to lists by default.
        keep_none: Write fields that are None as null instead of omitting them.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Record):
        return _record_to_plain(value, write_array, keep_none)
    if isinstance(value, dict):
        return {
            key: to_plain(item, write_array=write_array, keep_none=keep_none)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(item, write_array=write_array, keep_none=keep_none) for item in value]
    if isinstance(value, Frozen):
        return value._to_plain(write_array)
    return foreign_to_plain(value)


def _record_to_plain(record: Record, write_array: ArrayWriter, keep_none: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    config = record.__struct_config__
    if config.tag_field is not None:
        plain[config.tag_field] = config.tag
    for name, value in zip(record.__struct_fields__, astuple(record), strict=True):
        if value is None:
            if keep_none or name in nullable_fields(type(record)):
                plain[name] = None
        elif type(value) in _SCALARS:
            plain[name] = value
        elif value is not UNSET:
            plain[name] = to_plain(value, write_array=write_array, keep_none=keep_none)
    return plain


@functools.cache
def nullable_fields(cls: type[Record]) -> frozenset[str]:
    """Fields for which null differs from a missing field: those that may be UNSET."""
    return frozenset(
        field.name for field in msgspec.structs.fields(cls) if UnsetType in get_args(field.type)
    )


def foreign_to_plain(value: Any) -> Any:
    """Convert values of other libraries, such as numpy scalars in metadata."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.datetime | datetime.date | str | int | float):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValidationError(
        f"a value of type {type(value).__name__} cannot be encoded as JSON",
        remedy="use numbers, text, lists and dicts",
    )


def convert_custom(declared: type, plain: Any) -> Any:
    """The decoding hook of msgspec: convert plain data to a type that is not a struct."""
    from_plain = getattr(declared, "_from_plain", None)
    if from_plain is None:
        raise NotImplementedError(f"{declared.__name__} cannot be created from plain data")
    return from_plain(plain)


class Tagged(Record, tag_field="type"):
    """A member of a union that is tagged by `type` in JSON; subclasses set their `tag`."""

    type: ClassVar[str]
