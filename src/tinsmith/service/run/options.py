"""Every setting of the service by name, as people meet it: flag, variable, key of a file.

`service_settings.py` has the types, defaults and bounds; a test keeps the two consistent. This
table is a module of its own so that `tinsmith serve --help` loads no library.

`limits.body_bytes` is the flag `--limits-body-bytes`, the variable
`TINSMITH_SERVE_LIMITS_BODY_BYTES`, and in a file `body_bytes` below `[limits]`.
"""

from __future__ import annotations

ENVIRONMENT_PREFIX = "TINSMITH_SERVE_"
CONFIG_VARIABLE = "TINSMITH_SERVE_CONFIG"
"""Names the file, where no `--config` does."""
HOME_VARIABLE = "TINSMITH_HOME"
"""The data folder of everything that tinsmith keeps, unless the service is given its own."""


class Option:
    """One setting, in words.

    Args:
        name: Dotted, where it is in a section.
        value: What stands for its value in the help; empty for something that is on or off.
        default: The default as it is written in a file, or in words.
        help_: What it does, without its default.
        choices: The only values, where there are few.
        is_list: Whether the flag may be repeated, and the variable holds a list.
        separator: What is between the parts of that list.
        is_address: Whether it may hold a password, and is masked when shown.
    """

    __slots__ = (
        "choices",
        "default",
        "help",
        "is_address",
        "is_list",
        "name",
        "separator",
        "value",
    )

    def __init__(
        self,
        name: str,
        value: str,
        default: str,
        help_: str,
        *,
        choices: tuple[str, ...] = (),
        is_list: bool = False,
        is_address: bool = False,
        separator: str = ",",
    ) -> None:
        self.name = name
        self.value = value
        self.default = default
        self.help = help_
        self.choices = choices
        self.is_list = is_list
        self.is_address = is_address
        self.separator = separator

    @property
    def flag(self) -> str:
        """How it is given on the command line; a list one at a time, so in the singular."""
        words = self.name.replace(".", "-").replace("_", "-")
        return f"--{words[:-1] if self.is_list else words}"

    @property
    def variable(self) -> str:
        """How it is given in the environment."""
        return ENVIRONMENT_PREFIX + self.name.replace(".", "_").upper()


ROLES = ("all", "api", "scheduler")
ENGINES = ("embedded", "fake")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

