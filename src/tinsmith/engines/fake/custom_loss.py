"""Uploaded losses, run as they are: a list of operations over the log-probabilities of one datum.

The operations that losses are usually made of are here, computed by `autograd.py`. One that is
allowed (`types/loss_operations.py`) and not here fails with its name: a real engine has them all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tinsmith.engines.base import CustomLossSpec
from tinsmith.engines.fake import autograd as ag
from tinsmith.engines.fake.arithmetic import Array
from tinsmith.engines.fake.autograd import Value
from tinsmith.errors import ValidationError
from tinsmith.types.inputs import Datum
from tinsmith.types.loss_operations import argument_of
from tinsmith.types.training import CustomLossNode

MOST_NUMBERS = 1 << 23
"""Of one array that a loss makes."""
MOST_TOGETHER = 1 << 25
"""Of all arrays that a loss makes of one datum; they are all kept, for the slopes."""
MOST_BITS = 64
"""Of a plain number that a loss makes of sizes and settings."""


def custom_loss(
    spec: CustomLossSpec, lp: Array, datum: Datum
) -> tuple[float, Array, dict[str, float]]:
    """The loss of one datum, its slope at each log-probability, and its metrics.

    Raises:
        ValidationError: The datum does not fit the loss, or the loss cannot be computed.
    """
    logprobs = Value(lp)
    given = [logprobs]
    for one in spec.inputs[1:]:
        tensor = datum.loss_fn_inputs.get(one.name)
        if tensor is None:
            raise ValidationError(f"a datum has no {one.name!r}, which the loss reads")
        given.append(Value(tensor.to_numpy()))
    with np.errstate(all="ignore"):  # what is not finite is found where losses are added up
        returned = _run(spec, given)
        loss, metrics = _checked(returned)
        slopes = ag.slope(loss, logprobs)
    return float(loss.array), np.broadcast_to(slopes, lp.shape), metrics


def _checked(returned: Any) -> tuple[Value, dict[str, float]]:
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        raise ValidationError("the loss returns something else than a loss and its metrics")
    loss, metrics = returned
    if not isinstance(loss, Value) or loss.array.size != 1:
        raise ValidationError("the loss must be one number")
    found = {}
    for name, one in (metrics or {}).items():
        array = ag.value(one).array
        if array.size != 1:
            raise ValidationError(f"the metric {name!r} must be one number")
        found[str(name)] = float(array.reshape(()))
    return ag.reshape(loss, []), found


def _run(spec: CustomLossSpec, given: Sequence[Value]) -> Any:
    made: dict[str, Any] = {}
    numbers = 0
    inputs = iter(given)
    for node in spec.graph.nodes:
        if node.op == "placeholder":
            made[node.name] = next(inputs, None)
        elif node.op == "output":
            return _argument(node.args[0], made)
        else:
            made[node.name] = result = _call(node, made)
            numbers += result.array.size if isinstance(result, Value) else 0
            if numbers > MOST_TOGETHER:
                raise _too_many(node)
    raise ValidationError("the loss returns nothing")


def _call(node: CustomLossNode, made: Mapping[str, Any]) -> Any:
    args = [_argument(one, made) for one in node.args]
    kwargs = {name: _argument(one, made) for name, one in node.kwargs.items()}
    function = _function(node, args)
    if _largest_result([*args, *kwargs.values()]) > MOST_NUMBERS:
        raise _too_many(node)
    try:
        result = function(*args, **kwargs)
    except ValidationError:
        raise
    except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as exc:
        raise ValidationError(
            f"the loss cannot compute {node.target} ({node.name}): {exc}"
        ) from exc
    if isinstance(result, Value) and result.array.size > MOST_NUMBERS:
        raise _too_many(node)
    if isinstance(result, int) and result.bit_length() > MOST_BITS:
        raise _too_many(node)
    return result


def _function(node: CustomLossNode, args: Sequence[Any]) -> Callable[..., Any]:
    module, _, name = node.target.rpartition(".")
    if module == "math":
        return getattr(math, name) if name in _MATH else _unknown(node)  # type: ignore[no-any-return]
    is_plain = not any(isinstance(one, Value) for one in args)
    if module == "operator" and name in _PLAIN_OPERATORS and is_plain:
        if name in _NUMBERS_ONLY and not all(isinstance(one, int | float) for one in args):
            raise ValidationError(f"the loss calls {node.target} ({node.name}) with no numbers")
        return _bounded_power if name == "pow" else getattr(operator, name)
    function = _OPERATIONS.get(name.removeprefix("special_").removeprefix("linalg_"))
    return function if function is not None else _unknown(node)


def _bounded_power(base: float, exponent: float) -> Any:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and int(base).bit_length() * abs(exponent) > 2 * MOST_BITS:
        raise ValueError("the number would be too large")
    return base**exponent


def _largest_result(args: Sequence[Any]) -> int:
    """How many numbers the result may have: arrays are spread over each other, or joined."""
    largest = _spread([one for one in args if isinstance(one, Value)])
    for one in args:
        if isinstance(one, list):
            joined = sum(inner.array.size for inner in one if isinstance(inner, Value))
            largest = max(largest, joined)
        elif isinstance(one, tuple):  # an index: as many picks as its arrays have, or rows of them
            arrays = [inner for inner in one if isinstance(inner, Value)]
            is_of_rows = isinstance(args[0], Value) and args[0].array.ndim > len(arrays)
            rows = args[0].array.size if is_of_rows and arrays else 1
            largest = max(largest, _spread(arrays) * rows)
    return largest


def _spread(arrays: Sequence[Value]) -> int:
    try:
        return math.prod(np.broadcast_shapes(*(one.shape for one in arrays)))
    except ValueError:  # they do not fit, which the operation will tell
        return 0


def _too_many(node: CustomLossNode) -> ValidationError:
    return ValidationError(f"the loss makes too many numbers in {node.target} ({node.name})")


def _unknown(node: CustomLossNode) -> NoReturn:
    raise ValidationError(
        f"the fake engine does not compute {node.target}", remedy="use an engine with a network"
    )


def _argument(plain: Any, made: Mapping[str, Any]) -> Any:
    return argument_of(plain, made, lambda _, name: name)  # names of dtypes and the like


# Operations, with the arguments that torch gives them


def _axis(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def _reduced(function: Callable[..., Value]) -> Callable[..., Value]:
    def reduce(a: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return function(a, _axis(dim), keepdim)

    return reduce


def _max_or(function: Callable[..., Value], largest: Callable[..., Value]) -> Callable[..., Any]:
    """`torch.max` and `torch.min`: of one tensor, over a dimension, or of two tensors."""

    def choose(a: Any, other: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
        if isinstance(other, Value):
            return function(a, other)
        axis = other if dim is None else dim
        return largest(a, axis, keepdim)

    return choose


def _smallest(a: Any, axis: int | None = None, keepdims: bool = False) -> Value:
    return ag.negative(ag.largest(ag.negative(a), axis, keepdims))


def _compared(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Value]:
    return lambda a, b: Value(function(ag.value(a).array, ag.value(b).array))


def _plain(function: Callable[[Any], Any]) -> Callable[..., Value]:
    """A function from which nothing is carried back."""
    return lambda a, *_, **__: Value(function(ag.value(a).array))


def _add(a: Any, b: Any, alpha: float = 1.0) -> Value:
    return ag.add(a, b if alpha == 1.0 else ag.multiply(b, alpha))


def _subtract(a: Any, b: Any, alpha: float = 1.0) -> Value:
    return ag.subtract(a, b if alpha == 1.0 else ag.multiply(b, alpha))


def _clamp(a: Any, min: Any = None, max: Any = None) -> Value:  # noqa: A002 - torch's names
    return ag.clamped(a, min, max)


def _view(a: Any, *shape: Any) -> Value:
    return ag.reshape(a, shape[0] if isinstance(shape[0], list | tuple) else shape)


def _squeeze(a: Any, dim: int | None = None) -> Value:
    array = ag.value(a).array
    is_there = dim is None or array.shape[dim] == 1
    return ag.reshape(a, (np.squeeze(array, dim) if is_there else array).shape)


def _size(a: Any, dim: int | None = None) -> Any:
    shape = ag.value(a).shape
    return shape if dim is None else shape[dim]


def _get(a: Any, index: Any) -> Any:
    if not isinstance(a, Value):
        return a[index]
    indices = index if isinstance(index, tuple) else (index,)
    return ag.pick(a, tuple(one.array if isinstance(one, Value) else one for one in indices))


def _attribute(a: Any, name: str) -> Any:
    if name == "shape":
        return ag.value(a).shape
    if name == "ndim":
        return ag.value(a).array.ndim
    if name in ("T", "mT"):
        return ag.transpose(a, -1, -2)
    if name in ("dtype", "device"):
        return "float32" if name == "dtype" else "cpu"
    raise ValidationError(f"the fake engine does not know the attribute {name!r}")


def _mean_of(term: Callable[[Any, Any], Value]) -> Callable[..., Value]:
    """A loss of two tensors, by torch's rules for `reduction`."""

    def loss(a: Any, b: Any, reduction: str = "mean", **_: Any) -> Value:
        terms = term(a, b)
        return {"mean": ag.mean, "sum": ag.total}.get(reduction, ag.value)(terms)

    return loss


