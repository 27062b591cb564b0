"""What a `Model` entry says of its adapter, in `config`: written by the server, read by all.

After a crash an adapter is made again from it, when the command that made it is long gone.
"""

from __future__ import annotations

from typing import Any

from tinsmith.types.record import to_plain
from tinsmith.types.training import (
    AdamOptimizerConfig,
    LoraConfig,
    OptimizerConfig,
    OptimizerConfigBase,
)

DEFAULT_RANK = 32
"""Of a model that was asked for without a LoRA configuration."""


def write_config(lora: LoraConfig | None, optimizer: OptimizerConfig | None) -> dict[str, Any]:
    """The settings of an adapter as `Model.config` holds them; None means the API's default."""
    return {
        "lora_config": to_plain(lora or LoraConfig(rank=DEFAULT_RANK)),
        "optimizer_config": to_plain(optimizer or AdamOptimizerConfig()),
    }


def read_config(config: dict[str, Any]) -> tuple[LoraConfig, OptimizerConfig]:
    """What `write_config` was given."""
    lora = config.get("lora_config")
    return (
        LoraConfig.model_validate(lora) if lora else LoraConfig(rank=DEFAULT_RANK),
        read_optimizer(config),
    )


def read_optimizer(config: dict[str, Any]) -> OptimizerConfig:
    """The second of what `write_config` was given."""
    optimizer = config.get("optimizer_config")
    return OptimizerConfigBase.model_validate(optimizer) if optimizer else AdamOptimizerConfig()
