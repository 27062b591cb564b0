"""The same short training run twice: undisturbed, and with the service killed in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.demo.talking import Talk
from tinsmith.demo.tasks import JSON_SYSTEM, sentences
from tinsmith.types import AdamParams, Datum

STEPS = 4
RANK = 4
BATCH = 2
LEARNING_RATE = 1e-3


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What the two runs gave."""

    undisturbed: list[float]
    """The loss of each step, and of what was learned at the end."""
    killed: list[float]


def compare_runs(
    connect: Callable[[], ServiceClient], model: str, *, seed: int, kill: Callable[[], None]
) -> Compared:
    """Train twice from the same seed; `kill` is called in the second run, with steps in flight."""
    with connect() as client:
        undisturbed = _run(client, model, seed, None)
    with connect() as client:
        return Compared(undisturbed=undisturbed, killed=_run(client, model, seed, kill))


def _run(
    client: ServiceClient, model: str, seed: int, kill: Callable[[], None] | None
) -> list[float]:
    training = client.create_lora_training_client(model, rank=RANK, seed=seed)
    talk = Talk(training.get_tokenizer(), JSON_SYSTEM)
    chance = random.Random(seed)  # noqa: S311 - examples
    batches = [[talk.datum(example) for example in sentences(chance, BATCH)] for _ in range(STEPS)]
    losses = [_step(training, batches[0])]
    # All other steps are asked for at once, and are under way when the service dies.
    asked = [
        (
            training.forward_backward(batch, "cross_entropy"),
            training.optim_step(AdamParams(learning_rate=LEARNING_RATE)),
        )
        for batch in batches[1:]
    ]
    if kill is not None:
        kill()
    for output, step in asked:
        losses.append(output.result().metrics["loss:sum"])
        step.result()
    last = training.forward(batches[0], "cross_entropy").result()
    return [*losses, last.metrics["loss:sum"]]


def _step(training: TrainingClient, batch: list[Datum]) -> float:
    output = training.forward_backward(batch, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()
    return output.result().metrics["loss:sum"]
