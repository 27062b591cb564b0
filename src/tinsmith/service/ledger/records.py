"""The ledger's records: commands, results, and entries that are looked up by id.

All are frozen. Times are seconds since the epoch, by the ledger's own clock (`SteadyClock`).
Payloads are bytes that the ledger never looks into. Knows nothing of how records are stored.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar, NewType

import msgspec

from tinsmith.checkpoints.paths import SAMPLERS, CheckpointPath
from tinsmith.errors import UnknownEntryError, ValidationError

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
QueueId = NewType("QueueId", str)
"""Whose commands are numbered together: a model, a sampling session, or a session's losses."""
RequestId = NewType("RequestId", str)

LARGEST_NUMBER = 2**63 - 1
LONGEST_NAME = 500
"""Of a queue, in characters: a database's index cannot hold names of any length."""


def is_storable(text: str) -> bool:
    """Whether every database can store this text: it has no NUL and no lone surrogates."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


class CommandState(enum.IntEnum):
    """How far a command is."""

    PENDING = 0
    CLAIMED = 1
    SETTLED = 2


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is to be appended. (`queue_id`, `seq_id`) is its identity."""

    queue_id: QueueId
    seq_id: int | None
    """Its number in the queue; None takes the next free one, and makes it new each time."""
    kind: str
    """What is asked, by the name of its endpoint."""
    tenant_id: TenantId
    session_id: SessionId
    fingerprint: bytes
    """Equal for equal requests, and for no others. What a retry may change is left out of it."""
    payload: bytes
    is_ordered: bool = True
    """Whether the queue runs in the order of its numbers, and is replayed after a crash."""
    clone: int | None = None
    """In which feed of the queue its end is announced; None for no feed."""

    def __post_init__(self) -> None:
        if self.seq_id is not None and not 0 <= self.seq_id <= LARGEST_NUMBER:
            raise ValidationError(f"seq_id is {self.seq_id}; it may be 0 to {LARGEST_NUMBER}")
        if self.queue_id == "" or not is_storable(self.queue_id):
            raise ValidationError(f"{self.queue_id!r:.80} cannot be the id of a queue")
        for name in (self.kind, self.tenant_id, self.session_id):
            if not is_storable(name):
                raise ValidationError(f"{name!r:.80} cannot be a kind, a tenant or a session")
        if len(self.queue_id) > LONGEST_NAME:
            raise ValidationError(
                f"{self.queue_id!r:.80}… has {len(self.queue_id)} characters; the limit is "
                f"{LONGEST_NAME}"
            )


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its state; its payload and its result are read separately."""

    ordinal: int
    """In which order commands were appended, over all queues."""
    queue_id: QueueId
    seq_id: int
    kind: str
    tenant_id: TenantId
    session_id: SessionId
    clone: int | None
    is_ordered: bool
    fingerprint: bytes
    payload_bytes: int
    created_at: float
    state: CommandState = CommandState.PENDING
    claimed_by: str | None = None
    claimed_at: float | None = None
    settled_at: float | None = None
    is_failed: bool = False
    result_bytes: int = 0
    is_gone: bool = False
    """Whether its result has been deleted."""
    started_at: float | None = None
    """When the engine began with it, if it is settled and that was told."""
    batch: str | None = None
    """Which call of the engine it shared with others of the same name."""

    @property
    def request_id(self) -> RequestId:
        """What its client asks for the result with."""
        return request_id(self.queue_id, self.seq_id)

    @property
    def is_settled(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.state is CommandState.SETTLED


def of_tenant(command: Command, tenant_id: TenantId | None) -> Command:
    """The command if it is this tenant's, or none is given; else raises `UnknownEntryError`."""
    if tenant_id is not None and command.tenant_id != tenant_id:
        raise UnknownEntryError(f"there is no request {command.request_id!r:.200}")
    return command


def request_id(queue_id: QueueId, seq_id: int) -> RequestId:
    """The request id that a command has by its identity."""
    return RequestId(f"{queue_id}:{seq_id}")


