"""Every setting of the service by name, as people meet it: flag, variable, key of a file.

`settings.py` has the types, defaults and bounds; a test holds the two together. This table is apart
from it so that `tinsmith serve --help` loads no library.

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
        is_list: Whether the flag may be repeated, and the variable holds a list with commas.
        is_address: Whether it may hold a password, and is masked when shown.
    """

    __slots__ = ("choices", "default", "help", "is_address", "is_list", "name", "value")

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
    ) -> None:
        self.name = name
        self.value = value
        self.default = default
        self.help = help_
        self.choices = choices
        self.is_list = is_list
        self.is_address = is_address

    @property
    def flag(self) -> str:
        """How it is given on the command line; a list one at a time, so in the singular."""
        words = self.name.replace(".", "-").replace("_", "-")
        return f"--{words[:-1] if self.is_list else words}"

    @property
    def variable(self) -> str:
        """How it is given in the environment."""
        return ENVIRONMENT_PREFIX + self.name.replace(".", "_").upper()


ENGINES = ("embedded", "fake")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

OPTIONS = (
    Option(
        "host", "NAME", '"127.0.0.1"', "the address to listen on; one that others reach needs a key"
    ),
    Option("port", "PORT", "8000", "the port to listen on; 0 lets the system choose"),
    Option(
        "unix_socket", "FILE", "not set", "listen on this Unix socket, instead of a host and a port"
    ),
    Option(
        "public_url",
        "URL",
        "not set",
        "where clients find the service, if a proxy is before it; downloads begin with it",
    ),
    Option(
        "data", "DIR", "TINSMITH_HOME, or ~/.tinsmith", "the folder for everything that is kept"
    ),
    Option(
        "database",
        "ADDRESS",
        "the folder ledger in the data folder",
        "the ledger: sqlite:///folder, postgresql://user@host/name, or memory:",
        is_address=True,
    ),
    Option(
        "accept_loss",
        "",
        "false",
        "start from a ledger that has lost commits, and log what was lost; for one start",
    ),
    Option(
        "checkpoints",
        "ADDRESS",
        "the folder checkpoints in the data folder",
        "where saved weights are: a folder, or a URL",
        is_address=True,
    ),
    Option("engine", "NAME", '"embedded"', "what computes", choices=ENGINES),
    Option(
        "engine_process",
        "",
        "not set",
        "compute in a process of its own; not set: the embedded engine does, the fake one does not",
    ),
    Option(
        "dtype",
        "TYPE",
        '"auto"',
        "the numbers that the base model is held in; auto: those that the device is fast at",
        choices=DTYPES,
    ),
    Option(
        "device",
        "NAME",
        '"auto"',
        "where it computes; auto: a GPU if there is one",
        choices=DEVICES,
    ),
    Option(
        "threads", "N", "0", "threads that train, and again that sample; 0: half of the free cores"
    ),
    Option(
        "models",
        "NAME=PATH_OR_ID",
        "[]",
        "a model to serve, by the name that clients use; several names of one path are aliases;"
        " none: SmolLM2-135M-Instruct",
        is_list=True,
    ),
    Option("tls.cert", "FILE", "not set", "the certificate, with its chain, in PEM"),
    Option("tls.key", "FILE", "not set", "the private key of the certificate, in PEM"),
    Option("limits.body_bytes", "N", "67108864", "the largest request body, as it is sent"),
    Option("limits.decoded_bytes", "N", "268435456", "the most that a body may take once unpacked"),
    Option(
        "limits.bodies_bytes",
        "N",
        "1073741824",
        "what all bodies that are being read may take together, as far as they have arrived",
    ),
    Option("limits.tenant_bodies_bytes", "N", "536870912", "... and those of one tenant"),
    Option("limits.address_bodies_bytes", "N", "805306368", "... and those of one address"),
    Option(
        "limits.upload_bytes_per_s",
        "N",
        "1024",
        "how fast a body must arrive; a slower one is answered 408",
    ),
    Option("limits.upload_window_s", "SECONDS", "30.0", "the time over which that is measured"),
    Option(
        "limits.connections",
        "N",
        "10000",
        "open connections; fewer where `ulimit -n` is low, of which a quarter is kept for files",
    ),
    Option(
        "limits.unauthenticated_connections",
        "N",
        "2048",
        "connections that have shown no valid key; beyond it the longest idle one is closed",
    ),
    Option("limits.address_connections", "N", "1024", "... and those of one address"),
    Option("limits.prompt_tokens", "N", "131072", "the longest prompt or training sequence"),
    Option("limits.batch_tokens", "N", "65536", "how many tokens the engine gets in one batch"),
    Option("limits.in_flight", "N", "20000", "commands of one tenant that are not settled"),
    Option("limits.sessions", "N", "1024", "open sessions of one tenant"),
    Option("limits.models", "N", "256", "models of one tenant that are being trained"),
    Option("limits.adapters", "N", "64", "models that the engine holds at a time; others wait"),
    Option("limits.rank", "N", "256", "the highest LoRA rank"),
    Option(
        "limits.import_bytes", "N", "2147483648", "the largest adapter that may be sent; 0: none"
    ),
    Option("long_poll_s", "SECONDS", "30.0", "how long a poll for a result is held"),
    Option(
        "session_timeout_s", "SECONDS", "300.0", "a session that is silent for so long is ended"
    ),
    Option(
        "gap_wait_s",
        "SECONDS",
        "60.0",
        "how long commands wait for a number before them that is missing",
    ),
    Option(
        "engine_silence_s",
        "SECONDS",
        "1800.0",
        "how long a call of the engine may take before it is told of as a problem; 0: any time",
    ),
    Option(
        "drain_s",
        "SECONDS",
        "30.0",
        "how long a shutdown waits for what is under way before it snapshots",
    ),
    Option(
        "lease_s",
        "SECONDS",
        "10.0",
        "how long the scheduler's lease on a PostgreSQL ledger lasts unless it is renewed",
    ),
    Option(
        "snapshots.every_commands", "N", "2000", "a model is snapshotted after so many commands"
    ),
    Option("snapshots.every_s", "SECONDS", "30.0", "... or after so much time of the engine"),
    Option(
        "retention.result_s", "SECONDS", "86400.0", "how long results are kept that nobody fetched"
    ),
    Option(
        "retention.command_s",
        "SECONDS",
        "172800.0",
        "how long settled commands are known, for late retries",
    ),
    Option("retention.session_s", "SECONDS", "7776000.0", "how long ended sessions are listed"),
    Option("retention.audit_s", "SECONDS", "34560000.0", "how long the audit log is kept"),
    Option("retention.usage_s", "SECONDS", "34560000.0", "how long recorded usage is kept"),
    Option("log.level", "LEVEL", '"info"', "what is worth a line", choices=LOG_LEVELS),
    Option("log.format", "FORMAT", '"text"', "how a line looks", choices=LOG_FORMATS),
    Option("metrics", "", "true", "answer /metrics for Prometheus"),
    Option(
        "otel_endpoint",
        "URL",
        "not set",
        "send OpenTelemetry spans there, over OTLP and HTTP",
        is_address=True,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
