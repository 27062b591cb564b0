"""The torch functions behind the operations of uploaded losses, and limits on their results.

All names come from the tables in `types/loss_operations.py` and are resolved once, at import; names
in a graph are only looked up in these dicts. Some functions are replaced by our own: those that
would convert a tensor to a number with a warning, and those whose result size depends on the values
in a tensor.

Knows nothing of graphs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinsmith.types.loss_operations import ATTRIBUTES, DTYPES, FUNCTIONS, METHODS

Function: TypeAlias = Callable[..., Any]

MOST_NUMBERS = 1 << 23
"""Maximum numbers in one tensor."""
MOST_BITS = 4096
"""Maximum bits of an integer computed from sizes and constants."""


class TooManyNumbersError(Exception):
    """The result would exceed the limit."""


# Replacements


def _attribute(owner: Any, name: str) -> Any:
    if name not in ATTRIBUTES:
        raise TypeError(f"there is no attribute {name!r} here")
    if isinstance(owner, Tensor):
        return _TENSOR_ATTRIBUTES[name](owner)
    if isinstance(owner, tuple) and name in ("values", "indices"):
        return owner[("values", "indices").index(name)]  # by place, as torch gives both
    raise TypeError(f"a {type(owner).__name__} has no {name!r}")


def _no_attribute(_: Tensor) -> Any:
    raise TypeError("a tensor has neither values nor indices")


_TENSOR_ATTRIBUTES: dict[str, Function] = {
    "T": lambda x: x.permute(list(reversed(range(x.ndim)))),
    "mT": lambda x: x.mT,
    "device": lambda x: x.device,
    "dtype": lambda x: x.dtype,
    "indices": _no_attribute,
    "ndim": lambda x: x.ndim,
    "shape": lambda x: x.shape,
    "values": _no_attribute,
}


def _of_numbers(function: Function) -> Function:
    """A function of `math`, which accepts tensors of one element and has no gradient."""

    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = {name: _number(one) for name, one in kwargs.items()}
        return function(*map(_number, args), **numbers)

    return call


def _number(given: Any) -> Any:
    return given.detach().item() if isinstance(given, Tensor) else given


def _operator(function: Function) -> Function:
    """An operator on tensors and numbers only; a list times a number could be huge."""

    def call(*args: Any) -> Any:
        is_of_tensors = any(isinstance(one, Tensor) for one in args)
        if not all(isinstance(one, Tensor | int | float) for one in args):
            raise TypeError("operators take tensors and numbers")
        if function is operator.pow and not is_of_tensors:
            base, exponent = args
            if isinstance(base, int) and base.bit_length() * abs(exponent) > MOST_BITS:
                raise TooManyNumbersError
        return function(*args)

    return call


def _tensor(data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """`torch.tensor` without its warning about tensor arguments."""
    if isinstance(data, Tensor):
        return data.detach().clone().to(dtype or data.dtype)
    return torch.tensor(_plain(data), dtype=dtype)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return data.to(dtype or data.dtype) if isinstance(data, Tensor) else _tensor(data, dtype)


def _new_tensor(like: Tensor, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _tensor(data, dtype or like.dtype)


def _plain(data: Any) -> Any:
    return [_plain(one) for one in data] if isinstance(data, list | tuple) else _number(data)


def _one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    largest = int(classes.max()) + 1 if classes.numel() else 1
    count = largest if num_classes == -1 else num_classes
    _check_count(classes.numel() * count)
    return torch.nn.functional.one_hot(classes, num_classes)


def _repeat_interleave(x: Tensor, repeats: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(repeats, Tensor):
        longest = int(repeats.max()) if repeats.numel() else 0
        _check_count(max(x.numel(), repeats.numel()) * longest)
    elif repeats is None:
        _check_count(int(x.sum()))
        return torch.repeat_interleave(x, *args, **kwargs)
    else:
        _check_count(x.numel() * repeats)
    return torch.repeat_interleave(x, repeats, *args, **kwargs)


def _arange(*bounds: Any, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    given = dict(zip(("start", "end", "step"), map(_number, bounds), strict=False))
    if len(bounds) == 1:
        given = {"end": given["start"]}
    given |= {name: _number(one) for name, one in named.items() if name in ("start", "end", "step")}
    start, step = given.get("start", 0), given.get("step", 1)
    _check_count((given["end"] - start) / step)
    return torch.arange(start, given["end"], step, dtype=dtype)


def _check_count(count: float) -> None:
    if not count <= MOST_NUMBERS:
        raise TooManyNumbersError


# The tables


_MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
    "torch._C._special": torch._C._special,  # type: ignore[attr-defined]  # not in torch's stubs
    "torch._C._linalg": torch._C._linalg,  # type: ignore[attr-defined]  # not in torch's stubs
    "operator": operator,
    "math": math,
}
_OWN_FUNCTIONS: dict[str, Function] = {
    "getattr": _attribute,
    "operator.getitem": operator.getitem,
    "torch.arange": _arange,
    "torch.as_tensor": _as_tensor,
    "torch.repeat_interleave": _repeat_interleave,
    "torch.tensor": _tensor,
    "torch._C._nn.one_hot": _one_hot,
}
_OWN_METHODS: dict[str, Function] = {
    "new_tensor": _new_tensor,
    "repeat_interleave": _repeat_interleave,
}


def _function(target: str) -> Function:
    module, _, name = target.rpartition(".")
    found: Function = getattr(_MODULES[module], name)
    wrap = {"math": _of_numbers, "operator": _operator}.get(module)
    return found if wrap is None else wrap(found)


FUNCTION_OF: Mapping[str, Function] = {
    target: _OWN_FUNCTIONS[target] if target in _OWN_FUNCTIONS else _function(target)
    for target in FUNCTIONS
}
"""Targets of `call_function`."""
METHOD_OF: Mapping[str, Function] = {
    name: _OWN_METHODS[name] if name in _OWN_METHODS else getattr(Tensor, name) for name in METHODS
}
"""Targets of `call_method`; the tensor is the first argument."""
DTYPE_OF: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


# Sizes

_SQUARES = frozenset({"diag", "eye"})
_SIZED_BY_ARGUMENTS = frozenset(
    {"broadcast_to", "expand", "eye", "full", "linspace", "new_full", "new_ones", "new_zeros"}
    | {"ones", "pad", "repeat", "tile", "zeros"}
)
"""These accept an integer tensor as a size."""
_CHECK_THEMSELVES = frozenset({"arange", "as_tensor", "getattr", "new_tensor", "one_hot"}) | {
    "repeat_interleave",
    "tensor",
}
_PLACES = frozenset({"nonzero", "where"})
"""These return an index per dimension."""
_PRODUCTS = frozenset({"bmm", "dot", "matmul", "mm", "mv"})


def check_size(
    target: str, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Reject a call whose result would be too large, before it runs.

    The product of all sizes and numbers among the arguments bounds every result, and is small for
    nearly every call. Otherwise the call runs on the `meta` device, without memory.

    Raises:
        TooManyNumbersError: The result would have more than `MOST_NUMBERS` numbers.
        Exception: Whatever the function raises for invalid arguments.
    """
    module, _, name = target.rpartition(".")
    if module == "math" or name in _CHECK_THEMSELVES:
        return
    if largest_result(name, args, kwargs) <= MOST_NUMBERS:
        return
    picked = _most_picked(name, args)
    if picked is not None:
        _check_count(picked)
        return
    with torch.no_grad():
        made = function(*_without_memory(list(args)), **_without_memory(dict(kwargs)))
    _check_count(sum(one.numel() for one in tensors_in([made])))


