"""A service that others reach is not opened without a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.errors import ValidationError
from tinsmith.service.run.assemble import Service
from tinsmith.service.run.service_settings import ServiceSettings


def test_a_missing_key_is_reported_before_models_are_searched(tmp_path: Path) -> None:
    """A model may take minutes to be fetched and loaded, and this one is not to be had at all."""
    settings = ServiceSettings(
        data=tmp_path / "data", host="0.0.0.0", models=(f"mine={tmp_path / 'nowhere'}",)
    )

    with pytest.raises(ValidationError, match="without API keys"):
        asyncio.run(Service.open(settings))
