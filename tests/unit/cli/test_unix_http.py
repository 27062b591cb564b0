from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from tinsmith.cli import unix_http


def test_only_sockets_of_embedded_services_are_asked(tmp_path: Path) -> None:
    """An address comes from a service: it may name anything that listens here."""
    other = tmp_path / "docker.sock"
    other.touch()

    with pytest.raises(PermissionError, match="embedded service"):
        unix_http.opened(f"http+unix://{quote(str(other), safe='')}/x", {}, 1.0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_sockets_of_other_users_are_not_asked(tmp_path: Path) -> None:
    theirs = tmp_path / unix_http.SOCKET
    theirs.touch()
    os.chown(theirs, 12345, 12345)

    with pytest.raises(PermissionError, match="yours"):
        unix_http.opened(f"http+unix://{quote(str(theirs), safe='')}/x", {}, 1.0)
