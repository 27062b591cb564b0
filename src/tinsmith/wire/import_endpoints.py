"""The routes by which an adapter that was made elsewhere is sent; an extension of the protocol.

A service offers them with the flag `tinsmith_import_bytes`; see `docs/extensions.md`.
"""

from __future__ import annotations

from tinsmith.types import imports as i
from tinsmith.wire.endpoint_types import API_PREFIX, Answer, Endpoint

_FOLDER = f"{API_PREFIX}/tinsmith/imports"

BEGIN_IMPORT = Endpoint(
    name="begin_import",
    method="POST",
    path=_FOLDER,
    request=i.BeginImportRequest,
    response=i.BeginImportResponse,
    is_extension=True,
)
SEND_IMPORT_PART = Endpoint(
    name="send_import_part",
    method="PUT",
    path=f"{_FOLDER}/{{import_id}}/files/{{name}}",
    request=i.ImportPartRequest,
    answer=Answer.NOTHING,
    takes_bytes=True,
    timeout_s=300.0,
    is_extension=True,
)
FINISH_IMPORT = Endpoint(
    name="finish_import",
    method="POST",
    path=f"{_FOLDER}/{{import_id}}/finish",
    request=i.FinishImportRequest,
    response=i.FinishImportResponse,
    timeout_s=600.0,
    is_extension=True,
)
IMPORT_ENDPOINTS = [BEGIN_IMPORT, SEND_IMPORT_PART, FINISH_IMPORT]
