"""What a model's entry says of its adapter."""

from __future__ import annotations

import pytest

from tinsmith.service.ledger.model_config import DEFAULT_RANK, read_config, write_config
from tinsmith.types.training import (
    AdamOptimizerConfig,
    DimuonOptimizerConfig,
    LoraConfig,
    OptimizerConfig,
)


@pytest.mark.parametrize("optimizer", [AdamOptimizerConfig(), DimuonOptimizerConfig()])
def test_model_settings_round_trip(optimizer: OptimizerConfig) -> None:
    """Seeds and layers included: an adapter is made again from them."""
    lora = LoraConfig(rank=7, seed=3, train_mlp=False)

    assert read_config(write_config(lora, optimizer)) == (lora, optimizer)


def test_unset_model_settings_are_the_defaults() -> None:
    """Old clients leave out both."""
    assert read_config(write_config(None, None)) == (
        LoraConfig(rank=DEFAULT_RANK),
        AdamOptimizerConfig(),
    )
    assert read_config({}) == read_config(write_config(None, None))
