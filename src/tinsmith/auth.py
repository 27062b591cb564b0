"""Whether there is a credential, and whether it works.

The same three functions as in `tinker.auth`. The first two look around on this machine alone; the
third asks the service.
"""

from __future__ import annotations

import os

from tinsmith.client.auth import address_of_login, static_key, stored_login
from tinsmith.client.retry import NO_RETRIES
from tinsmith.client.service import ServiceClient
from tinsmith.client.settings import settings_from
from tinsmith.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]

PATIENCE_S = 60.0
"""How long the service may take to answer; the credential command has that long too."""


def get_tinker_token() -> str | None:
    """The key in `TINKER_API_KEY`, else the stored default; None if there is none.

    The credential command is not run.
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
    """Whether a client would find a credential here.

    A credential command counts, and is not run.
    """
    try:
        settings = settings_from(base_url=address_of_login(os.environ))
        return static_key(settings) is not None or settings.credential_command is not None
    except (OSError, ValueError, TinkerError):
        return False


def raise_if_tinker_not_accessible() -> None:
    """Make one call with the credential that is found here, and wait for it.

    Nothing is tried again: whatever is wrong is told at once.

    Raises:
        TinkerError: There is no credential, or something else is wrong on this side.
        AuthenticationError: The service does not accept it.
        BillingError: The account is not set up to pay.
        APIConnectionError: The service was not reached.
    """
    try:
        # An address is named, so that no service is started here for want of a credential.
        url = settings_from(base_url=address_of_login(os.environ)).base_url
        with ServiceClient(base_url=url, retry=NO_RETRIES) as client:
            client.get_server_capabilities(timeout=PATIENCE_S)
    except TinkerError:
        raise
    except Exception as exc:
        raise TinkerError(f"the service cannot be used: {exc}") from exc
