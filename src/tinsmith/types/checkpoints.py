"""Saved weights: how they are named, listed, copied and fetched."""

from __future__ import annotations

import datetime
from typing import Literal, Self, TypeAlias

from tinsmith.errors import ValidationError
from tinsmith.types.record import Record

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]

_SCHEME = "tinker://"
_TYPE_OF_KIND: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Checkpoint(Record):
    """A saved checkpoint as listings show it; `checkpoint_id` is `<kind>/<name>`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime.datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime.datetime | None = None


class ParsedCheckpointTinkerPath(Record):
    """A `tinker://<run>/<kind>/<name>` path in its parts."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Take a path apart.

        Raises:
            ValueError: It is not of the form `tinker://<run>/<kind>/<name>`.
        """
        parts = tinker_path.removeprefix(_SCHEME).split("/")
        if not tinker_path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
            raise ValidationError(
                f"{tinker_path!r:.200} is not a checkpoint path",
                remedy="it has the form tinker://<training run>/<kind>/<name>",
            )
        run_id, kind, name = parts
        if kind not in _TYPE_OF_KIND:
            raise ValidationError(
                f"{tinker_path!r:.200} has the kind {kind!r}",
                remedy=f"known kinds are {', '.join(_TYPE_OF_KIND)}",
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run_id,
            checkpoint_type=_TYPE_OF_KIND[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class Cursor(Record):
    """Where a page stands in its listing."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Record):
    """A page of checkpoints, newest first; without a cursor it is all of them."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CopyWeightsResponse(Record):
    """Where the copy is."""

    tinker_path: str


class ExternalWeightsUrlsResponse(Record):
    """Signed addresses of a checkpoint's files, by relative path, good until `expires`."""

    urls: dict[str, str]
    expires: datetime.datetime


class CheckpointArchiveUrlResponse(Record):
    """The address of a checkpoint's archive, for SDK 0.35 and older."""

    url: str
    expires: datetime.datetime
