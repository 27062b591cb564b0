"""Tests of the scheduler run over each ledger that needs no server."""

from __future__ import annotations

import pytest

from tests.integration.service.scheduler import bench


@pytest.fixture(params=["memory", "sqlite"])
def each_ledger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `bench` open this kind of ledger."""
    monkeypatch.setattr(bench, "kind_of_ledger", request.param)