def identity(request: str) -> tuple[QueueId, int]:
    """The identity encoded in a request id; raises `UnknownEntryError` if it has none."""
    queue_id, _, number = request.rpartition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= 19
    # Only as we write it: "m:01" must not be another name of "m:1".
    if not queue_id or not is_storable(queue_id) or not is_number or str(int(number)) != number:
        raise UnknownEntryError(f"there is no request {request!r:.200}")
    if int(number) > LARGEST_NUMBER:
        raise UnknownEntryError(f"there is no request {request!r:.200}")
    return QueueId(queue_id), int(number)


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a submission."""

    request_id: RequestId
    seq_id: int
    is_new: bool
    """False if it repeats one that was appended before."""


class UsageKey(msgspec.Struct, frozen=True, kw_only=True):
    """Whose use of what is counted together, within an hour."""

    tenant_id: TenantId
    kind: str
    """`training`, `sampling_prefill`, `sampling_prefill_cached`, `sampling_sample`, …"""
    session_id: str = ""
    queue_id: str = ""
    base_model: str = ""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Something used: tokens, checkpoints, or gigabyte-hours."""

    key: UsageKey
    amount: float


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was used in the hour that begins at `hour`."""

    key: UsageKey
    hour: int
    amount: float


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    request_id: RequestId
    payload: bytes
    is_failed: bool = False
    uses: tuple[Use, ...] = ()
    """Counted with the settlement or not at all."""
    started_at: float | None = None
    batch: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a settled command: the bytes of its answer or of its failure."""

    payload: bytes
    is_failed: bool


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A settled command of a feed; the next poll asks for those after `cursor`."""

    cursor: int
    request_id: RequestId
    is_failed: bool
    result_bytes: int


class QueueProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an ordered queue is, and from where it is replayed."""

    queue_id: QueueId
    position: int
    """All numbers below are settled or were passed over."""
    snapshot_position: int = 0
    """All numbers below are in the snapshot."""
    snapshot: str | None = None
    """Where the snapshot is; None if the queue is replayed from its start."""
    asked_at: float | None = None
    """When the command with its highest number came; None once that is swept away."""


# Things that are looked up by id


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A record with an id. Fields may be added with a default; none may change its meaning."""

    kind: ClassVar[str]

    id: str
    tenant_id: TenantId
    created_at: float

    @property
    def parent_id(self) -> str:
        """What it belongs to, by which it can be listed."""
        return self.tenant_id

    @property
    def due_at(self) -> float | None:
        """The time by which it can be listed, such as its expiry."""
        return None


class Tenant(Entry, frozen=True, kw_only=True):
    """Who keys belong to. Its `tenant_id` is its own id."""

    kind: ClassVar[str] = "tenant"

    name: str
    quotas: dict[str, int] = {}


class ApiKey(Entry, frozen=True, kw_only=True):
    """An API key. Its id is the digest of the key; the key itself is not stored."""

    kind: ClassVar[str] = "api_key"

    name: str
    shown: str
    """Its first characters, so that a person can tell it from others."""
    revoked_at: float | None = None
    is_operator: bool = False
    """Whether it may see and drain the replicas of the engine."""


class SessionEntry(Entry, frozen=True, kw_only=True):
    """A session of a client. Listed by its last heartbeat, or by its end."""

    kind: ClassVar[str] = "session"

    project_id: str
    heartbeat_at: float
    display_name: str | None = None
    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    ended_at: float | None = None
    ending: dict[str, Any] | None = None
    """How it ended, in the plain form of the API's session status."""

    @property
    def parent_id(self) -> str:
        """Its project."""
        return self.project_id

    @property
    def due_at(self) -> float:
        """When it was last heard of or ended."""
        return self.heartbeat_at if self.ended_at is None else self.ended_at


class ModelEntry(Entry, frozen=True, kw_only=True):
    """A training run. Its queue has the same id."""

    kind: ClassVar[str] = "model"

    session_id: SessionId
    base_model: str
    config: dict[str, Any] = {}
    """LoRA and optimizer settings, in the plain form of the API's types."""
    user_metadata: dict[str, Any] | None = None
    released_at: float | None = None
    """When the engine unloaded it."""
    steps: int | None = None
    """Of the optimizer, as of the last look at how far it is; None if it has had none."""
    loss_per_token: float | None = None
    """Of the last pass by then."""

    @property
    def parent_id(self) -> str:
        """Its session."""
        return self.session_id


class SamplerEntry(Entry, frozen=True, kw_only=True):
    """A sampling session. Its queue has the same id."""

    kind: ClassVar[str] = "sampler"

    session_id: SessionId
    base_model: str
    model_path: str | None = None
    clones: int = 0
    """How many clients have joined it; the newest of them has this number."""
    dropped_at: float | None = None
    """When its weights were given up to make room, if they have no name and were."""

    @property
    def own_files(self) -> CheckpointPath | None:
        """Where its weights are in the store, if they have no name."""
        path = None if self.model_path is None else CheckpointPath.parse(self.model_path)
        return path if path is not None and path.kind == SAMPLERS else None

    @property
    def parent_id(self) -> str:
        """Its session."""
        return self.session_id


