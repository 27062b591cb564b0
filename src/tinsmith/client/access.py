"""Whether the service can be used from here: what `tinker.auth` has, under the same names."""

from __future__ import annotations

from tinsmith.client.auth import static_key
from tinsmith.client.retry import NO_RETRIES
from tinsmith.client.service import ServiceClient
from tinsmith.client.settings import settings_from
from tinsmith.errors import TinkerError


def get_tinker_token() -> str | None:
    """The key from the environment, or the stored default; None if there is none.

    A credential command is not run.
    """
    try:
        key = static_key(settings_from())
    except (OSError, TinkerError, ValueError):
        return None
    return None if key is None else key.reveal()


def tinker_has_credentials() -> bool:
    """Whether there is a key, or a command that would give one. Nothing is sent."""
    if get_tinker_token() is not None:
        return True
    return settings_from().credential_command is not None


def raise_if_tinker_not_accessible() -> None:
    """Ask the service what it offers, once; blocks.

    Raises:
        TinkerError: There is no credential, the service cannot be reached, or it refuses.
    """
    try:
        with ServiceClient(retry=NO_RETRIES) as client:
            client.get_server_capabilities()
    except TinkerError:
        raise
    except Exception as exc:
        raise TinkerError(f"the service cannot be used: {exc}") from exc
