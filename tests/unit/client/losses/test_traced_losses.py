from __future__ import annotations

import pytest

from tinsmith.client.losses.traced_losses import TracedLosses


def test_a_loss_is_traced_once_and_again_after_a_failure() -> None:
    losses = TracedLosses()
    losses.add("k", "mine")

    with pytest.raises(ValueError, match="'mine' already exists"):
        losses.add("k", "mine")

    losses.forget("k")
    losses.add("k", "mine")
