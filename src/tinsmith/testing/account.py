"""The service as an account sees it: start-up, credentials, usage and the audit log.

`Audit` and `Usage` are told by other parts what was done and what it took. Credentials are checked
by `service.py` with `Account.accepts`.
"""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.testing.downloads import Downloads
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.events import TelemetryResponse
from tinsmith.types.requests import GetAuditLogRequest, GetBillingUsageRequest
from tinsmith.types.service import (
    ApiKeyOwner,
    ApiKeyResponse,
    AuthTokenResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    OrganisationDetails,
    SupportedModel,
    UserDetails,
)
from tinsmith.types.usage import (
    AuditLogEntry,
    AuditLogResponse,
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
)
from tinsmith.wire import json_format
from tinsmith.wire.exchange import HttpReply

CONTEXT_LENGTH = 32768
EMAIL = "test-user@example.com"
OPEN_ENDPOINTS = frozenset({"healthz"})
"""What is answered without a credential."""


def now() -> datetime.datetime:
    """The time, with its offset from UTC, as all times in answers have it."""
    return datetime.datetime.now(datetime.UTC)


def metadata_as_text(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata as listings show it: values of other kinds are written as JSON."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


class Audit:
    """What was done, in order."""

    def __init__(self) -> None:
        self._entries: list[AuditLogEntry] = []

    def add(self, event: str, details: dict[str, Any], *, tinker_path: str | None = None) -> None:
        """Note something; `event` begins with what it happened to, such as `checkpoint.`."""
        self._entries.append(
            AuditLogEntry(
                timestamp=now(), event=event, event_details=details, tinker_path=tinker_path
            )
        )

    def of_kind(self, request: GetAuditLogRequest) -> AuditLogResponse:
        """What was done to one kind of thing, and on one day if given."""
        kind = request.event_type.removesuffix("s")
        entries = [
            entry
            for entry in self._entries
            if (kind == "all" or entry.event.startswith(f"{kind}."))
            and request.day in (None, entry.timestamp.date())
        ]
        return AuditLogResponse(entries=entries)


class AuditLog:
    """Answers with what `Audit` was told, at once or by way of a file."""

    def __init__(self, settings: ServiceSettings, audit: Audit, downloads: Downloads) -> None:
        self._settings = settings
        self._audit = audit
        self._downloads = downloads

    def show(self, received: ReceivedRequest) -> AuditLogResponse | HttpReply:
        """`get_audit_log`."""
        log = self._audit.of_kind(received.request)
        if not self._settings.audit_redirects:
            return log
        url = self._downloads.put("audit.json", json_format.encode(log))
        return HttpReply(302, {"Location": url}, [])


class Usage:
    """What was used, by session."""

    def __init__(self) -> None:
        self._events: list[BillingUsageEvent] = []

    def add(self, session_id: str, base_model: str, info: BillingEventInfo) -> None:
        """Note what one request took."""
        hour = now().replace(minute=0, second=0, microsecond=0)
        self._events.append(
            BillingUsageEvent(
                bucket_start=hour,
                bucket_end=hour + datetime.timedelta(hours=1),
                base_model=base_model,
                user_id="test-user",
                session_id=session_id,
                event_info=info,
            )
        )

    def show(self, received: ReceivedRequest) -> BillingUsageResponse:
        """`get_billing_usage`: one event for each request, within the time asked for."""
        request: GetBillingUsageRequest = received.request
        events = [
            event
            for event in self._events
            if request.starting_on <= event.bucket_start < request.ending_before
        ]
        sessions = {str(event.session_id): BillingUsageSession() for event in events}
        return BillingUsageResponse(data=events, sessions=sessions, cost_data_through=now())


class Account:
    """Start-up calls and credentials."""

    def __init__(
        self, settings: ServiceSettings, flags: dict[str, Any], dynamic_flags: dict[str, Any]
    ) -> None:
        self._settings = settings
        self.flags = flags
        self.dynamic_flags = dynamic_flags
        self._tokens: dict[str, float] = {}

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "client_config": lambda _: _json_reply(self.flags),
            "client_dynamic_config": lambda _: _json_reply(self.dynamic_flags),
            "auth_token": self.exchange_token,
            "healthz": lambda _: HealthResponse(status="ok"),
            "get_server_capabilities": self.capabilities,
            "get_api_key": self.show_key,
            "delete_api_key": lambda _: None,
            "telemetry": lambda _: TelemetryResponse(status="accepted"),
        }

    def accepts(self, credential: str | None) -> bool:
        """Whether a request with this credential is answered."""
        if credential in (self._settings.api_key, *self._settings.further_api_keys):
            return True
        return self._tokens.get(credential or "", 0.0) > time.time()

    def revoke_tokens(self) -> None:
        """Accept none of the tokens that were given out; clients are not told."""
        self._tokens = dict.fromkeys(self._tokens, 0.0)

    def exchange_token(self, received: ReceivedRequest) -> AuthTokenResponse:  # noqa: ARG002
        """A token that clients can read; it is not signed."""
        expires_at = time.time() + self._settings.token_lifetime_s
        claims = {
            "iss": "passport-test",
            "sub": "test-user",
            "org_id": "test-org",
            "email": EMAIL,
            "exp": int(expires_at),
            "jti": len(self._tokens),
        }
        parts = [_base64url({"alg": "none", "typ": "JWT"}), _base64url(claims), "unsigned"]
        token = ".".join(parts)
        self._tokens[token] = expires_at
        return AuthTokenResponse(jwt=token)

    def capabilities(self, received: ReceivedRequest) -> GetServerCapabilitiesResponse:  # noqa: ARG002
        """The base models that the settings name."""
        return GetServerCapabilitiesResponse(
            supported_models=[
                SupportedModel(
                    model_name=name,
                    max_context_length=CONTEXT_LENGTH,
                    trainable=True,
                    sampleable=True,
                )
                for name in self._settings.base_models
            ]
        )

    def show_key(self, received: ReceivedRequest) -> ApiKeyResponse:  # noqa: ARG002
        """Whose key it is."""
        owner = ApiKeyOwner(
            org_details=OrganisationDetails(name="Test organisation"),
            user_details=UserDetails(email=EMAIL),
        )
        return ApiKeyResponse(key_id=1, name="test key", note="", details=owner)


def _json_reply(plain: dict[str, Any]) -> HttpReply:
    return HttpReply(200, {"Content-Type": "application/json"}, [json_format.encode(plain)])


def _base64url(claims: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(claims)).rstrip(b"=").decode()
