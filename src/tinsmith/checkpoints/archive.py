"""A checkpoint's files as one tar archive, generated while it is read.

An `Archive` is not written to disk: it is a list of parts, which are bytes made here or ranges of
files. Its size is known in advance, and the same checkpoint always gives the same bytes, so an
interrupted download can be resumed. It is not compressed, because weights do not compress well.
`archive_url` stores it beside its checkpoint, where the store has signed URLs.

Tools for Tinker's archives use another name for the output layer than `peft` does (`Layout`). The
names are only in the header of the weights file, which is rewritten; the tensors are unchanged.

`give_peft_names` renames the weights out of an archive as `peft` and vLLM expect them. Archives
have another name for the output layer (`Layout.TINKER`). `peft` silently skips tensors that it does
not know, so the layer would be left untrained without an error.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tinsmith.checkpoints.base import PIECE_BYTES, CheckpointStore, Reading
from tinsmith.checkpoints.disk import disk_errors
from tinsmith.checkpoints.format import ADAPTER_MODEL, Layout, name_in
from tinsmith.checkpoints.manifest import FileEntry, check_version
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.safetensors_file import encode_header, read_header
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointFormatError,
    ValidationError,
)


class _Part(NamedTuple):
    """Bytes, or a stretch of a file."""

    content: bytes
    file: str = ""
    start: int = 0
    length: int = 0

    @property
    def size_bytes(self) -> int:
        return self.length if self.file else len(self.content)


class Archive:
    """The archive of a checkpoint as it is now. It may be read in any part, any number of times.

    Holds nothing open. Making one blocks, as the store does.

    Args:
        store: Where the checkpoint is.
        path: Which one.
        layout: The names of tensors in it.

    Raises:
        CheckpointNotFoundError: There is none.
    """

    def __init__(
        self, store: CheckpointStore, path: CheckpointPath, *, layout: Layout = Layout.TINKER
    ) -> None:
        self._store = store
        self._path = path
        self._layout = layout
        with store.open(path) as reading, disk_errors(f"{path} cannot be archived"):
            self.manifest = reading.manifest
            self._parts = list(self._planned(reading))
        self.size_bytes = sum(part.size_bytes for part in self._parts)
        self.tag = f"{self.manifest.version}-{layout.value}"
        """Differs from that of any other archive; an entity tag for HTTP."""

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Bytes `start` to `stop`, in pieces of 1 MiB at most. Reads the disk between pieces.

        The checkpoint is open until the iterator ends or is dropped.

        Raises:
            ValidationError: The range is not inside the archive.
            CheckpointNotFoundError: It was deleted or overwritten since this archive was made.
        """
        stop = self.size_bytes if stop is None else stop
        if not 0 <= start <= stop <= self.size_bytes:
            raise ValidationError(
                f"range is {start} to {stop}; the archive has {self.size_bytes} bytes"
            )
        reading = self._store.open(self._path)
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            check_version(self._path, reading.manifest, self.manifest.version)
            undo.pop_all()
        return self._pieces(reading, start, stop)

    def _pieces(self, reading: Reading, start: int, stop: int) -> Iterator[bytes]:
        with reading:
            begin = 0
            for part in self._parts:
                end = begin + part.size_bytes
                if begin < stop and end > start:
                    first, last = max(start - begin, 0), min(stop, end) - begin
                    yield from _of_part(reading.folder, part, first, last)
                begin = end

    def _planned(self, reading: Reading) -> Iterator[_Part]:
        total = 0
        for entry in reading.manifest.files:
            contents = self._contents(reading.folder, entry)
            size_bytes = sum(part.size_bytes for part in contents)
            yield _Part(_tar_header(entry.name, size_bytes))
            yield from contents
            yield _Part(bytes(-size_bytes % tarfile.BLOCKSIZE))
            total += size_bytes + -size_bytes % tarfile.BLOCKSIZE + tarfile.BLOCKSIZE
        total += 2 * tarfile.BLOCKSIZE
        yield _Part(bytes(2 * tarfile.BLOCKSIZE + -total % tarfile.RECORDSIZE))

    def _contents(self, folder: Path, entry: FileEntry) -> list[_Part]:
        """A file as it is given out."""
        as_it_is = [_Part(b"", entry.name, 0, entry.size_bytes)]
        if entry.name != ADAPTER_MODEL or self._layout is Layout.PEFT:
            return as_it_is
        try:
            header = read_header(folder / entry.name)
        except CheckpointFormatError:  # a download is not the place to judge it
            return as_it_is
        renamed = {name_in(self._layout, name): tensor for name, tensor in header.tensors.items()}
        return [
            _Part(encode_header(renamed, header.metadata)),
            _Part(b"", entry.name, header.data_start, header.data_bytes),
        ]


STORED_ARCHIVE = "archive=tinker.tar"
"""What a stored archive is called. No file of a checkpoint has a name with this character."""


def archive_url(
    store: CheckpointStore, path: CheckpointPath, *, version: str, lifetime_s: int, shown_as: str
) -> str | None:
    """A URL at which anyone can GET a checkpoint's archive from the store, for a while.

    The first call stores the archive, which blocks for as long as that takes.

    Returns:
        None if the store has no signed URLs.

    Raises:
        CheckpointNotFoundError: There is no such version of it.
    """

    def content() -> Iterator[bytes]:
        archive = Archive(store, path)
        check_version(path, archive.manifest, version)
        return archive.read()

    if not store.keep_beside(path, STORED_ARCHIVE, content, version=version):
        return None
    return store.signed_url(
        path, STORED_ARCHIVE, version=version, lifetime_s=lifetime_s, shown_as=shown_as
    )


def _of_part(folder: Path, part: _Part, start: int, stop: int) -> Iterator[bytes]:
    if not part.file:
        yield part.content[start:stop]
        return
    with disk_errors(f"{part.file} cannot be read"):
        file = (folder / part.file).open("rb")
    with file:
        file.seek(part.start + start)
        left = stop - start
        while left > 0:
            with disk_errors(f"{part.file} cannot be read"):
                piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                raise CheckpointDamagedError(f"{part.file} was truncated")
            left -= len(piece)
            yield piece


def _tar_header(name: str, size_bytes: int) -> bytes:
    entry = tarfile.TarInfo(name)  # its time is 0 and its owner nobody, always
    entry.size = size_bytes
    entry.mode = 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)  # which can tell sizes above 8 GiB


_COPY_BYTES = 1 << 20


def give_peft_names(folder: Path) -> None:
    """Rename the tensors in a folder's file of weights, if it has one; the numbers stay.

    Files of another form are left unchanged.

    Raises:
        OSError: It could not be read or written.
    """
    file = folder / ADAPTER_MODEL
    if not file.is_file():
        return
    try:
        header = read_header(file)
    except CheckpointFormatError:
        return
    renamed = {name_in(Layout.PEFT, name): entry for name, entry in header.tensors.items()}
    if renamed == header.tensors or len(renamed) < len(header.tensors):
        return
    new = file.with_name(f"{file.name}.new")
    with file.open("rb") as content, new.open("wb") as out:
        out.write(encode_header(renamed, header.metadata))
        content.seek(header.data_start)
        shutil.copyfileobj(content, out, _COPY_BYTES)
    new.replace(file)