def _squared_gap(a: Any, b: Any) -> Value:
    gap = ag.subtract(a, b)
    return ag.multiply(gap, gap)


def _dot(a: Any, b: Any) -> Value:
    return ag.total(ag.multiply(a, b))


def _norm(a: Any, *_: Any, dim: Any = None, keepdim: bool = False, **__: Any) -> Value:
    return ag.power(ag.total(ag.multiply(a, a), _axis(dim), keepdim), 0.5)


def _same(a: Any, *_: Any, **__: Any) -> Value:
    return ag.value(a)


def _whole(number: float | None) -> Callable[..., Value]:
    def make(a: Any, fill: float = 0.0, **_: Any) -> Value:
        return Value(np.full(ag.value(a).shape, fill if number is None else number))

    return make


_UNARY: dict[str, Callable[..., Any]] = {
    "exp": ag.exp,
    "log": ag.log,
    "log1p": ag.log1p,
    "expm1": ag.expm1,
    "tanh": ag.tanh,
    "sin": ag.sin,
    "cos": ag.cos,
    "sigmoid": ag.sigmoid,
    "expit": ag.sigmoid,
    "softplus": lambda a, *_, **__: ag.softplus(a),
    "logsigmoid": lambda a: ag.negative(ag.softplus(ag.negative(a))),
    "log_sigmoid": lambda a: ag.negative(ag.softplus(ag.negative(a))),
    "relu": lambda a, *_, **__: ag.clamped(a, 0.0),
    "sqrt": lambda a: ag.power(a, 0.5),
    "rsqrt": lambda a: ag.power(a, -0.5),
    "reciprocal": lambda a: ag.power(a, -1.0),
    "square": lambda a: ag.multiply(a, a),
    "neg": ag.negative,
    "negative": ag.negative,
    "pos": _same,
    "abs": ag.absolute,
    "absolute": ag.absolute,
    "sign": _plain(np.sign),
    "floor": _plain(np.floor),
    "ceil": _plain(np.ceil),
    "round": _plain(np.round),
    "isnan": _plain(np.isnan),
    "isfinite": _plain(np.isfinite),
    "isinf": _plain(np.isinf),
    "logical_not": _plain(np.logical_not),
    "invert": _plain(np.logical_not),
    "bitwise_not": _plain(np.logical_not),
    "bool": _plain(lambda a: a.astype(bool)),
    "long": _plain(lambda a: a.astype(np.int64)),
    "int": _plain(lambda a: a.astype(np.int64)),
    "detach": ag.detached,
    "zeros_like": _whole(0.0),
    "ones_like": _whole(1.0),
    "full_like": _whole(None),
    "any": _plain(np.any),
    "all": _plain(np.all),
    **dict.fromkeys(
        ("float", "double", "to", "clone", "contiguous", "type_as", "tensor", "as_tensor"), _same
    ),
}
_BINARY: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _subtract,
    "subtract": _subtract,
    "mul": ag.multiply,
    "multiply": ag.multiply,
    "div": ag.divide,
    "divide": ag.divide,
    "truediv": ag.divide,
    "true_divide": ag.divide,
    "pow": ag.power,
    "maximum": ag.greatest,
    "minimum": ag.least,
    "max": _max_or(ag.greatest, ag.largest),
    "min": _max_or(ag.least, _smallest),
    "dot": _dot,
    "logical_and": _compared(np.logical_and),
    "logical_or": _compared(np.logical_or),
    "and_": _compared(np.logical_and),
    "or_": _compared(np.logical_or),
    "bitwise_and": _compared(np.logical_and),
    "bitwise_or": _compared(np.logical_or),
    **{name: _compared(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "where": ag.where,
    "masked_fill": lambda a, mask, fill: ag.where(mask, fill, a),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": ag.clamped,
    "clamp_max": lambda a, high: ag.clamped(a, None, high),
    "mse_loss": _mean_of(_squared_gap),
    "l1_loss": _mean_of(lambda a, b: ag.absolute(ag.subtract(a, b))),
}
_SHAPES: dict[str, Callable[..., Any]] = {
    "sum": _reduced(ag.total),
    "mean": _reduced(ag.mean),
    "amax": _reduced(ag.largest),
    "amin": _reduced(_smallest),
    "logsumexp": _reduced(ag.logsumexp),
    "norm": _norm,
    "vector_norm": _norm,
    "var": lambda a, dim=None, keepdim=False, correction=1, **_: ag.variance(
        a, _axis(dim), keepdim, correction
    ),
    "std": lambda a, dim=None, keepdim=False, correction=1, **_: ag.power(
        ag.variance(a, _axis(dim), keepdim, correction), 0.5
    ),
    "softmax": lambda a, dim, **_: ag.exp(ag.log_softmax(a, dim)),
    "log_softmax": lambda a, dim, **_: ag.log_softmax(a, dim),
    "cumsum": lambda a, dim, **_: ag.running_total(a, dim),
    "reshape": _view,
    "view": _view,
    "flatten": lambda a, *_: ag.reshape(a, [-1]),
    "ravel": lambda a: ag.reshape(a, [-1]),
    "squeeze": _squeeze,
    "unsqueeze": lambda a, dim: ag.reshape(a, np.expand_dims(ag.value(a).array, dim).shape),
    "transpose": ag.transpose,
    "t": lambda a: ag.transpose(a, 0, 1) if ag.value(a).array.ndim == 2 else ag.value(a),
    "cat": lambda parts, dim=0: ag.joined(parts, dim),
    "concat": lambda parts, dim=0: ag.joined(parts, dim),
    "stack": lambda parts, dim=0: ag.joined(
        [ag.reshape(p, np.expand_dims(ag.value(p).array, dim).shape) for p in parts], dim
    ),
    "numel": lambda a: int(ag.value(a).array.size),
    "nelement": lambda a: int(ag.value(a).array.size),
    "size": _size,
    "dim": lambda a: ag.value(a).array.ndim,
    "getitem": _get,
    "getattr": _attribute,
}
_OPERATIONS = {**_UNARY, **_BINARY, **_SHAPES}
_MATH = frozenset(
    ("exp", "log", "log1p", "expm1", "sqrt", "pow", "floor", "ceil", "sin", "cos", "tanh", "fabs")
)
_NUMBERS_ONLY = frozenset(("mul", "mod", "pow"))
"""Operators that make much of little when they are given texts or lists."""
_PLAIN_OPERATORS = frozenset(
    ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "lt", "le", "gt", "ge", "eq")
)
