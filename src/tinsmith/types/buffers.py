"""Numbers held once, as typed memory that any array library can look at without a copy.

The API knows three kinds of numbers: int32 token ids, int64 and float32 tensors, all
little-endian. They are kept as `bytes` or as a `memoryview` of the caller's own array, so that the
core needs no array library: numpy and torch are touched only when the caller passes or asks for
one of their arrays.

Memory that came from a caller's numpy array or tensor is shared with it, not copied: a change made
before the request is encoded is sent. A read-only view is copied, for others may write to what it
shows: read-only memory in `Numbers` never changes, and whoever needs it unchanged may share it.
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
    raise ImportError(
        "tinsmith shares array memory with the wire and needs a little-endian machine"
    )

Kind: TypeAlias = Literal["int32", "int64", "float32"]
Memory: TypeAlias = bytes | memoryview
"""Raw little-endian bytes; a memoryview is one-dimensional, contiguous and of format "B"."""

FORMATS: dict[Kind, Literal["i", "q", "f"]] = {"int32": "i", "int64": "q", "float32": "f"}
ITEM_BYTES: dict[Kind, int] = {"int32": 4, "int64": 8, "float32": 4}
_SEQUENCES = (list, tuple, range)
FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
"""From here on a number rounds to infinity in float32."""


class Numbers:
    """A flat run of numbers of one kind."""

    __slots__ = ("kind", "memory")

    def __init__(self, memory: Memory, kind: Kind) -> None:
        if len(memory) % ITEM_BYTES[kind]:
            raise ValidationError(
                f"{len(memory)} bytes do not hold whole {kind} numbers of {ITEM_BYTES[kind]} bytes"
            )
        self.memory = memory
        self.kind: Kind = kind

    def __len__(self) -> int:
        return len(self.memory) // ITEM_BYTES[self.kind]

    def __eq__(self, other: object) -> bool:
        # Bit for bit, so that NaN equals itself and no array library is asked.
        if not isinstance(other, Numbers):
            return NotImplemented
        return self.kind == other.kind and self.memory == other.memory

    def __hash__(self) -> int:
        return hash((self.kind, self.memory))  # of memory that cannot change

    def __repr__(self) -> str:
        return f"Numbers({self.kind}, {shortened(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (bytes(self.memory), self.kind)

    def view(self) -> memoryview[Any]:
        """The numbers as a typed memoryview: indexing and iteration give Python numbers."""
        return memoryview(self.memory).cast(FORMATS[self.kind])

    def tolist(self) -> list[Any]:
        """The numbers as a new Python list."""
        return self.view().tolist()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The numbers as a writable numpy array, sharing memory that is writable already."""
        memory = memoryview(self.memory)
        # Copied as bytes, not as numbers: in a body they seldom lie where numpy copies fast.
        own = bytearray(memory) if memory.readonly else memory
        array: np.ndarray[Any, Any] = _require_numpy().frombuffer(own, dtype=self.kind)
        return array

    def slice(self, start: int, stop: int) -> Numbers:
        """The numbers from `start` up to `stop`, sharing memory."""
        size = ITEM_BYTES[self.kind]
        return Numbers(memoryview(self.memory)[start * size : stop * size], self.kind)


def finite(value: float) -> float:
    """The number, or where it is infinite the largest float32 of its sign, for JSON.

    Raises:
        ValidationError: It is NaN, which JSON cannot hold.
    """
    if math.isnan(value):
        raise ValidationError(
            "there is a NaN, which JSON cannot hold", remedy="ask for protobuf instead"
        )
    return max(-FLOAT32_MAX, min(FLOAT32_MAX, value))


def shortened(numbers: Numbers) -> str:
    """The first few numbers, for a repr that stays readable whatever the length."""
    shown = numbers.slice(0, min(8, len(numbers))).tolist()
    rest = len(numbers) - len(shown)
    return f"[{', '.join(map(str, shown))}{f', … {rest} more' if rest else ''}]"


