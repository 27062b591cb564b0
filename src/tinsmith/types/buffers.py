"""Typed buffers of numbers, which any array library can view without a copy.

The API has three kinds of numbers: int32 token ids, and int64 and float32 tensors, all
little-endian. They are stored as `bytes` or as a `memoryview` of the caller's array, so no array
library is required: numpy and torch are used only if the caller passes or requests their arrays.

The memory of a caller's numpy array or tensor is shared, not copied: changes made before the
request is encoded are sent. A read-only view is copied, since its memory may be writable elsewhere.
So read-only memory in `Numbers` never changes and can be shared.

**`LastList`** caches the last list of token ids that was converted to a chunk. Converting a buffer
back to Python numbers takes twice as long as formatting them as text. Programs usually create a
prompt from a list and sample from it right away, while the list still exists. So a copy of the last
list is cached, but only once it has been requested for the first time.

There is one list for all threads. If two threads alternate, one of them finds the list of the
other, and formats its ids from the buffer. No lock is needed, because the entry is one object.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinsmith.errors import ValidationError, shown

if TYPE_CHECKING:
    import numpy as np


if sys.byteorder != "little":  # pragma: no cover - no such machine to test on
    raise ImportError("tinsmith sends array memory as it is, and requires a little-endian machine")

Kind: TypeAlias = Literal["int32", "int64", "float32"]
Memory: TypeAlias = bytes | memoryview
"""Little-endian bytes; a memoryview is one-dimensional, contiguous and of format "B"."""

FORMATS: dict[Kind, Literal["i", "q", "f"]] = {"int32": "i", "int64": "q", "float32": "f"}
ITEM_BYTES: dict[Kind, int] = {"int32": 4, "int64": 8, "float32": 4}
_SEQUENCES = (list, tuple, range)
FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
"""Numbers of at least this size round to infinity in float32."""


class Numbers:
    """A one-dimensional buffer of numbers of one kind."""

    __slots__ = ("kind", "memory")

    def __init__(self, memory: Memory, kind: Kind) -> None:
        if len(memory) % ITEM_BYTES[kind]:
            raise ValidationError(
                f"{len(memory)} bytes are not a multiple of the {ITEM_BYTES[kind]} bytes of {kind}"
            )
        self.memory = memory
        self.kind: Kind = kind

    def __len__(self) -> int:
        return len(self.memory) // ITEM_BYTES[self.kind]

    def __eq__(self, other: object) -> bool:
        # Bit for bit: NaN equals itself, and no array library is needed.
        if not isinstance(other, Numbers):
            return NotImplemented
        return self.kind == other.kind and self.memory == other.memory

    def __hash__(self) -> int:
        return hash((self.kind, self.memory))  # only works for read-only memory

    def __repr__(self) -> str:
        return f"Numbers({self.kind}, {shortened(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (bytes(self.memory), self.kind)

    def view(self) -> memoryview[Any]:
        """A typed memoryview, whose items are Python numbers."""
        return memoryview(self.memory).cast(FORMATS[self.kind])

    def tolist(self) -> list[Any]:
        """The numbers as a new list."""
        return self.view().tolist()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A writable numpy array, which shares memory if it is writable."""
        memory = memoryview(self.memory)
        # Copied as bytes, not numbers, because arrays in a body are rarely aligned.
        own = bytearray(memory) if memory.readonly else memory
        array: np.ndarray[Any, Any] = _require_numpy().frombuffer(own, dtype=self.kind)
        return array

    def slice(self, start: int, stop: int) -> Numbers:
        """The numbers from `start` up to `stop`, sharing memory."""
        size = ITEM_BYTES[self.kind]
        return Numbers(memoryview(self.memory)[start * size : stop * size], self.kind)


def finite(value: float) -> float:
    """The number for JSON: infinities become the largest float32 of their sign.

    Raises:
        ValidationError: The number is NaN, which JSON cannot represent.
    """
    if math.isnan(value):
        raise ValidationError("JSON cannot represent NaN", remedy="use protobuf instead")
    return max(-FLOAT32_MAX, min(FLOAT32_MAX, value))


def shortened(numbers: Numbers) -> str:
    """The first few numbers, for a short repr."""
    shown = numbers.slice(0, min(8, len(numbers))).tolist()
    rest = len(numbers) - len(shown)
    return f"[{', '.join(map(str, shown))}{f', … {rest} more' if rest else ''}]"


