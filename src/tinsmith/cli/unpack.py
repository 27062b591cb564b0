"""Archives, taken apart without trusting them.

An archive comes from elsewhere: it may name files outside of its folder, hold links that lead out,
or claim more than the disk has. It is looked through before the first file is written.
"""

from __future__ import annotations

import pathlib
import shutil
import tarfile

from tinsmith.cli.failures import CommandError
from tinsmith.cli.staging import safe_parts
from tinsmith.observe.sizes import size_text


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> int:
    """Write the files of a tar, compressed or not, into a folder; returns their size in all.

    Raises:
        CommandError: It is no tar, is cut short, or holds anything but plain files and folders
            that stay inside.
    """
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if not member.isdir()]
            places = _places(members, folder)
            total = sum(member.size for member in members)
            _check_room(total, folder)
            for member, place in zip(members, places, strict=True):
                place.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None  # they are plain files
                # Refuses to write to what is there, such as a name that comes twice.
                with content, place.open("xb") as out:
                    shutil.copyfileobj(content, out)
            return total
    except (tarfile.TarError, EOFError, FileExistsError, NotADirectoryError) as exc:
        raise CommandError(
            f"the archive cannot be taken apart: {exc}",
            remedy="run the command again with --no-resume",
        ) from exc


def _places(members: list[tarfile.TarInfo], folder: pathlib.Path) -> list[pathlib.Path]:
    for member in members:
        if not member.isreg():
            raise CommandError(
                f"the archive holds {member.name!r:.200}, which is neither a file nor a folder",
                remedy="nothing of it was written; tell the operator of the service",
            )
    return [folder.joinpath(*safe_parts(member.name)) for member in members]


def _check_room(total: int, folder: pathlib.Path) -> None:
    free = shutil.disk_usage(folder).free
    if total > free:
        raise CommandError(
            f"the archive holds {size_text(total)}, and the disk has {size_text(free)}",
            remedy="make room, or choose another place with --output",
        )
