"""Large payloads in files: durable when the write returns, whoever writes beside it."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinsmith.service.ledger.payloads import PayloadFiles

WAIT_S = 60.0


def test_no_write_returns_before_the_shared_folder_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "payloads"
    files = PayloadFiles(root)
    files.prepare()
    numbers = itertools.count()
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"ab{next(numbers):030x}")
    is_syncing, may_sync = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: Any) -> None:
        if os.path.samestat(os.fstat(descriptor), root.stat()):
            is_syncing.set()
            assert may_sync.wait(WAIT_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(files.write, b"first")
        assert is_syncing.wait(WAIT_S)
        second = pool.submit(files.write, b"second")
        with pytest.raises(TimeoutError):
            second.result(0.3)
        may_sync.set()

        assert files.read(first.result(WAIT_S)) == b"first"
        assert files.read(second.result(WAIT_S)) == b"second"
