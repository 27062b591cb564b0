"""Old releases of the official SDK, each unpacked in a folder of its own.

`releases.toml` names them. They are fetched with pip, without their dependencies, so they run with
the packages of this environment. What was fetched stays in `.cache/sdks`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "sdks"

_pinned = tomllib.loads((Path(__file__).parent / "releases.toml").read_text(encoding="utf-8"))
NEWEST: str = _pinned["newest"]
"""The release in the development environment."""
WHEELS: dict[str, str] = _pinned["wheels"]
"""SHA-256 of the wheel of each older release, oldest first."""
FETCH_TIMEOUT_S = 120.0


def folder_of(release: str) -> Path | None:
    """The folder to put on the path for that release; None if the environment has it.

    Raises:
        RuntimeError: The wheel cannot be fetched, or is not the one that was pinned.
    """
    if release == NEWEST:
        return None
    folder = CACHE / release
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _unpack(_fetch(release, Path(scratch)), Path(scratch) / "unpacked", folder)
    return folder


def _fetch(release: str, scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    pip += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(scratch)]
    done = subprocess.run(
        [*pip, f"tinker=={release}"],
        capture_output=True,
        text=True,
        timeout=FETCH_TIMEOUT_S,
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not fetch tinker {release}:\n{done.stderr}")
    refuse_unless_pinned(wheels[0], WHEELS[release])
    return wheels[0]


def refuse_unless_pinned(wheel: Path, pinned: str) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != pinned:
        raise RuntimeError(f"{wheel.name}: its SHA-256 is {digest}, and {pinned} was pinned")


def _unpack(wheel: Path, scratch: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    try:
        # The folder has its name once it is whole.
        scratch.rename(folder)
    except OSError:
        # Another run was first; what it left is the same.
        if not folder.exists():
            raise
        shutil.rmtree(scratch)
