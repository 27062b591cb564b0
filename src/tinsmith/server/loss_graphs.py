"""Whether an uploaded loss may be kept: every operation known, every value bounded.

A loss is data from a stranger, which an engine later runs on tensors. It is read here once, node by
node, from the tables of `types/loss_operations.py`. For each node it is worked out what kind of
value it gives (a tensor, a shape, a number …) and how large that can be: a number in bits, a tensor
as a multiple of its inputs. So a graph cannot ask for a tensor of a terabyte in forty bytes, nor
square a Python integer until the memory is full.

What cannot be known before it runs is how long the data are: two inputs of T tokens may be
broadcast against each other to T × T. That is for the engine to bound.

Knows nothing of torch, nor of how a loss is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, TypeAlias

import msgspec

from tinsmith.errors import ValidationError, shown
from tinsmith.types.loss_operations import (
    ATTRIBUTES,
    DEVICE,
    DTYPES,
    FUNCTIONS,
    INPUT_NAME,
    LAYOUTS,
    LOGPROBS,
    MEMORY_FORMATS,
    METHODS,
    METRIC_NAME,
    MOST_INPUTS,
)
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

MOST_NODES = 1000
MOST_METRICS = 32
MOST_ITEMS = 64
"""In one list, tuple or dict of an argument."""
MOST_VALUES = 4096
"""Constants and references in all arguments of one node."""
DEEPEST = 6
"""How deep an argument may be nested."""
LONGEST_TEXT = 64
LARGEST_BITS = 4096
"""Of a whole number that is worked out from others."""
LARGEST_SIZE = 65_536
"""Elements that an operation may make by constant sizes."""
LARGEST_GROWTH = 65_536
"""How many times its inputs a tensor may be, by joining, repeating and padding."""
LENGTH_GROWTH = 64
"""What a length of the data counts for in this: two of them may be multiplied, and not three."""

_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_LENGTH_BITS = 32
_ROUNDED_BITS = 1024
"""A float that is rounded to a whole number may have as many."""
_FLOAT = 0
"""In place of a number's bits: it is a float, which never takes more room."""


class _Value(msgspec.Struct, frozen=True):
    """What is known of a value before anything runs."""

    kind: Literal["tensor", "tensors", "number", "shape", "constant"]
    bits: int = _FLOAT
    """Of a whole number: how many it may take."""
    is_length: bool = False
    """Of a number: whether it is at most the length of an input, or a little more."""
    growth: int = 1
    """Of a tensor: how many times the inputs it may be."""


_TENSOR = _Value("tensor")
_Argument: TypeAlias = Any
"""A constant, a `_Value` for a reference, or a list, tuple or dict of them."""

# By what they do to sizes. Names without their module: of functions and methods alike.
_JOINS = frozenset({"cat", "concat", "concatenate", "hstack", "stack", "vstack"})
_CREATES = frozenset(
    {"zeros", "ones", "full", "eye", "linspace", "new_zeros", "new_ones", "new_full"}
)
_EXPANDS = frozenset({"expand", "broadcast_to"})
_REPEATS = frozenset({"repeat", "tile", "repeat_interleave", "one_hot"})
_SPLITS = frozenset({"chunk", "split", "tensor_split"})
_SQUARES = frozenset({"diag", "meshgrid", "outer"})
_GIVES_TENSORS = frozenset(
    {"aminmax", "broadcast_tensors", "chunk", "cummax", "cummin", "kthvalue", "max", "median"}
    | {"meshgrid", "min", "nanmedian", "sort", "split", "std_mean", "tensor_split", "topk"}
    | {"unbind", "var_mean"}
)
_GIVES_NUMBER = frozenset({"dim", "ndimension", "nelement", "numel"})
_ROUNDS = frozenset({"ceil", "floor", "trunc"})
_SIZE_KEYWORDS = frozenset(
    {"size", "sizes", "n", "m", "steps", "repeats", "dims", "num_classes", "chunks"}
    | {"split_size", "split_size_or_sections", "indices_or_sections", "output_size"}
)


def check_custom_loss(request: CreateCustomLossRequest) -> None:
    """Check an uploaded loss in full.

    Raises:
        ValidationError: It breaks a rule; the message names the node and the rule.
    """
    _check_inputs(request.inputs)
    _Graph(request.inputs).check(request.graph)


