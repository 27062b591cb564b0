"""The arguments of an uploaded loss, decoded, and what is known of values before anything runs.

An argument comes as JSON (`{"ref": name}`, `{"tuple": […]}`, …) and becomes a constant, a `Value`
for a reference to a node, or a list, tuple or dict of them.

Knows nothing of what operations do with them; see `loss_graphs.py` and `loss_sizes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import msgspec

from tinsmith.errors import shown
from tinsmith.types.loss_operations import DEVICE, DTYPES, LAYOUTS, MEMORY_FORMATS
from tinsmith.types.training import CustomLossNode

MOST_ITEMS = 64
"""The most items in one list, tuple or dict of an argument."""
MOST_VALUES = 4096
"""The most constants and references in all arguments of one node."""
DEEPEST = 6
"""The deepest nesting of an argument."""
LONGEST_TEXT = 64
SMALL = 65_536
"""With a constant up to this, a length stays of the order of a length."""

LENGTH_BITS = 32
FLOAT = 0
"""Used in place of a number of bits for a float, whose size is fixed."""


class Refuse(Protocol):
    """Raises an error that names the node, the reason and the remedy."""

    def __call__(self, why: str, remedy: str | None = None) -> NoReturn:
        """Raise the error."""
        ...


class Value(msgspec.Struct, frozen=True):
    """What is known of a value before anything runs."""

    kind: Literal["tensor", "tensors", "number", "shape", "constant"]
    bits: int = FLOAT
    """Of a whole number: how many bits it may have."""
    is_length: bool = False
    """Of a number: whether it is at most the length of an input, or a little more."""
    growth: int = 1
    """Of a tensor: how many times as large as the inputs it may be."""


TENSOR = Value("tensor")
Argument: TypeAlias = Any
"""A constant, a `Value` for a reference, or a list, tuple or dict of them."""


class ArgumentReader:
    """Decodes the arguments of nodes; `known` are the values of earlier nodes."""

    def __init__(self, known: Mapping[str, Value], refuse: Refuse) -> None:
        self._values = known
        self._refuse = refuse
        self._count = 0

    def of(self, node: CustomLossNode) -> tuple[list[Argument], dict[str, Argument]]:
        """The positional and the named arguments of a node."""
        self._count = 0
        args = [self._read(arg, 0) for arg in self._bounded(node.args)]
        kwargs = self._bounded(node.kwargs)
        return args, {self._key(key): self._read(arg, 0) for key, arg in kwargs.items()}

    def _read(self, given: Any, depth: int) -> Argument:
        """An argument, from its JSON form."""
        self._count += 1
        if depth > DEEPEST:
            self._refuse(f"has an argument that is nested deeper than {DEEPEST}")
        if self._count > MOST_VALUES:
            self._refuse(f"has more than {MOST_VALUES} values in its arguments")
        if given is None or isinstance(given, bool):
            return given
        if isinstance(given, int | float):
            return self._number(given)
        if isinstance(given, str):
            return self._text(given)
        if isinstance(given, list):
            return [self._read(item, depth + 1) for item in self._bounded(given)]
        if not isinstance(given, dict) or len(given) != 1:
            self._refuse("has an argument that is neither a value nor an object with one key")
        [(form, content)] = given.items()
        return self._formed(form, content, depth)

    def _formed(self, form: Any, content: Any, depth: int) -> Argument:
        if form == "ref":
            return self._reference(content)
        if form == "tuple" and isinstance(content, list):
            return tuple(self._read(item, depth + 1) for item in self._bounded(content))
        if form == "dict" and isinstance(content, dict):
            items = self._bounded(content).items()
            return {str(key)[:200]: self._read(item, depth + 1) for key, item in items}
        if form == "slice" and isinstance(content, list) and len(content) == 3:
            return slice(*(self._bound(item, depth + 1) for item in content))
        if form == "ellipsis" and content is True:
            return ...
        if form == "float" and content in ("inf", "-inf", "nan"):
            return Value("number")
        known = {"dtype": DTYPES, "layout": LAYOUTS, "memory_format": MEMORY_FORMATS}
        if isinstance(content, str):
            is_device = form == "device" and DEVICE.fullmatch(content) is not None
            if is_device or content in known.get(str(form), ()):
                return Value("constant")
        return self._refuse(f"has the unknown argument {shown({form: content})}")

    def _reference(self, name: Any) -> Value:
        value = self._values.get(name) if isinstance(name, str) else None
        if value is None:
            self._refuse(f"refers to {shown(name)}, which is not an earlier node")
        return value

    def _bound(self, given: Any, depth: int) -> Argument:
        bound = self._read(given, depth)
        if bound is not None and not is_number(bound) and not is_tensor(bound):
            self._refuse("has a slice with a bound that is not a number")
        return bound

    def _number(self, number: float) -> float:
        if isinstance(number, int) and number.bit_length() > 63:
            self._refuse("has a whole number of more than 63 bits")
        return number

    def _text(self, text: str) -> str:
        if len(text) > LONGEST_TEXT:
            self._refuse(f"has a text of {len(text)} characters; {LONGEST_TEXT} are allowed")
        return text

    def _key(self, key: str) -> str:
        if not key.isidentifier() or key.startswith("_") or len(key) > LONGEST_TEXT or key == "out":
            self._refuse(f"has the keyword {shown(key)}, which is not allowed")
        return key

    def _bounded(self, items: Any) -> Any:
        if len(items) > MOST_ITEMS:
            self._refuse(f"has {len(items)} items in one argument; {MOST_ITEMS} are allowed")
        return items


def a_length() -> Value:
    """The length of a dimension."""
    return Value("number", bits=LENGTH_BITS, is_length=True)


def is_tensor(value: Argument) -> bool:
    """Whether it is one tensor."""
    return isinstance(value, Value) and value.kind == "tensor"


def is_number(value: Argument) -> bool:
    """Whether it is a number, known or not."""
    is_constant = isinstance(value, int | float)
    return is_constant or (isinstance(value, Value) and value.kind == "number")


def is_length(value: Argument) -> bool:
    """Whether it is at most the length of an input, or a little more."""
    return isinstance(value, Value) and value.kind == "number" and value.is_length


def is_small(value: Argument) -> bool:
    """Whether it is a small whole constant."""
    return isinstance(value, int) and abs(value) <= SMALL


def bits_of(value: Argument) -> int:
    """How many bits a number may take."""
    if isinstance(value, Value):
        return value.bits
    return max(1, value.bit_length()) if isinstance(value, int) else FLOAT


def growth_of(values: list[Argument]) -> int:
    """The largest growth of the tensors among them."""
    return max((v.growth for v in parts_of(values) if isinstance(v, Value)), default=1)


def parts_of(values: list[Argument] | tuple[Argument, ...]) -> Iterator[Argument]:
    """All values in lists, tuples and dicts, however deep."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from parts_of(value)
        elif isinstance(value, dict):
            yield from parts_of(list(value.values()))
        elif isinstance(value, slice):
            yield from parts_of([value.start, value.stop, value.step])
        else:
            yield value


def lists_in(index: Argument) -> Iterator[list[Argument]]:
    """The lists in an index, which pick items and may pick one many times."""
    if isinstance(index, list):
        yield index
    elif isinstance(index, tuple):
        for part in index:
            yield from lists_in(part)
