"""A training run whose every number follows from its seed, so that two runs can be compared."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import tinsmith
from tests.e2e.service.served import BASE_MODEL
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

WAIT_S = 900.0
"""What hangs is given up. A service that is killed fifty times takes minutes on a busy machine."""
API_KEY = "tml-any"


class Weights(tuple[float, ...]):
    """What a run ended with: the logprobs that its model gives to a fixed text."""


def train(
    base_url: str | Sequence[str],
    seed: int,
    steps: int,
    *,
    base_model: str = BASE_MODEL,
    on_step: Callable[[], object] = bool,
) -> Weights:
    """Train a small model, save and sample on the way, and say what became of it.

    Args:
        base_url: Where the service is, or its servers.
        seed: Of the data and of the model's first weights.
        steps: How many steps of the optimizer; each has one or more passes before it.
        base_model: What it is trained on.
        on_step: Called after each step, from the thread that trains.
    """
    chance = random.Random(seed)
    with tinsmith.ServiceClient(base_url=base_url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(base_model, rank=4, seed=seed)
        for step in range(steps):
            passes = [
                training.forward_backward([datum_of(chance)], "cross_entropy")
                for _ in range(chance.randint(1, 3))
            ]
            stepped = training.optim_step(AdamParams(learning_rate=0.05))
            for one in passes:
                assert "loss:sum" in one.result(WAIT_S).metrics
            stepped.result(WAIT_S)
            if step % 5 == 4:
                _save_and_sample(training, step)
            on_step()
        probe = training.forward([datum_of(random.Random(0))], "cross_entropy").result(WAIT_S)
        return Weights(probe.loss_fn_outputs[0]["logprobs"].tolist())


def _save_and_sample(training: tinsmith.TrainingClient, step: int) -> None:
    saved = training.save_state(f"step-{step}").result(WAIT_S)
    assert saved.path.endswith(f"/weights/step-{step}")
    sampler = training.save_weights_and_get_sampling_client()
    answer = sampler.sample(
        ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(max_tokens=4, seed=step)
    ).result(WAIT_S)
    assert len(answer.sequences[0].tokens) <= 4


def datum_of(chance: random.Random) -> Datum:
    tokens = [chance.randrange(1000) for _ in range(chance.randint(3, 12))]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=tokens[1:], dtype="int64"),
            "weights": TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
        },
    )


class Runs:
    """Several runs at a time, each on a thread of its own."""

    def __init__(self, base_url: str, count: int, steps: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self.steps_done = 0
        self._runs = [
            self._pool.submit(train, base_url, seed, steps, on_step=self._count)
            for seed in range(count)
        ]

    def _count(self) -> None:
        with self._lock:
            self.steps_done += 1

    @property
    def are_over(self) -> bool:
        """Whether all have ended, well or badly."""
        return all(run.done() for run in self._runs)

    def results(self) -> list[Weights]:
        """What each ended with; raises what any of them raised."""
        return [run.result(WAIT_S) for run in self._runs]
