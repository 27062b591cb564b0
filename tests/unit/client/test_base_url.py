"""Addresses of services, beside Python's own reader of addresses."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tinsmith.client.settings import base_url_parts


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "http://127.0.0.1:8000",
        "https://Service.Example/services/prod",
        "HTTPS://service.example:8443/a/b",
        "http://[::1]:8000/x",
        "http://[fe80::1%25eth0]",
        "http://bücher.example:80",
        "http://host:/a",
        "http://host_name.example/a@b:c",
    ],
)
def test_a_base_url_is_split_like_urlsplit_does(url: str) -> None:
    parts, known = base_url_parts(url), urlsplit(url)

    assert parts.scheme == known.scheme
    assert parts.host == known.hostname
    assert parts.given_port == known.port
    assert parts.path == known.path


@pytest.mark.parametrize(
    "url",
    [
        "",
        "embedded",
        "ftp://host",
        "http:/host",
        "http://",
        "http://:80",
        "http://host:x",
        "http://host:65536",
        "http://host:٣",
        "http://[::1",
        "http://::1",
        "http://user@host",
        "http://host?a=b",
        "http://host/a#b",
        "http://ho st",
        "http://host/a b",
        "http://host\r\nX-Header: 1",
        "http://host\n",
    ],
)
def test_an_invalid_base_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        base_url_parts(url)


def test_a_default_port_is_inferred_and_an_explicit_one_is_shown() -> None:
    plain, secure, given = map(
        base_url_parts, ("http://a/x/", "https://[::1]", "http://[::1]:8000")
    )

    assert (plain.port, secure.port, given.port) == (80, 443, 8000)
    assert (plain.netloc, secure.netloc, given.netloc) == ("a", "[::1]", "[::1]:8000")
    assert plain.path == "/x"