def pack(values: Any, kind: Kind, what: str = "value") -> tuple[Numbers, list[int]]:
    """Hold `values` as numbers of one kind, and say their shape.

    A contiguous array of that kind is shared if it can be written to; anything else is converted or
    copied into new memory, but for `bytes`, which cannot change.

    Args:
        values: A nested list or tuple, a numpy array, a torch tensor, or any buffer of numbers.
        kind: The kind of number wanted.
        what: What the values are, for error messages.
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
    """The tensor's memory as a numpy array; bfloat16, which numpy lacks, is widened to float32."""
    if tensor.requires_grad:
        raise RuntimeError(f"{what} requires grad; call .detach() before sending it")
    if tensor.is_floating_point() and str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    _require_numpy()
    return tensor.cpu().resolve_conj().resolve_neg().numpy()


# Both move bytes rather than numbers: a Python number takes ten times what it is made from, and
# what a decoder takes must stay in proportion to its input.


def widen_int32(memory: Memory) -> memoryview:
    """int32 numbers as int64: the upper half repeats the sign."""
    wide = bytearray(2 * len(memory))
    for place in range(4):
        wide[place::8] = memory[place::4]
    signs = bytes(memory[3::4]).translate(_SIGN_OF_TOP_BYTE)
    for place in range(4, 8):
        wide[place::8] = signs
    return memoryview(wide).toreadonly()


def widen_bfloat16(memory: Memory) -> memoryview:
    """bfloat16 numbers as float32: a bfloat16 is the upper half of a float32."""
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
            "this call returns or takes a numpy array and numpy is not installed; "
            'install it with: pip install "tinsmith[numpy]"'
        ) from exc
    return numpy


def _from_numpy(array: Any, kind: Kind, what: str) -> tuple[Numbers, list[int]]:
    fitting = array if array.dtype == kind else _fit_array(array, kind, what)
    flat = fitting.ravel()
    memory = _shared(flat.data)
    if fitting is not array:
        memory = memoryview(memory).toreadonly()  # nobody else holds it, so it need not be copied
    return Numbers(memory, kind), list(array.shape)


def _shared(view: memoryview) -> Memory:
    """A caller's memory as it is, or a copy if it is read-only here and perhaps not elsewhere."""
    if not view.nbytes or (view.readonly and not isinstance(view.obj, bytes)):
        return bytes(view)  # a view with no elements cannot be cast
    return view.cast("B")


def _fit_array(array: Any, kind: Kind, what: str) -> Any:
    """The array as numbers of a kind; numpy alone would cut what does not fit into other values."""
    if array.dtype.kind not in "biuf":
        raise ValidationError(f"{what} is a numpy array of {array.dtype}, not of numbers")
    numpy = sys.modules["numpy"]
    with numpy.errstate(over="ignore", invalid="ignore"):  # as in lists: too large is infinite
        fitting = array.astype(kind)
    if kind != "float32" and not numpy.array_equal(fitting, array):
        index = int((fitting != array).reshape(-1).argmax())
        value = array.reshape(-1)[index]
        raise ValidationError(f"{what}[{index}] is {value}, which does not fit in {kind}")
    return fitting


def _from_view(view: memoryview, kind: Kind, what: str) -> tuple[Numbers, list[int]]:
    shape = list(view.shape or ())
    given = view.format.lstrip("@=<")  # ctypes arrays say their byte order
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
                f"{what} is ragged: each nested list must have the same length",
                remedy="pad it, or pass one datum per length",
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
    # struct is the fastest way from a list to machine numbers: array and numpy take three times as
    # long. The numbers are its only arguments: beside others they would be gathered twice. They
    # take a tuple of eight bytes each meanwhile; packing in blocks spares it and takes a quarter
    # longer, because each block is gathered twice.
    return _packer(kind, len(values))(*values)


@functools.lru_cache(maxsize=1024)
def _packer(kind: Kind, count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{FORMATS[kind]}").pack


def _fit_one(value: Any, kind: Kind, index: int, what: str) -> int | float:
    """One number as the kind wants it, or the error that says which one does not fit and why."""
    try:
        number = float(value) if kind == "float32" else _integral(value)
    except (TypeError, ValueError, OverflowError):
        raise ValidationError(
            f"{what}[{index}] is {shown(value)}, which is no {kind} number"
        ) from None
    if kind == "float32":
        # What overflows float32 becomes infinite, as in numpy and torch.
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
    """The numbers in runs of `width`."""
    return struct.iter_unpack(f"{width}{FORMATS[numbers.kind]}", numbers.memory)
