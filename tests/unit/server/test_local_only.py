from __future__ import annotations

import pytest

from tinsmith.errors import PermissionDeniedError
from tinsmith.server.local_only import check_local


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:80", "127.9.8.7", "[::1]:8000", None],
)
def test_programs_of_the_machine_are_answered(host: str | None) -> None:
    check_local({} if host is None else {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost:80@evil.example",
        "",
        "192.168.1.2",
        "[::2]",
        "localhost\n",
    ],
)
def test_a_name_of_somebody_else_is_refused(host: str) -> None:
    with pytest.raises(PermissionDeniedError, match="tinsmith key create"):
        check_local({"host": host})


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:8000", "null", ""])
def test_what_a_page_sends_is_refused(origin: str) -> None:
    with pytest.raises(PermissionDeniedError, match="no web pages"):
        check_local({"host": "localhost", "origin": origin})
