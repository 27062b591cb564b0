"""What the embedded engine is told: which models, and how to run them. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from tinsmith.errors import ValidationError

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class EmbeddedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base model to load, or another name of one."""

    name: str
    folder: Path
    """With `config.json` and safetensors. Models of one folder are loaded once."""
    tokenizer_id: str | None = None
    alias_of: str | None = None
    source: str | None = None
    """What other programs find it by; None for the folder."""


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the embedded engine runs.

    Raises:
        ValidationError: A number is out of range.
    """

    dtype: Dtype = "auto"
    """What base models are held in, and computed in where there is hardware for it: without, those
    in bfloat16 are computed in float32. auto is bfloat16 with such hardware, and else float32. It
    is part of what a replay needs."""
    device: Device = "auto"
    threads: int = 0
    """For training and again for sampling; 0 for half of the cores that are free at the start."""
    kv_bytes: int = 2 << 30
    """What the keys and values of samples may take."""
    pass_bytes: int = 3 << 29
    """What training may keep of the rows that are computed together. It decides how works are cut,
    and with that the last bits of gradients: a replay needs the same."""
    most_adapters: int = 64
    most_samples: int = 1024
    batch_tokens: int = 65_536
    """How many tokens one call of `train` should have at most; large models take fewer."""

    def __post_init__(self) -> None:
        least = {
            "threads": 0,
            "kv_bytes": 1 << 20,
            "pass_bytes": 1 << 20,
            "most_adapters": 1,
            "most_samples": 1,
            "batch_tokens": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValidationError(
                    f"{name} is {getattr(self, name)}; it must be {bound} or more"
                )


def free_threads() -> int:
    """Half of the cores that this process may use and that nothing else is using; at least 1.

    Training and sampling run beside each other. Threads of one computation wait for each other by
    spinning: on a core that has other work, that costs many times what the thread is worth.

    A power of two: the threads' shares of a tensor then end where its rows' vectors of numbers do,
    and each number is computed in the same way whatever is beside it.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        busy = os.getloadavg()[0]
    except OSError:
        busy = 0.0
    half = max(1, int(cores - busy) // 2)
    return 1 << (half.bit_length() - 1)
