"""A real pgbouncer in front of the tests' PostgreSQL, from the system or from a Debian package."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.e2e.service.served import free_port

PACKAGES = ("pgbouncer", "libc-ares2", "libevent-2.1-7")


@functools.cache
def _program() -> tuple[str, str]:
    """The program, and a folder with libraries that it needs; skips the test if there is none."""
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if found is not None:
        return found, ""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("pgbouncer is not installed, and there is no apt-get to fetch it with")
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-pgbouncer-", dir="/tmp"))
    folder.chmod(0o755)
    for package in PACKAGES:
        fetched = subprocess.run(
            ["apt-get", "download", package],
            check=False,
            cwd=folder,
            capture_output=True,
            timeout=120,
        )
        if fetched.returncode:
            pytest.skip(f"apt-get cannot fetch {package}")
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", file, folder], check=True, timeout=60)
    [program] = folder.glob("usr/sbin/pgbouncer")
    return str(program), str(next(iter(folder.glob("usr/lib/*-linux-gnu"))))


@contextlib.contextmanager
def pgbouncer(dsn: str, pool_mode: str, *settings: str) -> Iterator[str]:
    """The address of a database behind pgbouncer, while the block runs."""
    program, libraries = _program()
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    host, port = query["host"][0], free_port()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-pgbouncer-", dir="/tmp"))
    folder.chmod(0o755)
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={host} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nauth_type = any\npool_mode = {pool_mode}\nunix_socket_dir =\n"
        + "\n".join(settings)
    )
    config.chmod(0o644)
    command = [program, str(config)]
    if os.getuid() == 0:  # it refuses to run as root
        command[1:1] = ["-u", pwd.getpwuid(Path(host).stat().st_uid).pw_name]
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait(port, running, folder / "log")
        yield f"postgresql://postgres@127.0.0.1:{port}{parts.path}"
    finally:
        running.kill()
        running.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(port: int, running: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        if running.poll() is not None or time.monotonic() > deadline:
            pytest.skip(f"pgbouncer does not run here: {log.read_text()[-500:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
