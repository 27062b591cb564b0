"""The path of a compiled library: beside its sources, with a hash of them in its name.

A library compiled from other sources, before an update of a checkout, is therefore never loaded.
`hatch_build.py` runs this file too, without torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def library_path(kind: str, folder: Path = FOLDER) -> Path:
    """The path for an instruction set, whether or not the library exists."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    read = b"".join(path.read_bytes() for path in sources)
    return folder / f"{kind}.{hashlib.blake2b(read, digest_size=6).hexdigest()}.so"