def pack(values: Any, kind: Kind, what: str = "value") -> tuple[Numbers, list[int]]:
    """Convert values to `Numbers` of a kind, and return them with their shape.

    A writable contiguous array of that kind is shared, and so is `bytes`; anything else is
    converted or copied.

    Args:
        values: A nested list or tuple, a numpy array, a torch tensor, or any buffer of numbers.
        kind: The kind of numbers.
        what: The name of the values, for error messages.
    """
    if isinstance(values, Numbers) and values.kind == kind:
        return values, [len(values)]
    if isinstance(values, _SEQUENCES):
        flat, shape = _flattened(values, what)
        return Numbers(_pack_sequence(flat, kind, what), kind), shape
    if is_torch_tensor(values):
        values = torch_to_numpy(values, what)
    if is_numpy_array(values):
        return _from_numpy(values, kind, what)
    try:
        view = memoryview(values)
    except TypeError:
        raise TypeError(
            f"{what} must be a list, a numpy array, a torch tensor or a buffer of numbers, "
            f"not {type(values).__name__}"
        ) from None
    return _from_view(view, kind, what)


def is_torch_tensor(value: object) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def is_numpy_array(value: object) -> bool:
    """Whether this is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))


def torch_to_numpy(tensor: Any, what: str = "tensor") -> Any:
    """The tensor as a numpy array; bfloat16, which numpy lacks, becomes float32."""
    if tensor.requires_grad:
        raise RuntimeError(f"{what} requires grad; call .detach() before sending it")
    if tensor.is_floating_point() and str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    _require_numpy()
    return tensor.cpu().resolve_conj().resolve_neg().numpy()


# Both move bytes: Python numbers take ten times the memory, and that of a decoder must stay
# proportional to its input.


def widen_int32(memory: Memory) -> memoryview:
    """Convert int32 to int64: the upper half repeats the sign."""
    wide = bytearray(2 * len(memory))
    for place in range(4):
        wide[place::8] = memory[place::4]
    signs = bytes(memory[3::4]).translate(_SIGN_OF_TOP_BYTE)
    for place in range(4, 8):
        wide[place::8] = signs
    return memoryview(wide).toreadonly()


def widen_bfloat16(memory: Memory) -> memoryview:
    """Convert bfloat16 to float32: a bfloat16 is the upper half of a float32."""
    wide = bytearray(2 * len(memory))
    wide[2::4] = memory[0::2]
    wide[3::4] = memory[1::2]
    return memoryview(wide).toreadonly()


_SIGN_OF_TOP_BYTE = bytes(128) + b"\xff" * 128


def _require_numpy() -> Any:
    try:
        import numpy
    except ImportError as exc:
        raise ImportError(
            'this call requires numpy, which is not installed; run `pip install "tinsmith[numpy]"`'
        ) from exc
    return numpy


def _from_numpy(array: Any, kind: Kind, what: str) -> tuple[Numbers, list[int]]:
    fitting = array if array.dtype == kind else _fit_array(array, kind, what)
    flat = fitting.ravel()
    memory = _shared(flat.data)
    if fitting is not array:
        memory = memoryview(memory).toreadonly()  # a new array, so it need not be copied
    return Numbers(memory, kind), list(array.shape)


def _shared(view: memoryview) -> Memory:
    """The caller's memory, or a copy if it is read-only here but perhaps not elsewhere."""
    if not view.nbytes or (view.readonly and not isinstance(view.obj, bytes)):
        return bytes(view)  # a view with no elements cannot be cast
    return view.cast("B")


def _fit_array(array: Any, kind: Kind, what: str) -> Any:
    """Convert an array to a kind; numpy alone would silently wrap values that do not fit."""
    if array.dtype.kind not in "biuf":
        raise ValidationError(f"{what} is a numpy array of {array.dtype}, not of numbers")
    numpy = sys.modules["numpy"]
    with numpy.errstate(over="ignore", invalid="ignore"):  # as for lists: overflow becomes infinity
        fitting = array.astype(kind)
    if kind != "float32" and not numpy.array_equal(fitting, array):
        index = int((fitting != array).reshape(-1).argmax())
        value = array.reshape(-1)[index]
        raise ValidationError(f"{what}[{index}] is {value}, which does not fit in {kind}")
    return fitting


