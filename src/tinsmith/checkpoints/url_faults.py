"""Explains failures of a store at a URL, and names the setting that fixes them.

fsspec's file systems raise errors of their own, of the libraries below them, and of the operating
system, even for replies of another machine. They are recognised by name, so that none of these
libraries has to be loaded. No message contains a credential.
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
"""Numbers that file systems give to errors of the other side; most have none."""
_SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the variables of your store, to "
    "credentials with read and write access"
)
_NO_BUCKET = "NoSuchBucket"
_WRONG_CLOCK = "RequestTimeTooSkewed"
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "503", "TooManyRequests", "429"})


def unavailable(what: str, error: Exception, *, bucket: str) -> CheckpointUnavailableError:
    """Our error for one of fsspec's; `what` says what was being done."""
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
    code = _s3_code(error)
    if not code and isinstance(error, OSError) and error.errno not in _SAID_BY_OTHERS:
        return disk_error(what, error)  # of the local folder beside the URL
    if code == _NO_BUCKET:
        return CheckpointUnavailableError(
            told,
            reason="its bucket does not exist",
            remedy=f"create the bucket {bucket}, which tinsmith does not do, or choose another one "
            "with --checkpoints",
            is_lasting=True,
        )
    if code == _WRONG_CLOCK:
        return CheckpointUnavailableError(
            told,
            reason="its clock and that of this machine differ",
            remedy="set the clock of this machine, for example with NTP",
        )
    if code in _BUSY:
        return CheckpointUnavailableError(
            told, reason="it is overloaded", remedy="wait, or raise the limits of the store"
        )
    if isinstance(error, PermissionError):
        return CheckpointUnavailableError(
            told, reason="its credentials are refused", remedy=_SET_CREDENTIALS, is_lasting=True
        )
    if isinstance(error, FileNotFoundError) and not code:
        return CheckpointUnavailableError(
            told,
            reason="its bucket or folder does not exist",
            remedy="create it, or choose another one with --checkpoints",
            is_lasting=True,
        )
    return CheckpointUnavailableError(
        told,
        reason="it returned an error",
        remedy="check that the service behind the URL answers and accepts the credentials",
    )


def is_missing_bucket(error: BaseException) -> bool:
    """Whether S3 says that the whole bucket does not exist."""
    return _s3_code(error) == _NO_BUCKET


def _s3_code(error: BaseException) -> str:
    """The code of an error of S3; empty if the error is not one."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code") or "unknown")
    return ""


def _reach() -> str:
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not given:
        return "check the network and the service behind the URL of --checkpoints"
    try:
        parts = urlsplit(given)
        place = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        place = "not a URL"
    return f"check that the endpoint is up, and that AWS_ENDPOINT_URL ({place}) is its address"
