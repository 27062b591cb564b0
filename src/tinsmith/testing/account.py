"""What a client sees of its account: the flags that the service announces, and its tokens.

The service's own answers are replaced by the flags that the test gave, so that it can pose as a
hosted service that has never heard of extensions. Tokens are the service's own as well, under
another name and with a lifetime that the test chooses.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from tinsmith.testing.received import ReceivedRequest
from tinsmith.types.service import AuthTokenResponse
from tinsmith.wire import json_format
from tinsmith.wire.content import is_packed
from tinsmith.wire.exchange import HttpReply, to_reply

EXTENSIONS = {
    "asample_many": "tinsmith_batch_items",
    "retrieve_results": "tinsmith_inline_bytes",
    "fetch_results": "tinsmith_inline_bytes",
    "asample_stream": "tinsmith_stream",
}
"""Routes that a service has only if it announces their flag."""
_REVOKED = "tml-revoked"


class Account:
    """Flags and tokens of one service; tests may change `flags` and `dynamic_flags`."""

    def __init__(
        self, flags: dict[str, Any], dynamic_flags: dict[str, Any], token_lifetime_s: float
    ) -> None:
        self.flags = flags
        self.dynamic_flags = dynamic_flags
        self._token_lifetime_s = token_lifetime_s
        self._tokens: dict[str, tuple[str, float]] = {}
        """The service's own token for each that was given out, and when it expires."""

    def revoke_tokens(self) -> None:
        """Accept none of the tokens that were given out; clients are not told."""
        self._tokens = {token: (own, 0.0) for token, (own, _) in self._tokens.items()}

    def credential(self, given: str) -> str:
        """The credential as the service knows it."""
        own, expires_at = self._tokens.get(given, (given, float("inf")))
        return own if time.time() < expires_at else _REVOKED

    def refusal(self, received: ReceivedRequest) -> HttpReply | None:
        """How a service without the extension answers; None if it was announced."""
        flag = EXTENSIONS.get(received.endpoint or "")
        if flag is not None and not self.flags.get(flag):
            return json_reply({"detail": f"there is no {received.method} {received.path}"}, 404)
        is_packed_body = is_packed(received.headers.get("content-type"))
        if is_packed_body and not self.flags.get("tinsmith_packed_prompts"):
            return json_reply({"detail": "this service does not accept packed bodies"}, 415)
        return None

    def posed(self, received: ReceivedRequest, reply: HttpReply) -> HttpReply:
        """A reply of the service as this account sees it."""
        if reply.status != 200:
            return reply
        if received.endpoint == "client_config":
            return json_reply(self.flags)
        if received.endpoint == "client_dynamic_config":
            return json_reply(self.dynamic_flags)
        if received.endpoint == "auth_token":
            return self._token_reply(b"".join(reply.parts))
        return reply

    def _token_reply(self, body: bytes) -> HttpReply:
        own = json_format.decode(body, AuthTokenResponse).jwt
        header, claims, _ = own.split(".")
        expires_at = time.time() + self._token_lifetime_s
        told = msgspec.json.decode(base64.urlsafe_b64decode(claims + "=="))
        told |= {"exp": int(expires_at), "jti": len(self._tokens)}
        text = base64.urlsafe_b64encode(msgspec.json.encode(told)).rstrip(b"=").decode()
        token = f"{header}.{text}.unsigned"
        self._tokens[token] = own, expires_at
        return to_reply(AuthTokenResponse(jwt=token))


def json_reply(plain: dict[str, Any], status: int = 200) -> HttpReply:
    """A reply with plain fields."""
    return HttpReply(status, {"Content-Type": "application/json"}, [json_format.encode(plain)])