def _most_picked(name: str, args: Sequence[Any]) -> int | None:
    """Of what picks by a mask, where `meta` cannot tell how much: the most that it can be."""
    found = list(tensors_in(args))
    if name == "nonzero" or (name == "where" and len(args) == 1):
        return found[0].numel() * max(1, found[0].ndim)
    if name == "masked_select":
        return int(math.prod(torch.broadcast_shapes(*(one.shape for one in found))))
    is_by_mask = any(one.dtype in (torch.bool, torch.uint8) for one in found[1:])
    if name == "getitem" and is_by_mask:
        # Two of them are spread over each other.
        return found[0].numel() if len(found) == 2 else math.prod(x.numel() for x in found[1:])
    return None


def work_of(name: str, args: Sequence[Any]) -> int:
    """The approximate number of elements that a call processes."""
    found = list(tensors_in(args))
    if name in _PRODUCTS and len(found) == 2:
        left, right = found
        return left.numel() * (right.shape[-1] if right.ndim > 1 else 1)
    return sum(one.numel() for one in found)


def largest_result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """An upper bound on the size of a call's result, from its arguments' sizes."""
    largest, together, count = 1, 0, 0
    for one in parts_of([*args, *kwargs.values()]):
        if isinstance(one, Tensor):
            count += 1
            together += one.numel()
            largest *= max(1, one.numel()) * (one.ndim or 1 if name in _PLACES else 1)
            if name in _SIZED_BY_ARGUMENTS and one.numel() == 1 and not one.is_floating_point():
                largest *= abs(int(one)) + 1
        elif isinstance(one, int):
            largest *= abs(one) + 1
    largest = max(largest * max(1, count), together)
    return largest**2 if name in _SQUARES else largest


def _without_memory(given: Any) -> Any:
    if isinstance(given, Tensor):
        # Needed as a size, and takes no memory.
        is_number = given.ndim == 0 and not given.is_floating_point()
        return given.item() if is_number else given.detach().to("meta")
    if isinstance(given, torch.device):
        return torch.device("meta")
    if isinstance(given, dict):
        return {name: _without_memory(one) for name, one in given.items()}
    if isinstance(given, torch.Size) or not isinstance(given, list | tuple):
        return given
    return type(given)([_without_memory(one) for one in given])


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return (one for one in parts_of(given) if isinstance(one, Tensor))


def parts_of(given: Any) -> Iterator[Any]:
    """All values in nested lists, tuples, dicts and slices."""
    if isinstance(given, dict):
        given = list(given.values())
    for one in given:
        if isinstance(one, list | tuple | dict):
            yield from parts_of(one)
        elif isinstance(one, slice):
            yield from (one.start, one.stop, one.step)
        else:
            yield one
