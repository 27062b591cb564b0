"""Supervised learning: sentences become JSON."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo.talking import Talk
from tinsmith.demo.tasks import JSON_SYSTEM, Example, is_right, sentences
from tinsmith.types import AdamParams

RANK = 16
BATCH = 8
LEARNING_RATE = 1e-3


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    test: list[Example]
    before: list[str]
    after: list[str]
    losses: list[float]

    def right(self, answers: list[str]) -> int:
        """How many answers are right."""
        return sum(map(is_right, self.test, answers))


def learn_json(
    service: ServiceClient,
    model: str,
    *,
    steps: int,
    tests: int,
    seed: int,
    told: Callable[[list[float]], None],
) -> Learned:
    """Train on sentences, and ask for others before and after.

    Args:
        service: Where to train.
        model: The base model.
        steps: How many.
        tests: How many sentences are asked before and after.
        seed: What examples and weights follow from.
        told: Called with all losses so far, after each step.
    """
    chance = random.Random(seed)  # noqa: S311 - examples
    test = sentences(chance, tests, is_test=True)
    training = service.create_lora_training_client(model, rank=RANK, seed=seed)
    talk = Talk(training.get_tokenizer(), JSON_SYSTEM)
    before = talk.answers(service.create_sampling_client(base_model=model), test)
    losses: list[float] = []
    for _ in range(steps):
        data = [talk.datum(example) for example in sentences(chance, BATCH)]
        weight = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)
        output = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
        losses.append(output.result().metrics["loss:sum"] / weight)
        step.result()
        told(losses)
    after = talk.answers(training.save_weights_and_get_sampling_client(), test)
    return Learned(test=test, before=before, after=after, losses=losses)