def _check_inputs(inputs: list[CustomLossInput]) -> None:
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise ValidationError(f"inputs has {len(inputs)} entries; it may have 1 to {MOST_INPUTS}")
    names = [given.name for given in inputs]
    if names[0] != LOGPROBS:
        raise ValidationError(f"inputs[0] is {shown(names[0])}; the first input is {LOGPROBS!r}")
    if inputs[0].rank == 0:
        raise ValidationError(f"inputs[0] has rank 0; {LOGPROBS} has rank 1 or 2")
    for index, name in enumerate(names):
        if not INPUT_NAME.fullmatch(name):
            raise ValidationError(
                f"inputs[{index}] is called {shown(name)}",
                remedy="names have at most 64 lower-case letters, digits and underscores",
            )
        if name in names[:index]:
            raise ValidationError(f"inputs[{index}] is called {name!r}, as another one is")


class _Graph:
    """One pass over the nodes of a loss."""

    def __init__(self, inputs: list[CustomLossInput]) -> None:
        self._waiting = [given.name for given in inputs]
        self._values: dict[str, _Value] = {}
        self._node: CustomLossNode | None = None
        self._index = 0
        self._count = 0

    def check(self, graph: CustomLossGraph) -> None:
        nodes = graph.nodes
        if not 1 <= len(nodes) <= MOST_NODES:
            raise ValidationError(
                f"graph.nodes has {len(nodes)} entries; it may have 1 to {MOST_NODES}"
            )
        for self._index, self._node in enumerate(nodes):
            if (self._node.op == "output") != (self._index == len(nodes) - 1):
                self._refuse("is out of place", "the last node, and no other, is the output")
            self._check_name(self._node.name)
            self._values[self._node.name] = self._value(self._node)

    # One node

    def _value(self, node: CustomLossNode) -> _Value:
        if node.op == "output":
            return self._output(node)
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op not in ("call_function", "call_method"):
            self._refuse(f"has the op {node.op!r}", "only functions and methods are run")
        args, kwargs = self._arguments(node)
        if node.op == "call_method":
            return self._method(node.target, args, kwargs)
        return self._function(node.target, args, kwargs)

    def _placeholder(self, node: CustomLossNode) -> _Value:
        if not self._waiting or node.target != self._waiting[0]:
            wanted = repr(self._waiting[0]) if self._waiting else "no more inputs"
            self._refuse(f"stands for {shown(node.target)} where {wanted} is due")
        if node.args or node.kwargs:
            self._refuse("is an input and has arguments", "inputs have no defaults")
        del self._waiting[0]
        return _TENSOR

    def _output(self, node: CustomLossNode) -> _Value:
        if self._waiting:
            self._refuse(f"is the output, and there was no node for {self._waiting[0]!r}")
        args, kwargs = self._arguments(node)
        returned = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            self._refuse("must return (loss, metrics)")
        loss, metrics = returned
        if not _is_tensor(loss):
            self._refuse("must return its loss as a tensor")
        if not isinstance(metrics, dict):
            self._refuse("must return its metrics as a dict")
        if len(metrics) > MOST_METRICS:
            self._refuse(f"has {len(metrics)} metrics; {MOST_METRICS} are allowed")
        for name, value in metrics.items():
            if not METRIC_NAME.fullmatch(name):
                self._refuse(
                    f"has a metric {shown(name)}",
                    "name it custom/<name>:sum or custom/<name>:mean, in lower case",
                )
            if not _is_tensor(value):
                self._refuse(f"gives metric {shown(name)} not as a tensor")
        return _Value("constant")

    def _method(self, name: str, args: list[_Argument], kwargs: dict[str, _Argument]) -> _Value:
        if name not in METHODS:
            remedy = "use the form without the underscore" if name.endswith("_") else None
            self._refuse(f"calls the method {shown(name)}, which is not run here", remedy)
        if not args or not _is_tensor(args[0]):
            self._refuse(f"calls {name}() on something else than a tensor")
        if name == "size":
            return _length() if len(args) > 1 or kwargs else _Value("shape")
        return self._of_tensors(name, args[:1], args[1:], kwargs)

    def _function(self, name: str, args: list[_Argument], kwargs: dict[str, _Argument]) -> _Value:
        if name not in FUNCTIONS:
            self._refuse(f"calls {shown(name)}, which is not run here")
        if name == "getattr":
            return self._attribute(args, kwargs)
        module, _, short = name.rpartition(".")
        if module == "math":
            return self._of_numbers(short, args, kwargs)
        if module == "operator":
            return self._operator(short, args, kwargs)
        if short in _CREATES or short == "arange":
            return self._of_tensors(short, [], args, kwargs)
        return self._of_tensors(short, args[:1], args[1:], kwargs)

    def _attribute(self, args: list[_Argument], kwargs: dict[str, _Argument]) -> _Value:
        if len(args) != 2 or kwargs or not isinstance(args[0], _Value):
            self._refuse("calls getattr() not with a value and a name")
        owner, name = args
        if not isinstance(name, str) or name not in ATTRIBUTES:
            self._refuse(
                f"asks for the attribute {shown(name)}",
                f"known are {', '.join(sorted(ATTRIBUTES))}",
            )
        if name in ("values", "indices"):
            if owner.kind != "tensors":
                self._refuse(f"asks for {name} of something else than named tensors")
            return _Value("tensor", growth=owner.growth)
        if owner.kind != "tensor":
            self._refuse(f"asks for {name} of something else than a tensor")
        if name == "shape":
            return _Value("shape")
        if name == "ndim":
            return _Value("number", bits=8)
        return owner if name in ("T", "mT") else _Value("constant")

    # Python's operators, on tensors and on numbers

    def _operator(self, name: str, args: list[_Argument], kwargs: dict[str, _Argument]) -> _Value:
        if kwargs or not 1 <= len(args) <= 2:
            self._refuse(f"calls operator.{name}() with the wrong number of arguments")
        if name == "getitem":
            return self._item(args)
        if any(_is_tensor(arg) for arg in args):
            if not all(_is_tensor(arg) or _is_number(arg) for arg in args):
                self._refuse(f"calls operator.{name}() on what is neither tensor nor number")
            return _Value("tensor", growth=_growth(args))
        if not all(_is_number(arg) for arg in args):
            # A list or a shape times a number is a long list.
            self._refuse(f"calls operator.{name}() on what is neither tensor nor number")
        return self._arithmetic(name, args)

    def _item(self, args: list[_Argument]) -> _Value:
        if len(args) != 2 or not isinstance(args[0], _Value):
            self._refuse("takes an item not of a value by an index")
        owner, index = args
        if owner.kind == "shape":
            if isinstance(index, slice):
                return _Value("shape")
            if not _is_number(index):
                self._refuse("takes an item of a shape not by a number")
            return _length()
        if owner.kind == "tensors" and (isinstance(index, slice) or _is_number(index)):
            is_one = not isinstance(index, slice)
            return _Value("tensor" if is_one else "tensors", growth=owner.growth)
        if owner.kind != "tensor":
            self._refuse("takes an item of something that has none")
        factor = max([1, *(len(part) for part in _lists(index))])
        return self._grown(_growth([owner, index]) * factor)

    def _of_numbers(self, name: str, args: list[_Argument], kwargs: dict[str, _Argument]) -> _Value:
        """A function of `math`, which takes a tensor of one element for a number."""
        if not all(_is_number(arg) or _is_tensor(arg) for arg in (*args, *kwargs.values())):
            self._refuse(f"calls math.{name}() on what is neither tensor nor number")
        return _Value("number", bits=_ROUNDED_BITS if name in _ROUNDS else _FLOAT)

    def _arithmetic(self, name: str, args: list[_Argument]) -> _Value:
        bits = [_bits(arg) for arg in args]
        exponent = args[-1]
        if name == "pow" and (not isinstance(exponent, int | float) or not abs(exponent) <= 16):
            self._refuse("raises a number to a power that is not a constant up to 16")
        if name == "truediv" or _FLOAT in bits:
            total = _FLOAT
        elif name == "mul":
            total = sum(bits)
        elif name == "pow":
            total = bits[0] * max(1, int(abs(exponent)))
        else:
            total = max(bits) + 1
        if total > LARGEST_BITS:
            self._refuse(f"may make a number of {total} bits; {LARGEST_BITS} are allowed")
        # A length and a small constant make a length again; also one divided, or a remainder.
        is_length = (
            name in ("add", "sub", "floordiv", "mod")
            and _FLOAT < total <= _LENGTH_BITS + 4
            and all(_is_length(arg) or _is_small(arg) for arg in args)
        )
        return _Value("number", bits=total, is_length=is_length)

    # Functions and methods of tensors

    def _of_tensors(
        self,
        name: str,
        owner: list[_Argument],
        args: list[_Argument],
        kwargs: dict[str, _Argument],
    ) -> _Value:
        """What an operation gives; `owner` is the tensor that a method is called on."""
        if name in _GIVES_NUMBER:
            return _Value("number", bits=2 * _LENGTH_BITS)
        everything = [*owner, *args, *kwargs.values()]
        growth = _growth(everything)
        if name == "arange":
            self._check_range(args, kwargs)
        elif name in _JOINS:
            growth = sum(_growth([part]) for part in _parts(everything))
        elif name in _SQUARES:
            growth *= LENGTH_GROWTH * _growth(args)
        elif name == "pad":
            growth *= self._padding(args, kwargs)
        elif name in _CREATES | _EXPANDS | _REPEATS | _SPLITS:
            growth = self._sized(name, growth, args, kwargs)
        return self._grown(growth, self._kind(name, [*owner, *args], kwargs))

    def _kind(
        self, name: str, args: list[_Argument], kwargs: dict[str, _Argument]
    ) -> Literal["tensor", "tensors"]:
        if name not in _GIVES_TENSORS:
            return "tensor"
        if name in ("max", "min", "median", "nanmedian"):
            # Of all elements, or of two tensors: only along a dimension there are indices too.
            is_whole = len(args) == 1 and not kwargs
            is_pair = any(_is_tensor(other) for other in (*args[1:], *kwargs.values()))
            return "tensor" if is_whole or is_pair else "tensors"
        return "tensors"

    def _sized(
        self, name: str, growth: int, args: list[_Argument], kwargs: dict[str, _Argument]
    ) -> int:
        """The growth of an operation whose arguments say how large its result is."""
        if name in ("full", "new_full"):
            args = args[:1]
        elif name == "linspace":
            args = args[2:3]
        sizes = [*args, *(kwargs[key] for key in kwargs if key in _SIZE_KEYWORDS)]
        size = self._size(sizes)
        if name in _SPLITS:
            return growth
        is_absolute = name in _CREATES or (name in _EXPANDS and -1 not in list(_parts(sizes)))
        return max(growth, size) if is_absolute else growth * size

    def _padding(self, args: list[_Argument], kwargs: dict[str, _Argument]) -> int:
        widths = [*_parts([args[0] if args else kwargs.get("pad", [])])]
        return self._size([w + 1 if isinstance(w, int) and w >= 0 else w for w in widths])

    def _check_range(self, args: list[_Argument], kwargs: dict[str, _Argument]) -> None:
        """`arange` from a start to an end, both bounded; a step below one would make more of it."""
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
        if not isinstance(step, int) or step == 0:
            self._refuse("makes a range with a step that is not a whole constant")
        for bound in (*args[:2], *(kwargs[key] for key in ("start", "end") if key in kwargs)):
            self._size([bound])

    def _size(self, sizes: list[_Argument]) -> int:
        """What some sizes come to when they are multiplied, with `LENGTH_GROWTH` for a length."""
        total = 1
        for part in _parts(sizes):
            if isinstance(part, _Value) and part.kind in ("shape", "constant"):
                continue  # a shape is that of a tensor that is there; a dtype is no size
            if part is None or isinstance(part, str | bool):
                continue
            total *= LENGTH_GROWTH if _is_length(part) else self._constant_size(part)
            if total > LARGEST_SIZE:
                self._refuse(
                    f"asks for {total} elements or more; {LARGEST_SIZE} are allowed, where a "
                    f"length of the data counts as {LENGTH_GROWTH}"
                )
        return total

    def _constant_size(self, size: _Argument) -> int:
        if not isinstance(size, int | float):
            self._refuse("asks for a size that depends on the data", "use the shape of an input")
        if not abs(size) <= LARGEST_SIZE:
            self._refuse(f"asks for a size of {shown(size)}; {LARGEST_SIZE} is allowed")
        return max(1, math.ceil(abs(size)))

    def _grown(self, growth: int, kind: Literal["tensor", "tensors"] = "tensor") -> _Value:
        if growth > LARGEST_GROWTH:
            self._refuse(
                f"may make a tensor {growth} times as large as the inputs; "
                f"{LARGEST_GROWTH} times is allowed"
            )
        return _Value(kind, growth=growth)

    # Arguments

    def _arguments(self, node: CustomLossNode) -> tuple[list[_Argument], dict[str, _Argument]]:
        self._count = 0
        args = [self._read(arg, 0) for arg in self._bounded(node.args)]
        kwargs = self._bounded(node.kwargs)
        return args, {self._key(key): self._read(arg, 0) for key, arg in kwargs.items()}

    def _read(self, given: Any, depth: int) -> _Argument:
        """An argument, from its form in JSON."""
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

    def _formed(self, form: Any, content: Any, depth: int) -> _Argument:
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
            return _Value("number")
        known = {"dtype": DTYPES, "layout": LAYOUTS, "memory_format": MEMORY_FORMATS}
        if isinstance(content, str):
            is_device = form == "device" and DEVICE.fullmatch(content) is not None
            if is_device or content in known.get(str(form), ()):
                return _Value("constant")
        return self._refuse(f"has an argument {shown({form: content})}, which is not known")

    def _reference(self, name: Any) -> _Value:
        value = self._values.get(name) if isinstance(name, str) else None
        if value is None:
            self._refuse(f"refers to {shown(name)}, which is no node before it")
        return value

    def _bound(self, given: Any, depth: int) -> _Argument:
        bound = self._read(given, depth)
        if bound is not None and not _is_number(bound) and not _is_tensor(bound):
            self._refuse("has a slice with a bound that is no number")
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

    def _check_name(self, name: str) -> None:
        if not _NODE_NAME.fullmatch(name):
            self._refuse("has a name that is none", "use up to 128 letters, digits and underscores")
        if name in self._values:
            self._refuse("has the name of another node")

    def _refuse(self, why: str, remedy: str | None = None) -> NoReturn:
        assert self._node is not None
        raise ValidationError(
            f"graph.nodes[{self._index}] {shown(self._node.name)} {why}", remedy=remedy
        )


