"""Everything that can be set about the service, as one frozen object.

`settings_loading.py` fills it from flags, the environment and a file; `options.py` describes each
setting, and docs/reference/settings.md has the table.

Addresses may hold passwords: `masked` is what may be shown of one, and the settings' own `repr`
shows no more.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from tinsmith.engine.embedded.embedded_settings import Device, Dtype, EmbeddedSettings
from tinsmith.engine.files.sources import DEFAULT_MODEL
from tinsmith.engine.fleet.replica_settings import ReplicaSettings, read_replica
from tinsmith.engine.registry import ModelSource, read_models
from tinsmith.errors import ValidationError
from tinsmith.service.ledger.records import Retention
from tinsmith.service.ledger.scheduler_lease import LEASE_S
from tinsmith.service.run.options import BY_NAME, HOME_VARIABLE

Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e10)]
Waited: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]
"""A time that something is waited for, in seconds."""
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**62)]


def fitted(value: Any, declared: Any, where: str, *, is_text: bool = False) -> Any:
    """The value as a setting wants it; text is taken for the number that it spells if asked.

    Raises:
        ValidationError: It does not fit. The value is not shown: it may be a secret.
    """
    try:
        value = msgspec.convert(value, declared, strict=not is_text, dec_hook=_path_hook)
    except (msgspec.ValidationError, UnicodeError) as exc:
        raise ValidationError(f"{where}: {exc}") from exc
    if isinstance(value, float) and not math.isfinite(value):
        raise ValidationError(f"{where}: {value} is not a finite number")
    return value


def _path_hook(declared: type, value: Any) -> Any:
    if declared is not Path or not isinstance(value, str | Path) or not str(value):
        raise msgspec.ValidationError("Expected a path")
    if "\0" in str(value):
        raise msgspec.ValidationError("a path must not contain NUL")
    return _absolute(value)


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def default_data(environment: Mapping[str, str]) -> Path:
    """The data folder where none is set: `TINSMITH_HOME`, else `~/.tinsmith`."""
    return _absolute(environment.get(HOME_VARIABLE) or "~/.tinsmith")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that belong together. Each checks its values when it is made."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            value = fitted(getattr(self, field.name), field.type, field.name)
            force_setattr(self, field.name, value)


class TlsSettings(Section, frozen=True, kw_only=True):
    """The service's own certificate. Both files, or neither: then it speaks plain HTTP."""

    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.cert is None) != (self.key is None):
            missing = "tls.cert" if self.cert is None else "tls.key"
            raise ValidationError(f"{missing} is missing; TLS needs a certificate and its key")


class Limits(Section, frozen=True, kw_only=True):
    """Bounds that are checked before work is done. Those of a tenant may be lowered by a quota."""

    body_bytes: Count = 64 * 1024 * 1024
    """As it is sent."""
    decoded_bytes: Count = 256 * 1024 * 1024
    """Once it is unpacked, and again once it is read."""
    bodies_bytes: Count = 1024 * 1024 * 1024
    """Of all bodies that are being read, as far as they were received; small ones do not count."""
    tenant_bodies_bytes: Count = 512 * 1024 * 1024
    """The same of one tenant."""
    address_bodies_bytes: Count = 768 * 1024 * 1024
    """The same of one address. Behind a proxy it is that of all tenants."""
    upload_bytes_per_s: Annotated[int, Meta(ge=0, le=2**62)] = 1024
    """A body that arrives more slowly is answered 408. 0: it may pause for the window."""
    upload_window_s: Waited = 30.0
    """Over which that rate is measured."""
    connections: Count = 10_000
    """Fewer where the system allows fewer descriptors."""
    unauthenticated_connections: Count = 2048
    """Those that have not shown a valid key; where there are more, the longest idle is closed."""
    address_connections: Count = 1024
    """The same of one address."""
    prompt_tokens: Count = 131_072
    batch_tokens: Count = 65_536
    in_flight: Count = 20_000
    """Of one tenant; beyond it a submission is answered with 429."""
    sessions: Count = 1024
    """Of one tenant."""
    models: Count = 256
    """Of one tenant."""
    adapters: Count = 64
    """That the engine holds at a time, of all tenants; models beyond it wait to be made."""
    rank: Count = 256
    import_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 2 * 1024**3
    """Of an adapter that is sent; it is held in memory for a moment. 0: none is taken."""


