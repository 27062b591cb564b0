"""Uploads of adapters: started, sent file by file to signed URLs, and finished.

`weight_uploads.py` does the work. The URLs need no credential, expire, and are each valid for one
file of one upload.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from urllib.parse import quote

from tinsmith.errors import APIStatusError, BadRequestError, NotFoundError
from tinsmith.service.api import signed_links
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import moment
from tinsmith.service.api.request_checks import (
    base_model,
    check_lora,
    check_metadata,
    check_project,
)
from tinsmith.service.api.signed_links import SignedLink
from tinsmith.service.api.weight_uploads import FILES, KEPT_S, PREFIX, URLS_S
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.records import TenantId, UploadEntry
from tinsmith.types.checkpoints import (
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartResponse,
)
from tinsmith.types.record import Request, to_plain
from tinsmith.types.requests import ExternalWeightsUploadStartRequest
from tinsmith.wire.endpoint_types import Answer as Answers
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.exchange import HttpReply

FOLDER = "/uploads"
_UPLOAD = "upload"
_SHA256 = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")
_UNSUPPORTED_MEDIA_TYPE = 415


class UploadFileRequest(Request):
    """Send a file of an upload to its signed link; the body is the content of the file."""

    ticket: str
    name: str


async def external_weights_upload_start(call: ApiCall) -> ExternalWeightsUploadStartResponse:
    """Start an upload; the same idempotency key gives the same one."""
    request: ExternalWeightsUploadStartRequest = call.request
    base = base_model(call, _by_served_name(call, request.base_model))
    check_lora(base, request.lora_config)
    check_metadata("user_metadata", request.user_metadata)
    if request.destination_project_id is not None:
        check_project("destination_project_id", request.destination_project_id)
    key, now = call.headers.get("x-idempotency-key"), call.ledger.now()
    token = audit.change_id(PREFIX, call.tenant_id, key) if key else secrets.token_hex(16)
    upload = await call.context.uploads.start(
        UploadEntry(
            id=f"{PREFIX}-{token}",
            tenant_id=call.tenant_id,
            created_at=now,
            base_model=base.alias_of or base.name,
            lora_config=to_plain(request.lora_config),
            expires_at=now + KEPT_S,
            project_id=request.destination_project_id,
            user_metadata=request.user_metadata,
        )
    )
    expires_at = upload.created_at + URLS_S
    urls = {name: _address(call, upload.id, name, expires_at) for name in FILES}
    return ExternalWeightsUploadStartResponse(
        upload_id=upload.id, urls=urls, expires=moment(expires_at)
    )


def _by_served_name(call: ApiCall, given: str) -> str:
    """Our name of a base model; files may name what it was loaded from, such as its Hub id."""
    models = call.context.base_models
    if given in models:
        return given
    return next((one.name for one in models.values() if one.source == given), given)


def _address(call: ApiCall, upload_id: str, name: str, expires_at: float) -> str:
    link = SignedLink(_UPLOAD, call.tenant_id, upload_id, name, expires_at)
    signed = signed_links.sign(link, call.context.secret)
    return f"{call.base_url}{FOLDER}/{signed}/{quote(name, safe='')}"


async def upload_file(call: ApiCall) -> HttpReply:
    """Receive a file. The answer's entity tag is its SHA-256."""
    request: UploadFileRequest = call.request
    link = signed_links.check(request.ticket, request.name, call.context.secret, call.ledger.now())
    if link.kind != _UPLOAD:
        raise NotFoundError("there is no such upload; start it again")
    encoding = call.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise APIStatusError(
            f"content-encoding is {encoding!r:.40}; send the file as it is",
            status_code=_UNSUPPORTED_MEDIA_TYPE,
        )
    assert call.pieces is not None
    length = call.headers.get("content-length", "")
    file = await call.context.uploads.receive(
        TenantId(link.tenant_id),
        link.target,
        link.name,
        call.pieces,
        announced_bytes=int(length) if re.fullmatch("[0-9]{1,18}", length) else 0,
        sha256=_announced_digest(call.headers.get("content-digest")),
    )
    return HttpReply(200, {"ETag": f'"{file.sha256}"'}, [])


def _announced_digest(header: str | None) -> str | None:
    """The SHA-256 in a `Content-Digest` header (RFC 9530), in hexadecimal."""
    if header is None:
        return None
    found = _SHA256.search(header)
    try:
        return None if found is None else base64.b64decode(found[1], validate=True).hex()
    except binascii.Error as exc:
        raise BadRequestError(f"content-digest {header!r:.120} is not base64") from exc


async def external_weights_upload_finish(call: ApiCall) -> ExternalWeightsUploadFinishResponse:
    """Make a checkpoint of what was sent. Repeated, it returns the existing one."""
    made = await call.context.uploads.finish(call.tenant_id, call.request.upload_id)
    return ExternalWeightsUploadFinishResponse(tinker_path=made.id)


FURTHER_ENDPOINTS: list[Endpoint] = [
    Endpoint(
        name="upload_file",
        method="PUT",
        path=f"{FOLDER}/{{ticket}}/{{name}}",
        request=UploadFileRequest,
        answer=Answers.NOTHING,
        takes_stream=True,
        is_extension=True,
    )
]
OPEN = frozenset({"upload_file"})
HANDLERS: dict[str, Handler] = {
    "external_weights_upload_start": external_weights_upload_start,
    "upload_file": upload_file,
    "external_weights_upload_finish": external_weights_upload_finish,
}