def _length() -> _Value:
    return _Value("number", bits=_LENGTH_BITS, is_length=True)


def _is_tensor(value: _Argument) -> bool:
    return isinstance(value, _Value) and value.kind == "tensor"


def _is_number(value: _Argument) -> bool:
    is_constant = isinstance(value, int | float)
    return is_constant or (isinstance(value, _Value) and value.kind == "number")


def _is_length(value: _Argument) -> bool:
    return isinstance(value, _Value) and value.kind == "number" and value.is_length


def _is_small(value: _Argument) -> bool:
    return isinstance(value, int) and abs(value) <= LARGEST_SIZE


def _bits(value: _Argument) -> int:
    if isinstance(value, _Value):
        return value.bits
    return max(1, value.bit_length()) if isinstance(value, int) else _FLOAT


def _growth(values: list[_Argument]) -> int:
    """The largest growth of the tensors among them."""
    return max((v.growth for v in _parts(values) if isinstance(v, _Value)), default=1)


def _parts(values: list[_Argument] | tuple[_Argument, ...]) -> Iterator[_Argument]:
    """All values in lists, tuples and dicts, however deep."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parts(value)
        elif isinstance(value, dict):
            yield from _parts(list(value.values()))
        elif isinstance(value, slice):
            yield from _parts([value.start, value.stop, value.step])
        else:
            yield value


def _lists(index: _Argument) -> Iterator[list[_Argument]]:
    """The lists in an index, which pick items and may pick one many times."""
    if isinstance(index, list):
        yield index
    elif isinstance(index, tuple):
        for part in index:
            yield from _lists(part)
