"""Are our gradients those of the plain loop? How far each is from the same loop in float64.

Both begin with one adapter, ours, whose B factors are random instead of zero, since gradients of
A would be zero else. The difference is the largest of all, over the largest gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.workloads.engine.data import Sequence, training_batch
from benchmarks.workloads.engine.models import size_of
from benchmarks.workloads.engine.ours import Running, datums
from benchmarks.workloads.engine.peft_loop import gather, load, trained, with_adapters
from tinsmith.engine.base import AdapterId

MODEL = "1m"


def difference(who: str, batch: str) -> dict[str, float]:
    """Of `ours` or `peft`, in float32, from the loop in float64."""
    running = Running(MODEL)
    running.add_adapter("one")
    adapter = running.engine._adapters[AdapterId("one")]
    chance = torch.Generator().manual_seed(0)
    adapter.weights = adapter.weights + 0.02 * torch.randn(adapter.weights.shape, generator=chance)
    sequences = training_batch(batch, size_of(MODEL).vocabulary)
    factors = adapter.layout.factors(adapter.weights)
    exact = _of_loop(factors, sequences, torch.float64)
    if who == "peft":
        found = _of_loop(factors, sequences, torch.float32)
    else:
        running.train([running.pass_work("one", datums(sequences))])
        assert adapter.gradients is not None
        found = adapter.layout.factors(adapter.gradients)
    largest = max(float(one.abs().max()) for pair in exact.values() for one in pair)
    worst = max(
        float((one.double() - other.double()).abs().max())
        for name in exact
        for one, other in zip(exact[name], found[name], strict=True)
    )
    return {"difference": worst / largest}


def _of_loop(
    factors: dict[str, tuple[Tensor, Tensor]], sequences: list[Sequence], dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    model = with_adapters(load(MODEL, dtype), ["one"])
    if dtype == torch.float64:
        model = model.double()
    parameters = {
        key: parameter
        for key, parameter in model.named_parameters()
        if ".one." in key and "lora_" in key
    }
    assert len(parameters) == len(trained(model, "one"))
    for name, (a, b) in factors.items():
        with torch.no_grad():
            parameters[f"base_model.model.{name}.lora_A.one.weight"].copy_(a)
            parameters[f"base_model.model.{name}.lora_B.one.weight"].copy_(b)
    for one in sequences:
        gather(model, [one])
    found = {}
    for name in factors:
        at = f"base_model.model.{name}.lora"
        pair = (parameters[f"{at}_{side}.one.weight"].grad for side in "AB")
        found[name] = tuple(pair)
    return found
