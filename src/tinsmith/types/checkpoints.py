"""Types of checkpoints: paths, listings and downloads."""

from __future__ import annotations

import datetime
import re
from typing import Literal, Self, TypeAlias

from tinsmith.errors import ValidationError
from tinsmith.types.record import Record

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]

CONSOLE_URL = "https://tinker.thinkingmachines.ai"
"""The console of the hosted service."""

_OF_TINSMITH = re.compile(r"(?:session|copy|import|upload)-[0-9a-f]{16,32}(?::|$)")
"""The ids that tinsmith's service gives to sessions and runs."""
_SCHEME = "tinker://"
_TYPE_OF_KIND: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Checkpoint(Record):
    """A checkpoint; `checkpoint_id` is `<kind>/<name>`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime.datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime.datetime | None = None
    base_model: str | None = None
    """What it was trained on; None from services that do not say."""

    def get_console_url(self) -> str | None:
        """The URL of this checkpoint in its service's console; None if that has no console."""
        return checkpoint_console_url(self.tinker_path)


class ParsedCheckpointTinkerPath(Record):
    """The parts of a path `tinker://<run>/<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Parse a path.

        Raises:
            ValueError: The path does not have the form `tinker://<run>/<kind>/<name>`.
        """
        parts = tinker_path.removeprefix(_SCHEME).split("/")
        if not tinker_path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
            raise ValidationError(
                f"invalid checkpoint path {tinker_path!r:.200}",
                remedy="expected tinker://<training run>/<kind>/<name>",
            )
        run_id, kind, name = parts
        if kind not in _TYPE_OF_KIND:
            raise ValidationError(
                f"unknown kind {kind!r} in {tinker_path!r:.200}",
                remedy=f"expected one of {', '.join(_TYPE_OF_KIND)}",
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run_id,
            checkpoint_type=_TYPE_OF_KIND[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class Cursor(Record):
    """The position of a page in its listing."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Record):
    """A page of checkpoints, newest first; all of them if there is no cursor."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointSearchCursor(Record):
    """The position after the last checkpoint of a page."""

    last_created_at: datetime.datetime
    last_checkpoint_uuid: str


class CheckpointSearchResponse(Record):
    """A page of matching checkpoints, newest first; `next_cursor` is None on the last one."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None


class CopyWeightsResponse(Record):
    """The path of the copy."""

    tinker_path: str


class ExternalWeightsUrlsResponse(Record):
    """Signed URLs of a checkpoint's files by relative path, valid until `expires`."""

    urls: dict[str, str]
    expires: datetime.datetime


class ExternalWeightsUploadStartResponse(Record):
    """Where to send each file of an upload with an HTTP `PUT`, until `expires`."""

    upload_id: str
    urls: dict[str, str]
    expires: datetime.datetime


class ExternalWeightsUploadFinishResponse(Record):
    """The checkpoint that an upload became."""

    tinker_path: str


class CheckpointArchiveUrlResponse(Record):
    """The URL of a checkpoint's archive, for SDK 0.35 and older."""

    url: str
    expires: datetime.datetime


def console_url(page: str, run_or_session_id: str) -> str | None:
    """A page of a run or a session in the console of its service; None if that has no console.

    The hosted service has one, and tinsmith's has none. Ids tell where they are from.
    """
    return None if _OF_TINSMITH.match(run_or_session_id) else f"{CONSOLE_URL}/{page}"


def checkpoint_console_url(tinker_path: str) -> str | None:
    """The page of a checkpoint in the console of its service; None if that has no console."""
    from urllib.parse import quote  # 0.4 MB that clients that only sample never need

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    run, checkpoint = quote(parsed.training_run_id, safe=""), quote(parsed.checkpoint_id, safe="")
    return console_url(f"checkpoints/{run}/{checkpoint}", parsed.training_run_id)
