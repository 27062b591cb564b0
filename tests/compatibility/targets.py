"""The services that SDKs are run against."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.compatibility.stage import BASE_MODEL
from tests.e2e.service.served import serving
from tinsmith.testing import running_service

KEY_TIMEOUT_S = 60.0


class Target(NamedTuple):
    """A running service."""

    base_url: str
    api_key: str


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Target]:
    """`tinsmith serve` with the fake engine and a key, in a process of its own.

    Raises:
        AssertionError: At the end, if it told of a fault of its own, which a client's second try
            may have hidden.
    """
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "key", "create", "--data", str(folder / "data")],
        capture_output=True,
        text=True,
        timeout=KEY_TIMEOUT_S,
        check=True,
    )
    with serving(folder, "--model", BASE_MODEL) as service:
        yield Target(service.base_url, made.stdout.strip())
        told = service.log.read_text(encoding="utf-8", errors="replace")
        assert faults(told) == []


def faults(log: str) -> list[str]:
    """Lines of a service's log that tell of errors and of answers 500 to 599, but for its start."""
    return [
        line
        for line in log.splitlines()
        if re.search(r"\b(ERROR|CRITICAL)\b|^Traceback| status=5\d\d ", line)
        and "endpoint=healthz" not in line
    ]


@contextlib.contextmanager
def for_tests(folder: Path) -> Iterator[Target]:  # noqa: ARG001 - it keeps nothing
    """The service of `tinsmith.testing`, with everything that it can do switched on."""
    with running_service(
        pjwt_auth_enabled=True,
        sample_use_retrieve_futures=True,
        sample_join_sampling_session=True,
        sample_cancel_enabled=True,
        custom_loss_server_side=True,
        proto_compress_fwdbwd=True,
        archive_redirects=True,
    ) as service:
        yield Target(service.base_url, service.api_key)
