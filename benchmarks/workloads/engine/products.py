"""The products with a model's frozen weights, and nothing before, between or after them.

They are the engine's own (`model/linear.py`), with random weights, in packs that it would make.
Whoever computes everything else for nothing takes so long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.workloads.engine.data import RANK
from benchmarks.workloads.engine.measure import Turn, warm_up
from benchmarks.workloads.engine.models import fused_sides, size_of
from tinsmith.engine.embedded.batched_sampler import SamplerSettings
from tinsmith.engine.embedded.embedded_settings import Dtype
from tinsmith.engine.embedded.model_loading import choose_dtypes
from tinsmith.engine.model.linear import Linear


class _Products:
    def __init__(self, model: str, dtype: Dtype) -> None:
        torch.set_num_threads(1)
        self.size = size_of(model)
        self.computes_in = choose_dtypes(dtype, "cpu").computed
        sides = fused_sides(model)
        self._layers = [self._linear(*one) for _ in range(sides.layers) for one in sides.of_layer]
        self._head = self._linear(*sides.head)

    def _linear(self, outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs).bfloat16(), dtype=self.computes_in)

    def _rows(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=self.computes_in)

    def read(self, rows: int) -> None:
        """Tokens of prompts, of which no logits are wanted."""
        for linear in self._layers:
            linear(self._rows(rows, linear.weight_OI.shape[1]))

    def draw(self, rows: int) -> None:
        """A token for each sequence."""
        self.read(rows)
        self._head(self._rows(rows, self._head.weight_OI.shape[1]))

    def train(self, rows: int) -> None:
        """There and back, with logits for all."""
        for linear in (*self._layers, self._head):
            outputs, inputs = linear.weight_OI.shape
            linear.for_many_rows(self._rows(rows, inputs))
            linear.input_gradient(self._rows(rows, outputs))


def sampling(
    model: str, count: str, prompt: str = "128", new: str = "64", dtype: Dtype = "float32"
) -> Callable[[], dict[str, float]]:
    """Those of so many samples at once."""
    products = _Products(model, dtype)
    step = SamplerSettings().prefill_tokens
    read, drawn = int(count) * int(prompt), int(count) * int(new)

    @torch.inference_mode()
    def run() -> dict[str, float]:
        turn = Turn(products.computes_in)
        for start in range(0, read, step):
            products.read(min(step, read - start))
        for _ in range(int(new)):
            products.draw(int(count))
        return turn.figures(drawn, products.size.sampling_flops(read, drawn))

    products.draw(int(count))
    return run


def training(model: str, rows: str, dtype: Dtype = "float32") -> Callable[[], dict[str, float]]:
    """Those of a pass over so many tokens; none of adapters."""
    products = _Products(model, dtype)

    @torch.inference_mode()
    def run() -> dict[str, float]:
        turn = Turn(products.computes_in)
        products.train(int(rows))
        return turn.figures(int(rows), products.size.training_flops(int(rows), RANK))

    warm_up(run)
    return run
