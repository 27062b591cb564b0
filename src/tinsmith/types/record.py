"""What the types of the API share: how they are made, checked and turned into plain data.

`Record` is an answer of the service: made by a decoder, which has checked it. `Request` is
something a caller makes, and checks itself when made. Both are frozen and know their own JSON
shape through `to_plain`; `wire/` turns that into bytes.

One rule decides what is written (S26): a field that is `None` is left out, a field of any other
value is written even where it equals its default. Where the API tells "absent" from `null`, the
field's default is `UNSET`, and `None` is written as `null`.
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
"""Turns an array into what stands for it in plain data: a list, or text that is already JSON."""

_SCALARS = frozenset({str, int, float, bool, type(None), msgspec.Raw})


class _RecordMeta(msgspec.StructMeta):
    """Makes fields keyword-only, and names the nearest field when one is misspelt."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> Any:
        # msgspec inherits every setting but this one.
        return super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **config})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as exc:
            known = cls.__struct_fields__
            config = cls.__struct_config__
            if config.tag is not None and kwargs.get(config.tag_field or "") == config.tag:
                del kwargs[config.tag_field or ""]  # said, though it goes without saying
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
    """An answer of the service. Unknown fields in the bytes it is read from are ignored."""

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude_none: bool = False
    ) -> dict[str, Any]:
        """The fields as plain dicts and lists, nested records included.

        Args:
            mode: `"json"` also writes datetimes, enums and bytes as JSON would.
            exclude_none: Leave out fields that are None, as requests do on the wire.
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
        """Make one from a dict of its fields, checking each; an instance is returned as it is."""
        try:
            return msgspec.convert(value, cls, dec_hook=convert_custom)
        except (msgspec.ValidationError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Make one from JSON text, checking each field."""
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=convert_custom)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    def __str__(self) -> str:
        return repr(self)


class Request(Record):
    """Something a caller makes. It checks its fields when made and refuses unknown ones."""

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
                    f"{type(self).__name__}.{name} is {value}, which cannot be sent"
                )

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """As `Record.model_validate`; a field that the type does not have is refused."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.__struct_fields__ and name != cls.__struct_config__.tag_field:
                    raise _unknown_field(cls.__name__, str(name), cls.__struct_fields__)
        return super().model_validate(value)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """As `Record.model_validate_json`; a field that the type does not have is refused."""
        try:
            return cls.model_validate(msgspec.json.decode(text))
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc


@functools.cache
def _checks(cls: type[Request]) -> tuple[tuple[str, frozenset[type], Any, Any], ...]:
    """For each field: its name, types that need no closer look, declaration and default."""
    return tuple(
        (field.name, _plain_types(field.type), field.type, field.default)
        for field in msgspec.structs.fields(cls)
    )


def _plain_types(declared: Any) -> frozenset[type]:
    """The classes whose instances always fit; none for literals and bounds."""
    if get_origin(declared) in (typing.Union, python_types.UnionType):
        return frozenset[type]().union(*(_plain_types(member) for member in get_args(declared)))
    is_simple = isinstance(declared, type) and declared not in (list, dict)
    return frozenset({declared}) if is_simple else frozenset()


def _fitted(cls: type, name: str, declared: Any, value: Any) -> Any:
    """The value as the field wants it: numpy scalars and numeric text are taken for numbers."""
    value = own_numbers(value)
    try:
        return msgspec.convert(value, declared, dec_hook=convert_custom)
    except (msgspec.ValidationError, UnicodeError) as exc:
        try:
            # Settings often come as text: a YAML reader gives "1e-4" for 1e-4.
            if isinstance(value, str | float):
                return msgspec.convert(value, declared, strict=False)
        except (msgspec.ValidationError, UnicodeError):
            pass
        raise ValidationError(f"{cls.__name__}.{name}: {exc}") from exc


def own_numbers(value: Any) -> Any:
    """Python's own numbers for those of numpy and torch, also inside of a list."""
    if isinstance(value, list | tuple):
        return [own_numbers(item) for item in value]
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim")
    return value.tolist() if is_array else value


set_once = object.__setattr__
"""Gives a `Frozen` object an attribute while it is being made."""


MadeT = TypeVar("MadeT")


def made_once(owner: Any, name: str, make: Callable[[], MadeT]) -> MadeT:
    """What `make` gives, kept in the owner's `_made` for the next time."""
    made: dict[str, MadeT] = owner._made
    if name not in made:
        made[name] = make()
    return made[name]


def checked_list(value: Any, what: str) -> list[Any] | None:
    """A list from plain data, or None.

    Raises:
        ValueError: It is something else.
    """
    if value is not None and not isinstance(value, list):
        raise ValueError(f"Expected {what} to be a list")
    return value


class Frozen:
    """A value that holds arrays and so is no struct: it cannot be changed once made.

    Subclasses say what they are made of with `_parts`, in the order of their constructor: by it
    they are compared, pickled and copied. They write and read their own plain form with
    `_to_plain` and `_from_plain`.
    """

    __slots__ = ()

    def _parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frozen) or type(other) is not type(self):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        # Most share memory with arrays that may change.
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be changed; make a new {type(self).__name__}"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be removed")

    def _to_plain(self, write_array: ArrayWriter) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no JSON form")


class FrozenModel(Frozen):
    """A frozen value that is a model in the official SDK, with the methods that models have."""

    __slots__ = ()

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> Any:
        """The fields as plain dicts and lists; the same in every mode."""
        del mode, exclude_none
        return self._to_plain(Numbers.tolist)

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """The fields as JSON text."""
        del exclude_none
        return msgspec.json.encode(self.model_dump(), enc_hook=foreign_to_plain).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Another one, with some fields replaced. It never changes, and so is its own deep copy."""
        del deep
        return type(self)(**{**self._arguments(), **(update or {})})

    def _arguments(self) -> dict[str, Any]:
        """What its constructor makes it from."""
        raise NotImplementedError

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """As `model_validate`, from JSON text."""
        try:
            return cls.model_validate(msgspec.json.decode(text))
        except msgspec.DecodeError as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Make one from a dict of its fields, checking each; an instance is returned as it is."""
        if isinstance(value, cls):
            return value
        try:
            return cast(Self, convert_custom(cls, value))
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"{cls.__name__}: {exc}") from exc


def to_plain(
    value: Any, *, write_array: ArrayWriter = Numbers.tolist, keep_none: bool = False
) -> Any:
    """Dicts, lists and scalars that stand for `value` in JSON.

    Args:
        value: A record, or anything that may be found in one.
        write_array: What stands for an array of numbers; the default is a list.
        keep_none: Write None fields of records as null instead of leaving them out.
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
    """Fields for which null means something else than absent: those that may be UNSET."""
    return frozenset(
        field.name for field in msgspec.structs.fields(cls) if UnsetType in get_args(field.type)
    )


def foreign_to_plain(value: Any) -> Any:
    """Values of other libraries inside free-form fields, such as numpy scalars in metadata."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.datetime | datetime.date | str | int | float):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValidationError(
        f"a value of type {type(value).__name__} cannot be written as JSON",
        remedy="use numbers, text, lists and dicts",
    )


def convert_custom(declared: type, plain: Any) -> Any:
    """Make a type that is no struct from its plain form; what msgspec calls a decoding hook."""
    from_plain = getattr(declared, "_from_plain", None)
    if from_plain is None:
        raise NotImplementedError(f"{declared.__name__} has no plain form")
    return from_plain(plain)


class Tagged(Record, tag_field="type"):
    """A member of a union told apart by `type` in JSON; subclasses give their `tag`."""

    type: ClassVar[str]