class SnapshotSettings(Section, frozen=True, kw_only=True):
    """When a model's state is written behind the work, so that a restart replays little."""

    every_commands: Count = 2000
    every_s: Waited = 30.0
    """Of the engine's time that the commands took, so that a replay takes no longer."""


class LogSettings(Section, frozen=True, kw_only=True):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class ServiceSettings(Section, frozen=True, kw_only=True):
    """Everything that `tinsmith serve` can be told. Checked when made; `repr` shows no password."""

    role: Literal["all", "api", "scheduler"] = "all"
    """Which parts this server runs: the API, the scheduler, or both."""
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:_-]{1,253}\Z")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    unix_socket: Path | None = None
    """Instead of a host and a port."""
    public_url: Annotated[str, Meta(pattern=r"^http(s|\+unix)?://[^\s/?#@]+[^\s?#]*\Z")] | None = (
        None
    )
    """Where clients find the service, if a proxy stands before it."""
    data: Path = msgspec.field(default_factory=lambda: default_data(os.environ))
    database: str = ""
    """As `ledger.registry.open_ledger` takes it; empty becomes a folder in the data folder."""
    accept_loss: bool = False
    """Whether to go on from a ledger that has lost commits; for one start."""
    checkpoints: str = ""
    """A folder or an fsspec URL; empty becomes a folder in the data folder."""
    engine: Literal["embedded", "fake"] = "embedded"
    engine_process: bool | None = None
    """Whether the engine has a process of its own; None: the embedded one has, the fake has not."""
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    """0 for as many as there are free cores."""
    models: tuple[str, ...] = ()
    """`NAME=PATH_OR_ID`, or `NAME` alone where they are the same; `served_models` takes them
    apart. The embedded engine has a default; the fake one needs at least one to be served."""
    replicas: tuple[str, ...] = ()
    """As `engine.fleet.replica_settings.read_replica` takes them; none for an engine that is not
    divided."""
    tls: TlsSettings = TlsSettings()
    limits: Limits = Limits()
    long_poll_s: Waited = 30.0
    session_timeout_s: Waited = 300.0
    gap_wait_s: Seconds = 60.0
    engine_silence_s: Seconds = 1800.0
    """Of one call; beyond it `/readyz` and the log say so. 0: never."""
    store_wait_s: Seconds = 300.0
    """An object store that restarts is back by then."""
    direct_downloads: bool = True
    """Off: files pass through the service, for clients that cannot reach the store."""
    drain_s: Seconds = 30.0
    lease_s: Annotated[float, Meta(ge=1, le=1e6)] = LEASE_S
    """On a PostgreSQL ledger: as long after a crash may the next server have to wait."""
    snapshots: SnapshotSettings = SnapshotSettings()
    retention: Retention = Retention()
    log: LogSettings = LogSettings()
    metrics: bool = True
    otel_endpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.database:
            force_setattr(self, "database", f"sqlite://{quote(str(self.data / 'ledger'))}")
        if not self.checkpoints:
            force_setattr(self, "checkpoints", str(self.data / "checkpoints"))
        _check_database(self.database)
        _check_role(self.role, self.database, self.checkpoints)
        _check_endpoint(self.otel_endpoint)
        for name, value in msgspec.structs.asdict(self.retention).items():
            fitted(value, Seconds, f"retention.{name}")
        _ = self.served_models, self.fleet  # each raises where one is wrong

    @property
    def served_models(self) -> list[ModelSource]:
        """Each name with what it stands for, in the order given; the default where none is."""
        is_default = not self.models and self.engine == "embedded"
        return read_models((DEFAULT_MODEL,) if is_default else self.models)

    @property
    def fleet(self) -> list[ReplicaSettings]:
        """The replicas of the engine, as far as the settings know them."""
        return [read_replica(one) for one in self.replicas]

    @property
    def has_engine_process(self) -> bool:
        """Whether the engine has a process of its own."""
        is_set = self.engine_process
        return self.engine == "embedded" if is_set is None else is_set

    @property
    def embedded(self) -> EmbeddedSettings:
        """How the embedded engine computes."""
        return EmbeddedSettings(
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            batch_tokens=self.limits.batch_tokens,
            most_adapters=self.limits.adapters,
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.unix_socket is not None or self.host in ("localhost", "::1"):
            return True
        return re.fullmatch(r"127(\.\d{1,3}){3}", self.host) is not None

    def __repr__(self) -> str:
        pairs = (f"{name}={value!r}" for name, value in flat_settings(self, is_masked=True).items())
        return f"ServiceSettings({', '.join(pairs)})"

    def __rich_repr__(self) -> Any:
        """What the library rich shows, in tracebacks too."""
        return list(flat_settings(self, is_masked=True).items())


# Showing


def flat_settings(settings: ServiceSettings, *, is_masked: bool) -> dict[str, Any]:
    """Every setting by its dotted name, as text, numbers and lists; None where it is not set."""
    flat: dict[str, Any] = {}
    for name, option in BY_NAME.items():
        section, _, last = name.rpartition(".")
        value = getattr(getattr(settings, section) if section else settings, last)
        if isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif is_masked and option.is_address and value is not None:
            value = masked(value)
        flat[name] = value
    return flat


def masked(address: str) -> str:
    """An address without its password, and without the values of its query."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "***"
    if not parts.scheme:  # a folder
        return address
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        user = f"{user.partition(':')[0]}:***"
    elif user and not parts.scheme.startswith("postgres"):
        user = "***"  # elsewhere a lone name is often a token
    pairs = (pair.partition("=") for pair in parts.query.split("&") if pair)
    query = "&".join(f"{name}=***" if equals else "***" for name, equals, _ in pairs)
    fragment = "#***" if parts.fragment else ""
    slashes = "//" if address.partition(":")[2].startswith("//") else ""
    # Without slashes, or with a stray one, a name and a password are read as a path.
    path = "***" if "@" in parts.path else parts.path
    rest = f"{path}{'?' if query else ''}{query}{fragment}"
    return f"{parts.scheme}:{slashes}{user}{at}{host}{rest}"


# Checking


def _check_database(address: str) -> None:
    try:
        scheme = urlsplit(address).scheme
    except ValueError:
        scheme = ""
    if scheme not in ("memory", "sqlite", "postgres", "postgresql"):
        # Only its scheme is shown: the rest may hold a password.
        raise ValidationError(
            f"database: {scheme or 'no scheme'!r} is not a supported scheme",
            remedy="use memory:, sqlite:///path/to/folder or postgresql://user@host/database",
        )


def _check_role(role: str, database: str, checkpoints: str) -> None:
    """Refuse a server that others could not work with: its data would be its own."""
    if role == "all":
        return
    scheme = urlsplit(database).scheme
    if scheme not in ("postgres", "postgresql"):
        raise ValidationError(
            f"--role {role} needs a database that all servers share, and {scheme}: is one "
            "process's own",
            remedy="give every server the same --database postgresql://user@host/database, or "
            "run one server with --role all",
        )
    if "://" not in checkpoints:
        raise ValidationError(
            f"--role {role} needs a checkpoint store that all servers share, and {checkpoints} is "
            "a folder of this machine",
            remedy="give every server the same --checkpoints s3://bucket/folder, or "
            "file:///folder if all of them mount that folder",
        )


def _check_endpoint(address: str | None) -> None:
    if address is None:
        return
    try:
        parts = urlsplit(address)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise ValidationError("otel_endpoint is not an http or https address")
