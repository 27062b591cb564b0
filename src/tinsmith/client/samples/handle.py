"""A sampler's address, to be used in another process. It holds no credential.

The other process uses a key of its own, from its argument or its environment, and counts its
samples from a number of its own, so that two processes never use the same one.
"""

from __future__ import annotations

import base64
import binascii
import random
import re

import msgspec

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.service import ClientDynamicConfigResponse
from tinsmith.wire import json_format

NUMBERS_PER_CLONE = 1_000_000_000
_SECRET_NAME = re.compile(r"auth|key|secret|token|cookie|credential", re.IGNORECASE)


class SamplerHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process needs to know to sample from the same sampler."""

    base_url: str
    session_id: str
    sampling_session_id: str
    headers: dict[str, str] = {}
    record_stability_info: bool = False
    flags: dict[str, bool | int | str] = {}
    dynamic_flags: dict[str, bool | int | str] = {}

    def to_text(self) -> str:
        """The handle as text that fits into an address or an environment variable."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> SamplerHandle:
        """Read a handle.

        Raises:
            ValidationError: It is not one.
        """
        try:
            return json_format.decode(base64.urlsafe_b64decode(text.encode()), cls)
        except (binascii.Error, ValueError, DecodeError) as exc:
            raise ValidationError(
                "this is not a sampler handle", remedy="make one with get_sampler_handle()"
            ) from exc

    def client_flags(self) -> ServiceFlags:
        """The service's flags as the first process saw them."""
        return msgspec.convert(self.flags, ServiceFlags)

    def client_dynamic_flags(self) -> ClientDynamicConfigResponse:
        """The service's flags that may change, as the first process saw them last."""
        return msgspec.convert(self.dynamic_flags, ClientDynamicConfigResponse)


def shareable_headers(headers: dict[str, str]) -> dict[str, str]:
    """Headers that may be told to others: those whose name does not sound like a secret."""
    return {name: value for name, value in headers.items() if not _SECRET_NAME.search(name)}


def random_clone_id() -> int:
    """A number for a clone where the service gives none out; the original is 0."""
    return random.SystemRandom().randint(1, NUMBERS_PER_CLONE)
