"""The result of each operation of an uploaded loss, and how large it can become.

Numbers are bounded in bits and tensors as multiples of the inputs, so that a graph cannot ask for a
tensor of a terabyte in forty bytes, nor square a Python integer until memory is full. The length of
the data is not known before it runs: two inputs of T tokens may be broadcast against each other to
T × T. The engine has to bound that.
"""

from __future__ import annotations

import math
from typing import Literal

from tinsmith.errors import shown
from tinsmith.service.api.loss_arguments import (
    FLOAT,
    LENGTH_BITS,
    Argument,
    Refuse,
    Value,
    a_length,
    bits_of,
    growth_of,
    is_length,
    is_number,
    is_small,
    is_tensor,
    lists_in,
    parts_of,
)
from tinsmith.types.loss_operations import ATTRIBUTES, FUNCTIONS, METHODS

LARGEST_BITS = 4096
"""The most bits of a computed whole number."""
LARGEST_SIZE = 65_536
"""The most elements that an operation may create by constant sizes."""
LARGEST_GROWTH = 65_536
"""How many times as large as its inputs a tensor may be, by joining, repeating and padding."""
LENGTH_GROWTH = 64
"""What a length of the data counts as in this: two of them may be multiplied, but not three."""

_ROUNDED_BITS = 1024
"""A float that is rounded to a whole number may have as many."""

# Operations by their effect on sizes. Names without their module, of functions and methods alike.
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


