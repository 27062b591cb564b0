"""Weights out of an archive, called as `peft` and vLLM call them.

Archives have another name for the output layer (`Layout.TINKER`). `peft` passes over tensors that
it does not know, without an error: the layer would be left untrained, and nobody would notice.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tinsmith.checkpoints.format import ADAPTER_MODEL, Layout, name_in
from tinsmith.checkpoints.safetensors_file import encode_header, read_header
from tinsmith.errors import CheckpointFormatError

_COPY_BYTES = 1 << 20


def give_peft_names(folder: Path) -> None:
    """Rename the tensors in a folder's file of weights, if it has one; the numbers stay.

    A file that is not of this form is left as it is: a download is not the place to judge it.

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
