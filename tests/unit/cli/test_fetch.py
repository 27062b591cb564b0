from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from tinsmith.cli import fetch


def test_only_sockets_of_embedded_services_are_contacted(tmp_path: Path) -> None:
    """An address comes from a service: it may name anything that listens here."""
    other = tmp_path / "docker.sock"
    other.touch()

    with pytest.raises(PermissionError, match="embedded service"):
        fetch.opened(f"http+unix://{quote(str(other), safe='')}/x", {}, 1.0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_sockets_of_other_users_are_not_contacted(tmp_path: Path) -> None:
    theirs = tmp_path / fetch.SOCKET
    theirs.touch()
    os.chown(theirs, 12345, 12345)

    with pytest.raises(PermissionError, match="your embedded services"):
        fetch.opened(f"http+unix://{quote(str(theirs), safe='')}/x", {}, 1.0)
