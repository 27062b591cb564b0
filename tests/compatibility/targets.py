"""The services that SDKs are run against."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.compatibility.stage import BASE_MODEL
from tests.e2e.service.served import serving
from tests.numerics.small_models import make_model
from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.testing import running_service

KEY_TIMEOUT_S = 60.0
_MAKING = threading.Lock()
"""Two services may start at once, and the lazy imports of transformers are not thread-safe."""


class Target(NamedTuple):
    """A running service."""

    base_url: str
    api_key: str


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Target]:
    """`tinsmith serve` with a key and a tiny random model, in a process of its own.

    The embedded engine runs it: uploaded losses are part of what SDKs can do.

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
    with _MAKING:
        make_model(folder / "model")
    write_tokenizer(folder / "model")
    with serving(folder, engine="embedded", model=f"{BASE_MODEL}={folder / 'model'}") as service:
        yield Target(service.base_url, made.stdout.strip())
        told = service.log.read_text(encoding="utf-8", errors="replace")
        assert faults(told) == []


def faults(log: str) -> list[str]:
    """Lines of a service's log about errors and 5xx replies after its start."""
    return [
        line
        for line in log.splitlines()
        if re.search(r"\b(ERROR|CRITICAL)\b|^Traceback| status=5\d\d ", line)
        and "endpoint=healthz" not in line
    ]


@contextlib.contextmanager
def for_tests(folder: Path) -> Iterator[Target]:  # noqa: ARG001 - it keeps nothing
    """The service of `tinsmith.testing`, with all extensions switched on."""
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