class CheckpointEntry(Entry, frozen=True, kw_only=True):
    """A checkpoint; the id is its `tinker://` path."""

    kind: ClassVar[str] = "checkpoint"

    run_id: str
    checkpoint_id: str
    size_bytes: int = 0
    is_published: bool = False
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    details: dict[str, Any] = {}
    edition: str = ""
    """Which of the files under its name are its own; see `checkpoints/paths.py`."""

    @property
    def files(self) -> CheckpointPath:
        """Where its files are in the store."""
        return CheckpointPath.parse(self.id).in_edition(self.edition)

    @property
    def parent_id(self) -> str:
        """Its training run."""
        return self.run_id

    @property
    def due_at(self) -> float | None:
        """When it expires."""
        return self.expires_at


class UploadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an upload that has arrived whole."""

    place: str
    """Where it is in the store, as the text of a `CheckpointPath`."""
    size_bytes: int
    sha256: str


class UploadEntry(Entry, frozen=True, kw_only=True):
    """An adapter that is being uploaded; once it is a checkpoint, this is gone."""

    kind: ClassVar[str] = "upload"

    base_model: str
    lora_config: dict[str, Any]
    """In its plain form."""
    expires_at: float
    """When it is given up with all its files; its URLs expire earlier."""
    project_id: str | None = None
    user_metadata: dict[str, str] | None = None
    files: dict[str, UploadedFile] = {}
    """By name. A file that is sent again takes the place of the one before."""
    is_sealed: bool = False
    """Whether it is being made a checkpoint, so that no file may change."""

    @property
    def due_at(self) -> float:
        """When it is given up."""
        return self.expires_at


class CustomLossEntry(Entry, frozen=True, kw_only=True):
    """An uploaded loss, as a checked graph."""

    kind: ClassVar[str] = "custom_loss"

    session_id: SessionId
    name: str
    graph: dict[str, Any]

    @property
    def parent_id(self) -> str:
        """Its session."""
        return self.session_id


class AuditEntry(Entry, frozen=True, kw_only=True):
    """An entry of the audit log."""

    kind: ClassVar[str] = "audit"

    event: str
    details: dict[str, Any] = {}
    model_id: str | None = None
    tinker_path: str | None = None

    @property
    def due_at(self) -> float:
        """When it happened."""
        return self.created_at


class RequestPace(Entry, frozen=True, kw_only=True):
    """How many more requests a tenant may send now; its id is the tenant's."""

    kind: ClassVar[str] = "request_pace"

    turns: float
    counted_at: float


class ServedModels(Entry, frozen=True, kw_only=True):
    """The base models of the scheduler's engine, for servers without one; there is one entry."""

    kind: ClassVar[str] = "served_models"

    models: list[dict[str, Any]] = []
    """In the plain form of `engine.base.BaseModel`."""


class SigningSecret(Entry, frozen=True, kw_only=True):
    """What all servers of one database sign tokens and download links with; there is one."""

    kind: ClassVar[str] = "signing_secret"

    secret: str
    """In hexadecimal digits."""

    def __repr__(self) -> str:
        return "SigningSecret(***)"


class StorageCount(Entry, frozen=True, kw_only=True):
    """Until when the storage of checkpoints has been counted; there is one such entry."""

    kind: ClassVar[str] = "storage_count"

    counted_until: float


class ReplicaEntry(Entry, frozen=True, kw_only=True):
    """A replica of the engine, by its name: what the scheduler reports, and what operators want."""

    kind: ClassVar[str] = "replica"

    report: dict[str, Any]
    """As of `reported_at`."""
    reported_at: float
    is_drained: bool = False
    """Whether an operator wants it emptied and closed."""
    problem: str | None = None
    """Why that cannot be done."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long finished data is stored, in seconds."""

    result_s: float = 24 * 3600.0
    """Results that were not acknowledged, from their settlement on."""
    command_s: float = 2 * 24 * 3600.0
    """What is known of settled commands: it tells a late retry from a new request."""
    session_s: float = 90 * 24 * 3600.0
    """Ended sessions, with their samplers, losses, and runs without checkpoints."""
    audit_s: float = 400 * 24 * 3600.0
    usage_s: float = 400 * 24 * 3600.0


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep removed."""

    results: int = 0
    commands: int = 0
    sessions: int = 0
    entries: int = 0
    files: int = 0


class LedgerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment."""

    pending: int
    claimed: int
    oldest_pending_s: float
    """How long the oldest pending command has waited."""
    payload_bytes: int
    """Stored payloads and results, in the database and in files."""
    payload_files: int
    stored_bytes: int
    """What the database takes on disk; 0 in memory."""
    commits: int
    """Since it was opened."""
    writes: int
    """Since it was opened; over `commits` it is how many share one."""
    lock_waited_s: float = 0.0
    """How long changes have waited for those of other servers, since it was opened."""
    lock_held_s: float = 0.0
    """How long they have kept the changes of other servers waiting."""
