"""Settings of the embedded engine. Does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from tinsmith.errors import ValidationError, shown

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)


def check_device_name(name: str) -> None:
    """Check that a text names a device.

    Raises:
        ValidationError: It does not.
    """
    if _DEVICE.fullmatch(name) is None:
        raise ValidationError(
            f"{shown(name)} is not a device", remedy="use auto, cpu, cuda, or cuda:0, cuda:1, …"
        )


class EmbeddedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base model to load, or an alias of one."""

    name: str
    folder: Path
    """With `config.json` and safetensors. Models with the same folder are loaded once."""
    tokenizer_id: str | None = None
    alias_of: str | None = None
    source: str | None = None
    """What other programs load it from; None for the folder."""


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the embedded engine runs.

    Raises:
        ValidationError: A number is out of range.
    """

    dtype: Dtype = "auto"
    """Dtype of base models. Without hardware support bfloat16 weights are computed in float32. auto
    is bfloat16 with hardware support, and else float32. A replay needs the same value."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or one GPU: `cuda:0`."""
    threads: int = 0
    """Threads for training, and again for sampling; 0 for half of the idle cores at start."""
    kv_bytes: int = 2 << 30
    """Memory for the KV cache."""
    pass_bytes: int = 3 << 29
    """Memory for the activations of a packed batch. It decides how works are split, and thus the
    last bits of gradients: a replay needs the same value."""
    adapter_bytes: int = 0
    """Memory for adapters. 0 for what a GPU has free besides the two above once its models are
    loaded; on the CPU, whose memory others use too, for no bound but `most_adapters`."""
    most_adapters: int = 64
    most_samples: int = 1024
    batch_tokens: int = 65_536
    """Target for the tokens of one `train` call; large models use fewer."""

    def __post_init__(self) -> None:
        check_device_name(self.device)
        least = {
            "threads": 0,
            "kv_bytes": 1 << 20,
            "pass_bytes": 1 << 20,
            "adapter_bytes": 0,
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
    """Half of the idle cores that this process may use, rounded down to a power of two.

    Half, because training and sampling run concurrently. Idle, because the threads of a computation
    spin while they wait for each other, which is very slow on a core with other load. A power of
    two, because the threads' shares of a tensor then end at vector boundaries, and each number is
    computed with the same instructions whatever is beside it.
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