class Operations:
    """Computes the results of operations, and refuses unknown and too large ones."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    def method(self, name: str, args: list[Argument], kwargs: dict[str, Argument]) -> Value:
        """The result of a method of a tensor."""
        if name not in METHODS:
            remedy = "use the form without the underscore" if name.endswith("_") else None
            self._refuse(f"calls the method {shown(name)}, which is not supported", remedy)
        if not args or not is_tensor(args[0]):
            self._refuse(f"calls {name}() on something that is not a tensor")
        if name == "size":
            return a_length() if len(args) > 1 or kwargs else Value("shape")
        return self._of_tensors(name, args[:1], args[1:], kwargs)

    def function(self, name: str, args: list[Argument], kwargs: dict[str, Argument]) -> Value:
        """The result of a function."""
        if name not in FUNCTIONS:
            self._refuse(f"calls {shown(name)}, which is not supported")
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

    def _attribute(self, args: list[Argument], kwargs: dict[str, Argument]) -> Value:
        if len(args) != 2 or kwargs or not isinstance(args[0], Value):
            self._refuse("calls getattr() without a value and a name")
        owner, name = args
        if not isinstance(name, str) or name not in ATTRIBUTES:
            self._refuse(
                f"asks for the attribute {shown(name)}",
                f"known are {', '.join(sorted(ATTRIBUTES))}",
            )
        if name in ("values", "indices"):
            if owner.kind != "tensors":
                self._refuse(f"asks for {name} of something that is not a named tuple of tensors")
            return Value("tensor", growth=owner.growth)
        if owner.kind != "tensor":
            self._refuse(f"asks for {name} of something that is not a tensor")
        if name == "shape":
            return Value("shape")
        if name == "ndim":
            return Value("number", bits=8)
        return owner if name in ("T", "mT") else Value("constant")

    # Python's operators, on tensors and on numbers

    def _operator(self, name: str, args: list[Argument], kwargs: dict[str, Argument]) -> Value:
        if kwargs or not 1 <= len(args) <= 2:
            self._refuse(f"calls operator.{name}() with the wrong number of arguments")
        if name == "getitem":
            return self._item(args)
        if any(is_tensor(arg) for arg in args):
            if not all(is_tensor(arg) or is_number(arg) for arg in args):
                self._refuse(f"calls operator.{name}() on what is neither tensor nor number")
            return Value("tensor", growth=growth_of(args))
        if not all(is_number(arg) for arg in args):
            # A list or a shape times a number is a long list.
            self._refuse(f"calls operator.{name}() on what is neither tensor nor number")
        return self._arithmetic(name, args)

    def _item(self, args: list[Argument]) -> Value:
        if len(args) != 2 or not isinstance(args[0], Value):
            self._refuse("indexes something without a value and an index")
        owner, index = args
        if owner.kind == "shape":
            if isinstance(index, slice):
                return Value("shape")
            if not is_number(index):
                self._refuse("indexes a shape with something that is not a number")
            return a_length()
        if owner.kind == "tensors" and (isinstance(index, slice) or is_number(index)):
            is_one = not isinstance(index, slice)
            return Value("tensor" if is_one else "tensors", growth=owner.growth)
        if owner.kind != "tensor":
            self._refuse("indexes something that has no items")
        factor = max([1, *(len(part) for part in lists_in(index))])
        return self._grown(growth_of([owner, index]) * factor)

    def _of_numbers(self, name: str, args: list[Argument], kwargs: dict[str, Argument]) -> Value:
        """A function of `math`, which accepts a tensor of one element as a number."""
        if not all(is_number(arg) or is_tensor(arg) for arg in (*args, *kwargs.values())):
            self._refuse(f"calls math.{name}() on what is neither tensor nor number")
        return Value("number", bits=_ROUNDED_BITS if name in _ROUNDS else FLOAT)

    def _arithmetic(self, name: str, args: list[Argument]) -> Value:
        bits = [bits_of(arg) for arg in args]
        exponent = args[-1]
        if name == "pow" and (not isinstance(exponent, int | float) or not abs(exponent) <= 16):
            self._refuse("raises a number to a power that is not a constant up to 16")
        if name == "truediv" or FLOAT in bits:
            total = FLOAT
        elif name == "mul":
            total = sum(bits)
        elif name == "pow":
            total = bits[0] * max(1, int(abs(exponent)))
        else:
            total = max(bits) + 1
        if total > LARGEST_BITS:
            self._refuse(f"may create a number of {total} bits; {LARGEST_BITS} are allowed")
        # A length with a small constant is a length again; also divided, or as a remainder.
        stays_length = (
            name in ("add", "sub", "floordiv", "mod")
            and FLOAT < total <= LENGTH_BITS + 4
            and all(is_length(arg) or is_small(arg) for arg in args)
        )
        return Value("number", bits=total, is_length=stays_length)

    # Functions and methods of tensors

    def _of_tensors(
        self,
        name: str,
        owner: list[Argument],
        args: list[Argument],
        kwargs: dict[str, Argument],
    ) -> Value:
        """The result of an operation; `owner` is the tensor that a method is called on."""
        if name in _GIVES_NUMBER:
            return Value("number", bits=2 * LENGTH_BITS)
        everything = [*owner, *args, *kwargs.values()]
        growth = growth_of(everything)
        if name == "arange":
            self._check_range(args, kwargs)
        elif name in _JOINS:
            growth = sum(growth_of([part]) for part in parts_of(everything))
        elif name in _SQUARES:
            growth *= LENGTH_GROWTH * growth_of(args)
        elif name == "pad":
            growth *= self._padding(args, kwargs)
        elif name in _CREATES | _EXPANDS | _REPEATS | _SPLITS:
            growth = self._sized(name, growth, args, kwargs)
        return self._grown(growth, self._kind(name, [*owner, *args], kwargs))

    def _kind(
        self, name: str, args: list[Argument], kwargs: dict[str, Argument]
    ) -> Literal["tensor", "tensors"]:
        if name not in _GIVES_TENSORS:
            return "tensor"
        if name in ("max", "min", "median", "nanmedian"):
            # Of all elements, or of two tensors: only along a dimension are there indices too.
            is_whole = len(args) == 1 and not kwargs
            is_pair = any(is_tensor(other) for other in (*args[1:], *kwargs.values()))
            return "tensor" if is_whole or is_pair else "tensors"
        return "tensors"

    def _sized(
        self, name: str, growth: int, args: list[Argument], kwargs: dict[str, Argument]
    ) -> int:
        """The growth of an operation whose arguments determine the size of its result."""
        if name in ("full", "new_full"):
            args = args[:1]
        elif name == "linspace":
            args = args[2:3]
        sizes = [*args, *(kwargs[key] for key in kwargs if key in _SIZE_KEYWORDS)]
        size = self._size(sizes)
        if name in _SPLITS:
            return growth
        is_absolute = name in _CREATES or (name in _EXPANDS and -1 not in list(parts_of(sizes)))
        return max(growth, size) if is_absolute else growth * size

    def _padding(self, args: list[Argument], kwargs: dict[str, Argument]) -> int:
        widths = [*parts_of([args[0] if args else kwargs.get("pad", [])])]
        return self._size([w + 1 if isinstance(w, int) and w >= 0 else w for w in widths])

    def _check_range(self, args: list[Argument], kwargs: dict[str, Argument]) -> None:
        """`arange` from a start to an end, both bounded; a step below one would create more."""
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
        if not isinstance(step, int) or step == 0:
            self._refuse("creates a range with a step that is not a whole constant")
        for bound in (*args[:2], *(kwargs[key] for key in ("start", "end") if key in kwargs)):
            self._size([bound])

    def _size(self, sizes: list[Argument]) -> int:
        """The product of some sizes, with `LENGTH_GROWTH` for a length."""
        total = 1
        for part in parts_of(sizes):
            if isinstance(part, Value) and part.kind in ("shape", "constant"):
                continue  # a shape belongs to an existing tensor; a dtype is not a size
            if part is None or isinstance(part, str | bool):
                continue
            total *= LENGTH_GROWTH if is_length(part) else self._constant_size(part)
            if total > LARGEST_SIZE:
                self._refuse(
                    f"asks for {total} elements or more; {LARGEST_SIZE} are allowed, where a "
                    f"length of the data counts as {LENGTH_GROWTH}"
                )
        return total

    def _constant_size(self, size: Argument) -> int:
        if not isinstance(size, int | float):
            self._refuse("asks for a size that depends on the data", "use the shape of an input")
        if not abs(size) <= LARGEST_SIZE:
            self._refuse(f"asks for a size of {shown(size)}; {LARGEST_SIZE} is allowed")
        return max(1, math.ceil(abs(size)))

    def _grown(self, growth: int, kind: Literal["tensor", "tensors"] = "tensor") -> Value:
        if growth > LARGEST_GROWTH:
            self._refuse(
                f"may create a tensor {growth} times as large as the inputs; "
                f"{LARGEST_GROWTH} times is allowed"
            )
        return Value(kind, growth=growth)
