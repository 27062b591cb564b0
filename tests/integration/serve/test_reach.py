"""A service that others reach is not opened without a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.errors import ValidationError
from tinsmith.serve.assemble import Service
from tinsmith.serve.settings import ServiceSettings


def test_a_missing_key_is_told_before_models_are_looked_for(tmp_path: Path) -> None:
    """A model may take minutes to be fetched and loaded, and this one is not to be had at all."""
    settings = ServiceSettings(
        data=tmp_path / "data", host="0.0.0.0", models=(f"mine={tmp_path / 'nowhere'}",)
    )

    with pytest.raises(ValidationError, match="there is no key"):
        asyncio.run(Service.open(settings))
