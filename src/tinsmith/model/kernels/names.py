"""Where a compiled library is: beside its sources, under a name that is made from them.

So a library that was compiled from others, before an update of a checkout, is never called as if it
were compiled from these. `hatch_build.py` runs this file too, without torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def library_path(kind: str, folder: Path = FOLDER) -> Path:
    """Of a kind of machine; whether there is one or not."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    read = b"".join(path.read_bytes() for path in sources)
    return folder / f"{kind}.{hashlib.blake2b(read, digest_size=6).hexdigest()}.so"
