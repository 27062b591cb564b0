"""A plain training loop with `transformers` and `peft`, as people write it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness.machine import multiplies_bfloat16
from benchmarks.workloads.engine.data import ADAPTERS, RANK, Sequence, training_batch
from benchmarks.workloads.engine.measure import Turn, warm_up
from benchmarks.workloads.engine.models import folder_of, size_of

MOST_SLOTS = 1024
"""Tokens of a micro-batch, padding included."""
_IGNORED = -100


def load(model: str, dtype: torch.dtype = torch.float32, threads: int = 1) -> Any:
    """The base model, computed by so many threads."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    return AutoModelForCausalLM.from_pretrained(
        folder_of(model), dtype=dtype, attn_implementation="sdpa"
    )


def with_adapters(base: Any, names: list[str]) -> Any:
    """With adapters on all linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    model.train()
    return model


def trained(model: Any, name: str) -> list[torch.nn.Parameter]:
    """The weights of an adapter."""
    return [p for key, p in model.named_parameters() if f".{name}." in key and "lora_" in key]


def buckets(sequences: list[Sequence]) -> list[list[Sequence]]:
    """By length, as many together as the slots allow."""
    made: list[list[Sequence]] = []
    for one in sorted(sequences, key=lambda one: -one.positions):
        if not made or (len(made[-1]) + 1) * made[-1][0].positions > MOST_SLOTS:
            made.append([])
        made[-1].append(one)
    return made


def gather(model: Any, sequences: list[Sequence], length: int = 0) -> None:
    """Forward and backward of one micro-batch, padded to its longest or to a length."""
    length = max(length, *(one.positions for one in sequences))
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    targets = torch.full_like(ids, _IGNORED)
    for row, one in enumerate(sequences):
        ids[row, : one.positions] = torch.tensor(one.tokens[:-1])
        mask[row, : one.positions] = 1
        targets[row, one.first - 1 : one.positions] = torch.tensor(one.tokens[one.first :])
    # The head for those positions that count, where all sequences have them at the end.
    first = min(one.first for one in sequences) - 1
    is_whole = bool(mask.all())
    logits = model(
        input_ids=ids,
        attention_mask=None if is_whole else mask,
        logits_to_keep=length - first,
        use_cache=False,
    ).logits
    wanted = targets[:, first:].reshape(-1)
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), wanted, ignore_index=_IGNORED, reduction="sum"
    )
    loss.backward()


def training(
    model: str, batch: str, mode: str = "buckets", dtype: str = "float32", threads: str = "1"
) -> Callable[[], dict[str, float]]:
    """One pass and one step.

    Args:
        model: Which.
        batch: Of `data.py`.
        mode: `buckets` sorts by length. `padded` pads all to the longest. In `padded` and `full`
            only some sequences are computed, for time's sake, since each costs the same.
        dtype: Of the base; adapters are float32.
        threads: How many compute.
    """
    size, kind = size_of(model), getattr(torch, dtype)
    peft = with_adapters(load(model, kind, int(threads)), ["one"])
    optimizer = torch.optim.AdamW(trained(peft, "one"), lr=1e-4, betas=(0.9, 0.95), weight_decay=0)
    turns = itertools.count(1)

    def run(batch: str) -> dict[str, float]:
        sequences = training_batch(batch, size.vocabulary, next(turns))
        tokens = sum(one.positions for one in sequences)
        longest = max(one.positions for one in sequences)
        parts, length, share = buckets(sequences), 0, 1.0
        if mode in ("padded", "full"):
            some = sequences[:2]
            parts, length, share = [some], longest, len(some) / len(sequences)
        turn = Turn(kind)
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            for part in parts:
                gather(peft, part, length)
        optimizer.step()
        optimizer.zero_grad()
        return turn.figures(tokens * share, size.training_flops(1, RANK) * tokens * share)

    # In bfloat16 without hardware for it, memory is nothing beside products that take minutes.
    is_slow = kind != torch.float32 and not multiplies_bfloat16()
    warm_up(lambda: run("tiny" if is_slow else batch))
    return lambda: run(batch)


def adapters(model: str, dtype: str = "float32") -> Callable[[], dict[str, float]]:
    """A small pass and a step for each of several adapters of one model, with `set_adapter`."""
    size, kind = size_of(model), getattr(torch, dtype)
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    peft = with_adapters(load(model, kind), names)
    optimizers = [torch.optim.AdamW(trained(peft, name), lr=1e-4) for name in names]
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        number = next(turns)
        batches = [
            training_batch("small", size.vocabulary, number * ADAPTERS + index)
            for index in range(ADAPTERS)
        ]
        turn = Turn(kind)
        for name, optimizer, batch in zip(names, optimizers, batches, strict=True):
            peft.set_adapter(name)
            with torch.autocast("cpu", kind, enabled=kind != torch.float32):
                gather(peft, batch)
            optimizer.step()
            optimizer.zero_grad()
        tokens = sum(one.positions for batch in batches for one in batch)
        return turn.figures(tokens, size.training_flops(tokens, RANK))

    warm_up(run)
    return run
