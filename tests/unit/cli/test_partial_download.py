from __future__ import annotations

import io
import pathlib
import tarfile
from collections import namedtuple

import pytest

from tinsmith.cli.command_errors import CommandError
from tinsmith.cli.partial_download import unpack

Entry = namedtuple(
    "Entry", ["name", "content", "kind", "link"], defaults=[b"x", tarfile.REGTYPE, ""]
)


def archive_of(folder: pathlib.Path, *entries: Entry, mode: str = "w") -> pathlib.Path:
    path = folder / "archive.tar"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.linkname, info.size = entry.kind, entry.link, len(entry.content)
            tar.addfile(info, io.BytesIO(entry.content))
    return path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "out"
    made.mkdir()
    return made


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_files_are_written_below_the_folder(
    mode: str, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    archive = archive_of(
        tmp_path,
        Entry("sub", b"", tarfile.DIRTYPE),
        Entry("./config.json", b"{}"),
        Entry("sub/weights", b"123"),
        mode=mode,
    )

    total = unpack(archive, folder)

    assert total == 5
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "sub" / "weights").read_bytes() == b"123"


@pytest.mark.parametrize(
    "entry",
    [
        Entry("../evil"),
        Entry("/tmp/evil"),
        Entry("a/../../evil"),
        Entry("evil", b"", tarfile.SYMTYPE, "/etc/passwd"),
        Entry("evil", b"", tarfile.SYMTYPE, "good"),
        Entry("evil", b"", tarfile.LNKTYPE, "good"),
        Entry("evil", b"", tarfile.FIFOTYPE),
        Entry("evil", b"", tarfile.CHRTYPE),
    ],
)
def test_a_malicious_archive_writes_nothing(
    entry: Entry, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    archive = archive_of(tmp_path, Entry("good"), entry)

    with pytest.raises(CommandError):
        unpack(archive, folder)

    assert list(folder.iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_a_duplicate_name_is_rejected(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CommandError, match="cannot extract the archive"):
        unpack(archive_of(tmp_path, Entry("a"), Entry("./a", b"other")), folder)


def test_a_file_in_place_of_a_folder_is_rejected(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(CommandError, match="cannot extract the archive"):
        unpack(archive_of(tmp_path, Entry("a"), Entry("a/b")), folder)


@pytest.mark.parametrize("kept", [0, 100, 700])
def test_a_truncated_or_invalid_archive_is_rejected(
    kept: int, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    archive = archive_of(tmp_path, Entry("weights", bytes(1000)))
    archive.write_bytes(archive.read_bytes()[:kept])

    with pytest.raises(CommandError, match="cannot extract the archive"):
        unpack(archive, folder)


def test_an_archive_larger_than_the_free_disk_space_is_not_unpacked(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10))

    with pytest.raises(CommandError, match="the disk has only 10 B free"):
        unpack(archive_of(tmp_path, Entry("weights", bytes(11))), folder)

    assert list(folder.iterdir()) == []
