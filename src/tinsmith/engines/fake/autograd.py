"""Numbers that remember how they were made, so that a loss can be differentiated: numpy and a tape.

Few operations have a derivative of their own; all others are made of them. What is not listed here
does not exist: nothing is looked up anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tinsmith.engines.fake.arithmetic import Array

Backward: TypeAlias = Callable[[Array], Array]
Axis: TypeAlias = int | tuple[int, ...] | None


class Value:
    """An array, and for each value that it was made of how a slope is carried back to it."""

    __slots__ = ("array", "parents")

    def __init__(self, array: Any, parents: Sequence[tuple[Value, Backward]] = ()) -> None:
        self.array: Array = np.asarray(array)
        self.parents = tuple(parents)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(self.array.shape)


def value(given: Any) -> Value:
    """A value of whatever was given."""
    return given if isinstance(given, Value) else Value(given)


def slope(loss: Value, at: Value) -> Array:
    """How a loss of one number changes with each number of a value."""
    order: list[Value] = []
    seen: set[int] = set()
    stack = [(loss, False)]
    while stack:
        one, is_done = stack.pop()
        if is_done:
            order.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            stack.append((one, True))
            stack += [(parent, False) for parent, _ in one.parents]
    slopes: dict[int, Array] = {id(loss): np.ones(loss.shape)}
    for one in reversed(order):
        carried = slopes.get(id(one))
        if carried is None or not one.parents:
            continue
        for parent, back in one.parents:
            part = back(carried)
            slopes[id(parent)] = slopes[id(parent)] + part if id(parent) in slopes else part
    return slopes.get(id(at), np.zeros(at.shape))


# With derivatives of their own


def add(a: Any, b: Any) -> Value:
    """The sum of two values."""
    a, b = value(a), value(b)
    return Value(
        a.array + b.array, [(a, lambda g: _fold(g, a.shape)), (b, lambda g: _fold(g, b.shape))]
    )


def multiply(a: Any, b: Any) -> Value:
    """The product of two values."""
    a, b = value(a), value(b)
    return Value(
        a.array * b.array,
        [
            (a, lambda g: _fold(g * b.array, a.shape)),
            (b, lambda g: _fold(g * a.array, b.shape)),
        ],
    )


def power(a: Any, b: Any) -> Value:
    """One value to the power of another."""
    a, b = value(a), value(b)
    result = np.power(a.array.astype(np.float64), b.array)

    def to_base(g: Array) -> Array:
        return _fold(g * b.array * np.power(a.array.astype(np.float64), b.array - 1), a.shape)

    def to_exponent(g: Array) -> Array:
        log = np.log(np.where(a.array > 0, a.array, 1.0))
        return _fold(g * result * log, b.shape)

    return Value(result, [(a, to_base), (b, to_exponent)])


def elementwise(of: Callable[[Array], Any], by: Callable[[Array, Array], Any]) -> Any:
    """A function of each number by itself, with its derivative from argument and result."""

    def function(a: Any) -> Value:
        a = value(a)
        result = np.asarray(of(a.array))
        return Value(result, [(a, lambda g: g * by(a.array, result))])

    return function


exp = elementwise(np.exp, lambda _, y: y)
log = elementwise(np.log, lambda x, _: 1 / x)
log1p = elementwise(np.log1p, lambda x, _: 1 / (1 + x))
expm1 = elementwise(np.expm1, lambda _, y: y + 1)
tanh = elementwise(np.tanh, lambda _, y: 1 - y * y)
sin = elementwise(np.sin, lambda x, _: np.cos(x))
cos = elementwise(np.cos, lambda x, _: -np.sin(x))
sigmoid = elementwise(lambda x: 1 / (1 + np.exp(-x)), lambda _, y: y * (1 - y))
softplus = elementwise(lambda x: np.logaddexp(0, x), lambda x, _: 1 / (1 + np.exp(-x)))


def where(condition: Any, a: Any, b: Any) -> Value:
    """One value where a condition holds, another where it does not."""
    chosen, a, b = value(condition).array.astype(bool), value(a), value(b)
    return Value(
        np.where(chosen, a.array, b.array),
        [
            (a, lambda g: _fold(np.where(chosen, g, 0.0), a.shape)),
            (b, lambda g: _fold(np.where(chosen, 0.0, g), b.shape)),
        ],
    )


def total(a: Any, axis: Axis = None, keepdims: bool = False) -> Value:
    """The sum over some or all dimensions."""
    a = value(a)

    def back(g: Array) -> Array:
        if axis is not None and not keepdims:
            g = np.expand_dims(g, axis)
        return np.broadcast_to(g, a.shape)

    return Value(a.array.sum(axis=axis, keepdims=keepdims), [(a, back)])


def running_total(a: Any, axis: int) -> Value:
    """The sums up to each place."""
    a = value(a)

    def back(g: Array) -> Array:
        return np.flip(np.cumsum(np.flip(g, axis), axis), axis)

    return Value(np.cumsum(a.array, axis=axis), [(a, back)])


def reshape(a: Any, shape: Sequence[int]) -> Value:
    """The same numbers in another shape."""
    a = value(a)
    return Value(a.array.reshape(tuple(shape)), [(a, lambda g: g.reshape(a.shape))])


def transpose(a: Any, first: int, second: int) -> Value:
    """Two dimensions swapped."""
    a = value(a)
    return Value(
        np.swapaxes(a.array, first, second), [(a, lambda g: np.swapaxes(g, first, second))]
    )


def pick(a: Any, index: Any) -> Value:
    """Some of the numbers."""
    a = value(a)

    def back(g: Array) -> Array:
        whole = np.zeros(a.shape)
        np.add.at(whole, index, g)
        return whole

    return Value(a.array[index], [(a, back)])


def joined(parts: Sequence[Any], axis: int = 0) -> Value:
    """Values one behind the other."""
    values = [value(part) for part in parts]
    ends = np.cumsum([one.shape[axis] for one in values])

    def back_to(place: int) -> Backward:
        start = ends[place - 1] if place else 0
        return lambda g: np.take(g, range(start, ends[place]), axis=axis)

    return Value(
        np.concatenate([one.array for one in values], axis=axis),
        [(one, back_to(place)) for place, one in enumerate(values)],
    )


def _fold(g: Array, shape: tuple[int, ...]) -> Array:
    """Add up a slope over what was repeated to fit."""
    g = np.asarray(g, dtype=np.float64)
    while g.ndim > len(shape):
        g = g.sum(axis=0)
    repeated = tuple(place for place, size in enumerate(shape) if size == 1 and g.shape[place] != 1)
    return g.sum(axis=repeated, keepdims=True) if repeated else g


# Made of those


def detached(a: Any) -> Value:
    """The same numbers, from which nothing is carried back."""
    return Value(value(a).array)


def negative(a: Any) -> Value:
    """With the other sign."""
    return multiply(a, -1.0)


def subtract(a: Any, b: Any) -> Value:
    """The difference of two values."""
    return add(a, negative(b))


def divide(a: Any, b: Any) -> Value:
    """The quotient of two values."""
    return multiply(a, power(b, -1.0))


def absolute(a: Any) -> Value:
    """Without its sign."""
    return multiply(a, np.sign(value(a).array))


def greatest(a: Any, b: Any) -> Value:
    """The larger of two values; equals share what is carried back."""
    a, b = value(a), value(b)
    share = np.where(a.array == b.array, 0.5, (a.array > b.array) * 1.0)
    return add(multiply(a, share), multiply(b, 1 - share))


def least(a: Any, b: Any) -> Value:
    """The smaller of two values."""
    return negative(greatest(negative(a), negative(b)))


def clamped(a: Any, low: Any = None, high: Any = None) -> Value:
    """Within bounds; beyond them nothing is carried back."""
    found = value(a)
    if low is not None:
        found = where(found.array >= value(low).array, found, low)
    if high is not None:
        found = where(found.array <= value(high).array, found, high)
    return found


def mean(a: Any, axis: Axis = None, keepdims: bool = False) -> Value:
    """The mean over some or all dimensions."""
    a = value(a)
    summed = total(a, axis, keepdims)
    return divide(summed, a.array.size / max(1, summed.array.size))


def largest(a: Any, axis: int | None = None, keepdims: bool = False) -> Value:
    """The largest number over a dimension or over all; of equals, the first has the slope."""
    a = value(a)
    if axis is None:
        return pick(reshape(a, [-1]), int(np.argmax(a.array)))
    chosen = np.zeros(a.shape)
    np.put_along_axis(chosen, np.expand_dims(np.argmax(a.array, axis), axis), 1.0, axis)
    return total(multiply(where(chosen, a, 0.0), chosen), axis, keepdims)


def logsumexp(a: Any, axis: int, keepdims: bool = False) -> Value:
    """The logarithm of the sum of exponentials, without overflow."""
    a = value(a)
    top = np.max(a.array, axis=axis, keepdims=True)
    summed: Value = add(log(total(exp(subtract(a, top)), axis, keepdims=True)), top)
    return summed if keepdims else reshape(summed, np.squeeze(summed.array, axis).shape)


def log_softmax(a: Any, axis: int) -> Value:
    """Log-probabilities of logits."""
    return subtract(a, logsumexp(a, axis, keepdims=True))


def variance(a: Any, axis: Axis = None, keepdims: bool = False, correction: float = 1) -> Value:
    """The variance over some or all dimensions."""
    a = value(a)
    gap = subtract(a, mean(a, axis, True))
    squares = total(multiply(gap, gap), axis, keepdims)
    count = a.array.size / max(1, squares.array.size)
    return divide(squares, count - correction)
