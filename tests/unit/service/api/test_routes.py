"""Every endpoint has one handler, or the server does not start."""

from __future__ import annotations

import pytest

from tinsmith.errors import ValidationError
from tinsmith.service.api import routes
from tinsmith.wire.endpoints import ENDPOINTS


def test_every_endpoint_has_a_handler() -> None:
    """And the few that need no credential are known by name."""
    found = routes.collect()

    assert found.handlers.keys() >= ENDPOINTS.keys()
    assert "healthz" in found.open
    assert not (found.open & ENDPOINTS.keys()) - {"healthz"}


def test_an_endpoint_without_a_handler_is_detected_at_startup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by a client."""
    monkeypatch.setattr(routes, "MODULES", [name for name in routes.MODULES if name != "futures"])

    with pytest.raises(ValidationError, match=r"without a handler.*retrieve_future"):
        routes.collect()


def test_two_handlers_for_one_endpoint_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them would answer is not left to chance."""
    monkeypatch.setattr(routes, "MODULES", [*routes.MODULES, "futures"])

    with pytest.raises(ValidationError, match="two handlers"):
        routes.collect()
