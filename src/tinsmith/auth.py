"""The functions of `tinker.auth`: find credentials, and check them.

The first two look on this machine only; the third calls the service.
"""

from __future__ import annotations

import os

from tinsmith.client.auth import address_of_login, static_key, stored_login
from tinsmith.client.retry import NO_RETRIES
from tinsmith.client.service import ServiceClient
from tinsmith.client.settings import settings_from
from tinsmith.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]

TIMEOUT_S = 60.0
"""The timeout of the service, and of the credential command."""


def get_tinker_token() -> str | None:
    """The API key in `TINKER_API_KEY`, else the stored default; None if there is none.

    Does not run the credential command.
    """
    try:
        settings = settings_from()
        if settings.api_key is None:
            login = stored_login()
            key = None if login is None else login.key
        else:
            key = static_key(settings)
    except (OSError, ValueError, TinkerError):
        return None
    return None if key is None else key.reveal()


def tinker_has_credentials() -> bool:
    """Whether a client would find a credential.

    A credential command counts, but is not run.
    """
    try:
        settings = settings_from(base_url=address_of_login(os.environ))
        return static_key(settings) is not None or settings.credential_command is not None
    except (OSError, ValueError, TinkerError):
        return False


def raise_if_tinker_not_accessible() -> None:
    """Check the credential with one call to the service, without retries.

    Raises:
        TinkerError: There is no credential, or another local problem.
        AuthenticationError: The service does not accept the credential.
        BillingError: The account has a billing problem.
        APIConnectionError: The service could not be reached.
    """
    try:
        # An explicit address, so that a missing credential does not start an embedded service.
        url = settings_from(base_url=address_of_login(os.environ)).base_url
        with ServiceClient(base_url=url, retry=NO_RETRIES) as client:
            client.get_server_capabilities(timeout=TIMEOUT_S)
    except TinkerError:
        raise
    except Exception as exc:
        raise TinkerError(f"cannot use the service: {exc}") from exc
