"""What is wrong with a store at a URL, in words, and which setting mends it.

fsspec's file systems raise errors of their own, of the libraries below them, and of the operating
system, also for what another machine has said. They are told apart by name, so that none of these
libraries has to be loaded. No message has a credential in it.
"""

from __future__ import annotations

import errno
import os
from urllib.parse import urlsplit

from tinsmith.checkpoints.disk import disk_error
from tinsmith.errors import CheckpointUnavailableError

_UNREACHABLE = frozenset(
    {
        "ConnectionError",  # Python's own, and botocore's
        "ConnectionClosedError",
        "ConnectTimeoutError",
        "EndpointConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "ReadTimeoutError",
        "TimeoutError",
    }
)
_WITHOUT_CREDENTIALS = frozenset(
    {"CredentialRetrievalError", "NoCredentialsError", "PartialCredentialsError"}
)
_SAID_BY_OTHERS = frozenset({None, errno.EBUSY, errno.EINVAL, errno.EREMCHG, errno.EREMOTEIO})
"""Numbers that s3fs gives to errors of the other side; most have none."""
_SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what your store asks for, to credentials "
    "that may read and write there"
)


def unavailable(what: str, error: Exception) -> CheckpointUnavailableError:
    """The error of ours that stands for one of a file system of fsspec; `what` was being done."""
    names = {cls.__name__ for cls in type(error).__mro__}
    told = f"{what}: {type(error).__name__}: {str(error) or 'no answer in time'}"
    if names & _UNREACHABLE:
        return CheckpointUnavailableError(
            told, reason="its endpoint cannot be reached", remedy=_reach()
        )
    if names & _WITHOUT_CREDENTIALS:
        return CheckpointUnavailableError(
            told, reason="it has no credentials", remedy=_SET_CREDENTIALS, is_lasting=True
        )
    if isinstance(error, OSError) and error.errno not in _SAID_BY_OTHERS:
        return disk_error(what, error)  # of the local folder beside the URL
    if isinstance(error, PermissionError):
        return CheckpointUnavailableError(
            told, reason="its credentials are refused", remedy=_SET_CREDENTIALS, is_lasting=True
        )
    if isinstance(error, FileNotFoundError):
        return CheckpointUnavailableError(
            told,
            reason="its bucket or folder does not exist",
            remedy="make it, or name another one with --checkpoints",
            is_lasting=True,
        )
    return CheckpointUnavailableError(
        told,
        reason="it answers with an error",
        remedy="see that the service behind the URL answers and takes our credentials",
    )


def _reach() -> str:
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not given:
        return "see that the network and the service behind the URL of --checkpoints are up"
    try:
        parts = urlsplit(given)
        place = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        place = "not a URL"
    return f"see that the endpoint is up, and that AWS_ENDPOINT_URL ({place}) is its address"
