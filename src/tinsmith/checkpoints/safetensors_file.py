"""Files of tensors in the safetensors form: eight bytes of length, a JSON header, the numbers.

Written here and not by the `safetensors` package, for three reasons: its numpy face cannot read
bfloat16, which is what most adapters made elsewhere hold; archives rename tensors, for which only
the header is written anew; and headers come from elsewhere, so that their size is bounded before
they are read. Tests hold this against the package, both ways.

numpy is loaded when arrays are read or written.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from tinsmith.errors import CheckpointFormatError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

HEADER_BYTES_MAX = 16 << 20
TENSORS_MAX = 100_000
NAME_MAX = 300
"""Of a tensor, in characters."""
_DIMENSIONS_MAX = 8
_NUMBERS_MAX = 2**48
_METADATA = "__metadata__"

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
_NUMPY_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_FROM_NUMPY = {name: code for code, name in _NUMPY_NAMES.items() if code != "BF16"}


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor's numbers are, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """What a file says of its tensors."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    """Where the numbers begin, in bytes from the start of the file."""

    @property
    def data_bytes(self) -> int:
        """How many bytes of numbers there are."""
        return max((entry.data_offsets[1] for entry in self.tensors.values()), default=0)


def read_header(file: Path) -> Header:
    """Read and check what a file says of its tensors; the numbers are not looked at.

    Raises:
        CheckpointFormatError: It is not in this form, or is larger or stranger than allowed.
    """
    with file.open("rb") as content:
        size_bytes = os.fstat(content.fileno()).st_size
        prefix = content.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(HEADER_BYTES_MAX, size_bytes - 8):
            raise _wrong(file, f"its header claims {length} bytes of a file of {size_bytes}")
        text = content.read(length)
    try:
        plain = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(plain.pop(_METADATA, b"{}"), type=dict[str, str])
        tensors = {
            name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in plain.items()
        }
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise _wrong(file, f"its header cannot be read: {exc}") from exc
    header = Header(tensors, metadata, 8 + length)
    _check(file, header, size_bytes)
    return header


def _check(file: Path, header: Header, size_bytes: int) -> None:
    """Refuse tensors that overlap, leave holes, or are not what their shapes say."""
    if len(header.tensors) > TENSORS_MAX:
        raise _wrong(file, f"it has {len(header.tensors)} tensors; the maximum is {TENSORS_MAX}")
    stop_before = 0
    for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if len(name) > NAME_MAX or not name.isprintable():
            raise _wrong(file, f"the name {shown(name)} is too long or not printable")
        if entry.dtype not in _ITEM_BYTES:
            raise _wrong(
                file, f"{name} has dtype {shown(entry.dtype)}; expected {', '.join(_ITEM_BYTES)}"
            )
        if not _is_possible(entry.shape):
            raise _wrong(file, f"{name} has the invalid shape {shown(entry.shape)}")
        if start != stop_before or stop - start != _size_bytes(entry):
            raise _wrong(file, f"{name} has the invalid range {start} to {stop}")
        stop_before = stop
    if header.data_start + stop_before != size_bytes:
        raise _wrong(file, f"it has {size_bytes} bytes, which is not where its tensors end")


def _is_possible(shape: Sequence[int]) -> bool:
    """Whether an array can have this shape, one without numbers too."""
    is_shape = len(shape) <= _DIMENSIONS_MAX and min(shape, default=0) >= 0
    return is_shape and math.prod(max(1, size) for size in shape) <= _NUMBERS_MAX


def _size_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the numbers, the length included."""
    plain: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    text = msgspec.json.encode({**plain, **tensors})
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned in memory
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    file: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to a new file; the same arrays give the same bytes.

    Raises:
        CheckpointFormatError: An array is of a type that the form does not have.
        OSError: The file could not be written.
    """
    import numpy as np

    # Large items first, so that each is aligned to its own size.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    tensors: dict[str, TensorEntry] = {}
    end = 0
    for name, array in ordered:
        kind = array.dtype.newbyteorder("<").str.lstrip("|").replace("b1", "?")
        if kind not in _FROM_NUMPY:
            raise CheckpointFormatError(f"{name} has dtype {array.dtype}, which cannot be saved")
        tensors[name] = TensorEntry(_FROM_NUMPY[kind], array.shape, (end, end + array.nbytes))
        end += array.nbytes
    with file.open("xb") as out:
        out.write(encode_header(tensors, metadata or {}))
        for _, array in ordered:
            if array.size:
                little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
                out.write(little.reshape(-1).view(np.uint8).data)


def read_tensors(file: Path) -> dict[str, Array]:
    """Read all arrays of a file; bfloat16 becomes float32.

    Raises:
        CheckpointFormatError: See `read_header`.
        OSError: The file could not be read.
    """
    header = read_header(file)
    with file.open("rb") as content:
        return {name: read_tensor(content, header, name) for name in header.tensors}


def read_tensor(content: BinaryIO, header: Header, name: str) -> Array:
    """Read one array of an open file; the same errors as `read_tensors`."""
    import numpy as np

    entry = header.tensors[name]
    content.seek(header.data_start + entry.data_offsets[0])
    array = np.empty(entry.shape, np.dtype(_NUMPY_NAMES[entry.dtype]))
    if array.size:
        into = array.reshape(-1).view(np.uint8).data
        if content.readinto(into) != len(into):  # type: ignore[attr-defined]  # files have it
            raise _wrong(Path(content.name), f"it is truncated in {name}")
    return _widened(array) if entry.dtype == "BF16" else array


def _widened(array: Array) -> Array:
    """Bfloat16, held as 16-bit numbers, as float32: its bits are the upper half."""
    import numpy as np

    return (array.astype(np.uint32) << 16).view(np.float32)


def _wrong(file: Path, why: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{file.name} is not a valid safetensors file: {why}")