def _from_view(view: memoryview, kind: Kind, what: str) -> tuple[Numbers, list[int]]:
    shape = list(view.shape or ())
    given = view.format.lstrip("@=<")  # ctypes arrays include the byte order
    same_format = given == FORMATS[kind] or (given == "l" and kind == "int64")
    if same_format and view.itemsize == ITEM_BYTES[kind] and view.c_contiguous:
        return Numbers(_shared(view), kind), shape
    try:
        values = view.tolist()
    except NotImplementedError:
        raise TypeError(f"{what} is a buffer of format {view.format!r}, not of numbers") from None
    flat, shape = _flattened(values, what)
    return Numbers(_pack_sequence(flat, kind, what), kind), shape


def _flattened(values: Sequence[Any], what: str) -> tuple[Sequence[Any], list[int]]:
    """The innermost values in row-major order, and the shape of the nesting."""
    shape = [len(values)]
    while len(values) and isinstance(values[0], list | tuple):
        width = len(values[0])
        if any(not isinstance(row, list | tuple) or len(row) != width for row in values):
            raise ValidationError(
                f"{what} is ragged: all nested lists must have the same length",
                remedy="pad it, or use one datum per length",
            )
        values = [item for row in values for item in row]
        shape.append(width)
    return values, shape


def _pack_sequence(values: Sequence[Any], kind: Kind, what: str) -> bytes:
    try:
        return _packed(values, kind)
    except (struct.error, OverflowError, TypeError, ValueError):
        fitted = [_fit_one(value, kind, index, what) for index, value in enumerate(values)]
        return _packed(fitted, kind)


def _packed(values: Sequence[Any], kind: Kind) -> bytes:
    # struct is the fastest way from a list to a buffer: array and numpy take three times as long.
    # The numbers are the only arguments, since further ones would copy them into a second tuple.
    # Packing in blocks would save the tuple's memory, but takes a quarter longer.
    return _packer(kind, len(values))(*values)


@functools.lru_cache(maxsize=1024)
def _packer(kind: Kind, count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{FORMATS[kind]}").pack


def _fit_one(value: Any, kind: Kind, index: int, what: str) -> int | float:
    """Convert one number to a kind, or raise an error that names it."""
    try:
        number = float(value) if kind == "float32" else _integral(value)
    except (TypeError, ValueError, OverflowError):
        raise ValidationError(
            f"{what}[{index}] is {shown(value)}, which is not a valid {kind}"
        ) from None
    if kind == "float32":
        # Overflow becomes infinity, as in numpy and torch.
        is_too_large = math.isfinite(number) and abs(number) >= _FLOAT32_OVERFLOW
        return math.copysign(math.inf, number) if is_too_large else number
    bits = 8 * ITEM_BYTES[kind]
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise ValidationError(f"{what}[{index}] is {shown(number)}, which does not fit in {kind}")
    return number


def _integral(value: Any) -> int:
    if hasattr(value, "__index__"):
        return int(value.__index__())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(value)


def rows(numbers: Numbers, width: int) -> Iterator[tuple[Any, ...]]:
    """The numbers as tuples of `width`."""
    return struct.iter_unpack(f"{width}{FORMATS[numbers.kind]}", numbers.memory)


MAX_IDS = 128 * 1024
"""The longest list to cache: up to 5 MB with its numbers."""


class LastList:
    """Caches one list, once it has been requested."""

    def __init__(self) -> None:
        self._is_used = False
        self._cached: tuple[Numbers, Sequence[Any]] | None = None

    def copied(self, values: Any) -> Any:
        """The values to pack: an immutable copy if they will be cached."""
        # Packing converts a list to a tuple anyway, so this costs nothing.
        will_cache = self._is_used and type(values) is list and len(values) <= MAX_IDS
        return tuple(values) if will_cache else values

    def keep(self, numbers: Numbers, values: Any) -> None:
        """Cache the result of `copied` with the numbers that were packed from it."""
        if not self._is_used or type(values) is not tuple or len(values) > MAX_IDS:
            return
        # Not elements of a tensor: each would keep the whole tensor in memory, perhaps on a GPU.
        if values and type(values[0]) is int:
            self._cached = (numbers, values)

    def take(self, numbers: Numbers) -> Sequence[Any] | None:
        """Remove and return the values that these numbers were packed from, if they are cached.

        The values are valid but have the caller's types: an integer may be a bool.
        """
        self._is_used = True
        cached = self._cached
        if cached is None or cached[0] is not numbers:
            return None
        self._cached = None
        return cached[1]


LAST_LIST = LastList()
