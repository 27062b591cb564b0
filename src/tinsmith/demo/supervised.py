"""Supervised learning: turn sentences into JSON."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo.tasks import JSON_SYSTEM, ChatTask, TaskExample, is_correct, sentences
from tinsmith.types import AdamParams

RANK = 16
BATCH = 8
LEARNING_RATE = 1e-3


class SupervisedResult(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of each step, and the answers to held-out sentences before and after training."""

    test: list[TaskExample]
    before: list[str]
    after: list[str]
    losses: list[float]

    def correct(self, answers: list[str]) -> int:
        """How many answers are correct."""
        return sum(map(is_correct, self.test, answers))


def learn_json(
    service: ServiceClient,
    model: str,
    *,
    steps: int,
    tests: int,
    seed: int,
    on_step: Callable[[list[float]], None],
) -> SupervisedResult:
    """Train on sentences, and test on others before and after.

    Args:
        service: The service to train on.
        model: The base model.
        steps: Number of optimizer steps.
        tests: Number of held-out sentences.
        seed: Seed of the examples and the LoRA weights.
        on_step: Called after each step with all losses so far, per token.
    """
    rng = random.Random(seed)  # noqa: S311 - examples
    test = sentences(rng, tests, is_test=True)
    training = service.create_lora_training_client(model, rank=RANK, seed=seed)
    task = ChatTask(training.get_tokenizer(), JSON_SYSTEM)
    before = task.answers(service.create_sampling_client(base_model=model), test)
    losses: list[float] = []
    for _ in range(steps):
        data = [task.datum(example) for example in sentences(rng, BATCH)]
        tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)
        output = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
        losses.append(output.result().metrics["loss:sum"] / tokens)
        step.result()
        on_step(losses)
    after = task.answers(training.save_weights_and_get_sampling_client(), test)
    return SupervisedResult(test=test, before=before, after=after, losses=losses)
