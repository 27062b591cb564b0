from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.checkpoints.safetensors_file import (
    HEADER_BYTES_MAX,
    read_header,
    read_tensors,
    write_tensors,
)
from tinsmith.errors import CheckpointFormatError


def some_arrays() -> dict[str, np.ndarray]:
    """One of each type, of several shapes."""
    kinds = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"]
    arrays: dict[str, np.ndarray] = {
        f"t.{kind}": np.arange(6).reshape(2, 3).astype(kind) for kind in kinds
    }
    arrays["empty"] = np.zeros((0, 4), "f4")
    arrays["scalar"] = np.array(2.5, "f4")
    arrays["turned"] = np.arange(6, dtype="f4").reshape(2, 3).T
    arrays["big endian"] = np.arange(3, dtype=">f4")
    return arrays


def test_the_safetensors_package_reads_our_files(tmp_path: Path) -> None:
    written = some_arrays()
    write_tensors(tmp_path / "x", written, {"format": "pt"})

    read = safetensors.numpy.load_file(tmp_path / "x")

    assert read.keys() == written.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(read[name], array)


def test_we_read_files_of_the_safetensors_package(tmp_path: Path) -> None:
    written = {name: a for name, a in some_arrays().items() if a.dtype.str[0] != ">"}
    written = {name: np.ascontiguousarray(array) for name, array in written.items()}
    safetensors.numpy.save_file(written, tmp_path / "x", {"a": "b"})

    read = read_tensors(tmp_path / "x")

    assert read.keys() == written.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    assert read_header(tmp_path / "x").metadata == {"a": "b"}


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    tensor = torch.tensor([[1.5, -2.0], [3.140625, float("inf")]], dtype=torch.bfloat16)
    safetensors.torch.save_file({"x": tensor}, tmp_path / "x")

    read = read_tensors(tmp_path / "x")["x"]

    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, tensor.float().numpy())


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    arrays = some_arrays()
    write_tensors(tmp_path / "x", arrays)
    write_tensors(tmp_path / "y", dict(reversed(arrays.items())))

    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_dtypes_that_the_format_does_not_have_are_rejected(tmp_path: Path) -> None:
    for hostile in (np.zeros(2, "c8"), np.array([object()]), np.array(["text"])):
        with pytest.raises(CheckpointFormatError, match="cannot be saved"):
            write_tensors(tmp_path / "x", {"x": hostile})


def as_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header."""
    text = header if isinstance(header, bytes) else msgspec.json.encode(header)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        as_file(b"{}", length=HEADER_BYTES_MAX + 1),
        as_file(b"{}", length=2**64 - 1),
        as_file(b"{}", length=3),
        as_file(b"[]"),
        as_file(b"{" * 100_000),
        as_file(b"\xff\xff"),
        as_file({"x": entry()}),  # no numbers
        as_file({"x": entry()}, bytes(5)),  # too many
        as_file({"x": entry("F4")}, bytes(4)),
        as_file({"x": entry("BF17")}, bytes(4)),
        as_file({"x": entry(shape=(2,))}, bytes(4)),
        as_file({"x": entry(shape=(-1, -1))}, bytes(4)),
        as_file({"x": entry(shape=(2**62, 2**62))}, bytes(4)),
        as_file({"x": entry(shape=(0, 2**62), offsets=(0, 0))}, b""),
        as_file({"x": entry(shape=(1,) * 50)}, bytes(4)),
        as_file({"x": entry(offsets=(4, 8))}, bytes(8)),  # a hole
        as_file({"x": entry(), "y": entry()}, bytes(4)),  # the same place
        as_file({"x": entry(offsets=(0, 8), shape=(2,)), "y": entry(offsets=(4, 8))}, bytes(8)),
        as_file({"x": entry(offsets=(4, 0))}, bytes(4)),
        as_file({"x": {**entry(), "more": 1}}, bytes(4)),
        as_file({"x" * 301: entry()}, bytes(4)),
        as_file({"x\n": entry()}, bytes(4)),
        as_file({"__metadata__": {"a": 1}}),
    ],
)
def test_hostile_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(CheckpointFormatError, match="is not a valid safetensors file"):
        read_tensors(tmp_path / "x")


@given(st.data())
def test_damaged_files_are_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No byte makes it fail in another way, or take more memory than the file has."""
    file = tmp_path_factory.mktemp("damaged") / "x"
    write_tensors(file, {"a": np.arange(4, dtype="f4"), "b": np.zeros((2, 2), "f2")})
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file.write_bytes(content)

    try:
        read = read_tensors(file)
    except CheckpointFormatError:
        return
    assert sum(array.nbytes for array in read.values()) <= 2 * len(content)
