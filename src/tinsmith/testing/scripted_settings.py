"""What a test may choose about the service: its key, its patience, its limits and its flags.

`split_options` sorts the options that were given into settings of the service and flags that it
answers to `client/config` and `client/dynamic_config`.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from tinsmith.errors import UnknownFieldError
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.record import Request
from tinsmith.types.service import ClientDynamicConfigResponse


class ScriptedServiceSettings(Request):
    """How the service behaves; each is an option of `running_service`."""

    api_key: str = "tml-test"
    """The credential that is accepted, beside the tokens exchanged for it."""
    further_api_keys: list[str] = []
    """Credentials of other accounts, which see the same things."""
    path_prefix: str = ""
    """What `base_url` has after its port, such as `/services/test`."""
    port: int = 0
    """0 lets the system choose."""
    long_poll_s: float = 30.0
    """How long a poll is held before it is answered with 408."""
    gap_wait_s: float = 2.0
    """How long a model's command waits for a number before it that is missing."""
    inline_bytes: int = 1024 * 1024
    """A larger result is answered by its size alone, where the poll allows that."""
    result_lifetime_s: float | None = None
    """How long results are kept; 410 after that. None keeps them."""
    session_lifetime_s: float | None = None
    """How long a session lives without a heartbeat. None lets it live."""
    token_lifetime_s: float = 3600.0
    """How long an exchanged credential is good for."""
    base_models: list[str] = msgspec.field(
        default_factory=lambda: ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"]
    )
    """The models that it serves: `NAME`, or `NAME=PATH_OR_ID` with where its tokenizer is."""
    engine: Literal["fake", "embedded"] = "fake"
    """`embedded` runs real models from their folders, and uploaded losses; it needs PyTorch."""
    vocabulary_size: int = 200_000
    """Of the fake engine. Tokens are below this, those that are sent and those that are sampled."""
    eos_token: int = 0
    """Of the fake engine. Ends a sample that was given no stop of its own."""
    max_tokens: int = 16
    """For samples that do not say how long they may be."""
    keep_bodies: bool = False
    """Whether requests are kept with the bytes that were sent."""
    trace_polls: int = 0
    """How often a session's trace is asked for before it is ready."""
    archive_redirects: bool = False
    """Whether archives are answered with a redirect, as older services do."""
    audit_redirects: bool = False
    """Whether the audit log is answered with a redirect to a file."""
    downloads_in_parts: bool = True
    """Whether files can be asked for in parts; False gives them whole whatever was asked."""
    max_body_bytes: int = 256 * 1024 * 1024


def split_options(
    options: dict[str, Any],
) -> tuple[ScriptedServiceSettings, dict[str, Any], dict[str, Any]]:
    """Settings, flags of `client/config` and flags of `client/dynamic_config`.

    A flag that was not given is left out of the answer, so that clients use their default. The one
    exception is `use_pyqwest_transport`, which is off: with it, programs that use the official
    client may abort as they end.

    Raises:
        UnknownFieldError: An option is none of these.
    """
    kinds = (ScriptedServiceSettings, ServiceFlags, ClientDynamicConfigResponse)
    known = {name for kind in kinds for name in kind.__struct_fields__}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            raise UnknownFieldError(f"the service has no option {name!r}", remedy=hint)
    settings, flags, dynamic_flags = (
        {name: value for name, value in options.items() if name in kind.__struct_fields__}
        for kind in kinds
    )
    flags.setdefault("use_pyqwest_transport", False)
    # Made once, so that a flag of the wrong type fails here and not in a client's parser.
    msgspec.convert(flags, ServiceFlags)
    msgspec.convert(dynamic_flags, ClientDynamicConfigResponse)
    return ScriptedServiceSettings(**settings), flags, dynamic_flags