OPTIONS = (
    Option(
        "role",
        "NAME",
        '"all"',
        "what this server does: api answers requests, scheduler runs commands or stands by;"
        " both need PostgreSQL and a checkpoint store that all servers share",
        choices=ROLES,
    ),
    Option(
        "host",
        "NAME",
        '"127.0.0.1"',
        "the address to listen on; other than loopback requires an API key",
    ),
    Option("port", "PORT", "8000", "the port to listen on; 0 lets the system choose"),
    Option(
        "unix_socket", "FILE", "not set", "listen on this Unix socket instead of a host and port"
    ),
    Option(
        "public_url",
        "URL",
        "not set",
        "the URL under which clients reach the service through a proxy; used in download URLs",
    ),
    Option(
        "data",
        "DIR",
        "TINSMITH_HOME, or ~/.tinsmith",
        "the data folder: ledger, checkpoints, models",
    ),
    Option(
        "database",
        "ADDRESS",
        "ledger/ in the data folder",
        "the ledger: sqlite:///folder, postgresql://user@host/name, or memory:",
        is_address=True,
    ),
    Option(
        "accept_loss",
        "",
        "false",
        "start even if the ledger has lost commits, and log what was lost; use it for one start",
    ),
    Option(
        "checkpoints",
        "ADDRESS",
        "checkpoints/ in the data folder",
        "the checkpoint store: a folder, or a URL such as s3://bucket/folder",
        is_address=True,
    ),
    Option(
        "engine",
        "NAME",
        '"embedded"',
        "the engine: real models (embedded), or arithmetic for tests (fake)",
        choices=ENGINES,
    ),
    Option(
        "engine_process",
        "",
        "not set",
        "run the engine in a separate process (if not set: only the embedded engine)",
    ),
    Option(
        "dtype",
        "TYPE",
        '"auto"',
        "data type of the base model; auto: bfloat16 if the device is fast at it, else float32",
        choices=DTYPES,
    ),
    Option(
        "device",
        "NAME",
        '"auto"',
        "where the engine computes; auto: on a GPU if there is one",
        choices=DEVICES,
    ),
    Option(
        "threads",
        "N",
        "0",
        "CPU threads for training, and as many for sampling; 0: half of the free cores",
    ),
    Option(
        "replicas",
        "KEY=VALUE,...",
        "[]",
        "run replicas of the engine, each in a process of its own: count, name, duty"
        " (train, sample or both), device (cpu, cuda:0; cuda:* for one per GPU), threads, model;"
        " none: one process",
        is_list=True,
        separator=";",
    ),
    Option(
        "models",
        "NAME=PATH_OR_ID",
        "[]",
        "a model to serve, under the name that clients use; further names for the same path are"
        " aliases; without any: SmolLM2-135M-Instruct",
        is_list=True,
    ),
    Option("tls.cert", "FILE", "not set", "PEM file with the certificate and its chain"),
    Option("tls.key", "FILE", "not set", "PEM file with the private key of the certificate"),
    Option("limits.body_bytes", "N", "67108864", "maximum size of a request body, as sent"),
    Option(
        "limits.decoded_bytes",
        "N",
        "268435456",
        "maximum size of a request body after decompression and decoding",
    ),
    Option(
        "limits.bodies_bytes",
        "N",
        "1073741824",
        "maximum memory for all request bodies being read or processed",
    ),
    Option("limits.tenant_bodies_bytes", "N", "536870912", "the same for the bodies of one tenant"),
    Option(
        "limits.address_bodies_bytes", "N", "805306368", "the same for the bodies of one address"
    ),
    Option(
        "limits.upload_bytes_per_s",
        "N",
        "1024",
        "minimum upload rate; a slower upload is refused with 408",
    ),
    Option(
        "limits.upload_window_s",
        "SECONDS",
        "30.0",
        "the period over which the upload rate is measured",
    ),
    Option(
        "limits.connections",
        "N",
        "10000",
        "maximum number of open connections; lower if `ulimit -n` allows fewer",
    ),
    Option(
        "limits.unauthenticated_connections",
        "N",
        "2048",
        "maximum number of connections without a valid key; above it, the longest idle is closed",
    ),
    Option(
        "limits.address_connections", "N", "1024", "the same for the connections of one address"
    ),
    Option(
        "limits.prompt_tokens", "N", "131072", "maximum length of a prompt or training sequence"
    ),
    Option("limits.batch_tokens", "N", "65536", "maximum number of tokens in a training batch"),
    Option("limits.in_flight", "N", "20000", "maximum number of unsettled commands per tenant"),
    Option("limits.sessions", "N", "1024", "maximum number of open sessions per tenant"),
    Option("limits.models", "N", "256", "maximum number of models in training per tenant"),
    Option(
        "limits.adapters",
        "N",
        "64",
        "maximum number of models loaded in the engine; further models wait",
    ),
    Option("limits.rank", "N", "256", "maximum LoRA rank"),
    Option(
        "limits.import_bytes",
        "N",
        "2147483648",
        "maximum size of an uploaded adapter; 0: no uploads",
    ),
    Option(
        "long_poll_s", "SECONDS", "30.0", "how long a poll waits for a result before it is answered"
    ),
    Option(
        "session_timeout_s",
        "SECONDS",
        "300.0",
        "a session ends after this time without a heartbeat",
    ),
    Option(
        "gap_wait_s",
        "SECONDS",
        "60.0",
        "how long commands wait for a missing sequence number before them",
    ),
    Option(
        "engine_silence_s",
        "SECONDS",
        "1800.0",
        "how long a call to the engine may take before it is reported as a problem, or its replica"
        " is killed; 0: no limit",
    ),
    Option(
        "store_wait_s",
        "SECONDS",
        "300.0",
        "how long saves and loads wait for a checkpoint store that is unavailable",
    ),
    Option(
        "direct_downloads",
        "",
        "true",
        "redirect downloads of exported files and archives to signed URLs of an S3 store",
    ),
    Option(
        "drain_s",
        "SECONDS",
        "30.0",
        "how long a shutdown waits for running work before it writes snapshots",
    ),
    Option(
        "lease_s",
        "SECONDS",
        "4.0",
        "how long the scheduler's lease on a PostgreSQL ledger lasts unless it is renewed; a"
        " standby takes over so long after a crash",
    ),
    Option(
        "snapshots.every_commands",
        "N",
        "2000",
        "write a snapshot of a model after this many commands",
    ),
    Option("snapshots.every_s", "SECONDS", "30.0", "or after this much engine time"),
    Option(
        "retention.result_s",
        "SECONDS",
        "86400.0",
        "how long results are kept if nobody fetches them",
    ),
    Option(
        "retention.command_s",
        "SECONDS",
        "172800.0",
        "how long settled commands are kept, for late retries",
    ),
    Option(
        "retention.session_s",
        "SECONDS",
        "7776000.0",
        "how long ended sessions are kept in listings",
    ),
    Option("retention.audit_s", "SECONDS", "34560000.0", "how long the audit log is kept"),
    Option("retention.usage_s", "SECONDS", "34560000.0", "how long recorded usage is kept"),
    Option(
        "log.level",
        "LEVEL",
        '"info"',
        "minimum level of the log lines to write",
        choices=LOG_LEVELS,
    ),
    Option("log.format", "FORMAT", '"text"', "format of log lines", choices=LOG_FORMATS),
    Option("metrics", "", "true", "serve Prometheus metrics at /metrics"),
    Option(
        "otel_endpoint",
        "URL",
        "not set",
        "send OpenTelemetry spans to this URL, with OTLP over HTTP",
        is_address=True,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
