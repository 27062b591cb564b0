"""Bringing adapters that were made elsewhere: what travels in it; see `docs/extensions.md`."""

from __future__ import annotations

from tinsmith.types.record import Record, Request

IMPORTED_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What an adapter consists of, as `peft` saves it."""


class BeginImportRequest(Request):
    """Say what will be sent: a name for the checkpoint, and the size of each file in bytes."""

    name: str
    files: dict[str, int]
    base_model: str | None = None
    """What the service calls it; None takes the word of `adapter_config.json`."""
    project_id: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class BeginImportResponse(Record):
    """Where to send the files, and in parts of which size at most."""

    import_id: str
    part_bytes: int


class ImportPartRequest(Request):
    """A part of a file; the body is its bytes."""

    import_id: str
    name: str
    offset: int


class FinishImportRequest(Request):
    """All is sent: check it and make it a checkpoint."""

    import_id: str


class FinishImportResponse(Record):
    """Where the checkpoint is, and what it is."""

    tinker_path: str
    base_model: str
    lora_rank: int
    size_bytes: int
