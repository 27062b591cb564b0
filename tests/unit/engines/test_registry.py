"""Engines by name, and the names of their models."""

from __future__ import annotations

import pytest

from tinsmith.engines.registry import make_engine
from tinsmith.errors import ValidationError


def test_an_engine_that_there_is_not_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ValidationError, match="fake"):
        make_engine("unheard-of", ["a"])


def test_an_engine_without_models_is_refused() -> None:
    """With the option that names them."""
    with pytest.raises(ValidationError, match="--model"):
        make_engine("fake", [])
