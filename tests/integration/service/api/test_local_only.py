"""Without keys, a server answers programs of its machine; with keys, whoever has one."""

from __future__ import annotations

import pytest

from tests.integration.service.api.calls import a_session, post
from tests.integration.service.api.running import RunningServer

BODY = {"tags": [], "sdk_version": "0.36.0"}


@pytest.mark.parametrize(
    "header", [{"Origin": "https://evil.example"}, {"Host": "evil.example:8000"}]
)
def test_a_web_page_can_access_a_server_only_with_a_key(header: dict[str, str]) -> None:
    with RunningServer() as server, server.http() as http:
        a_session(http)
        assert post(http, "create_session", BODY, headers=header).status_code == 403

    with RunningServer(with_keys=True) as server, server.http() as http:
        assert post(http, "create_session", BODY, headers=header).status_code == 200
