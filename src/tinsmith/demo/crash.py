"""Crash safety: one short training run twice, undisturbed and with the service killed midway."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo.tasks import JSON_SYSTEM, ChatTask, sentences
from tinsmith.types import AdamParams

STEPS = 4
RANK = 4
BATCH = 2
LEARNING_RATE = 1e-3


class CrashComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of both runs: one per step, and one of a final forward pass."""

    undisturbed: list[float]
    killed: list[float]


def compare_runs(
    connect: Callable[[], ServiceClient], model: str, *, seed: int, kill: Callable[[], None]
) -> CrashComparison:
    """Train twice from the same seed; the second run calls `kill` with steps in flight."""
    with connect() as client:
        undisturbed = _run(client, model, seed, kill=lambda: None)
    with connect() as client:
        return CrashComparison(undisturbed=undisturbed, killed=_run(client, model, seed, kill))


def _run(client: ServiceClient, model: str, seed: int, kill: Callable[[], None]) -> list[float]:
    training = client.create_lora_training_client(model, rank=RANK, seed=seed)
    task = ChatTask(training.get_tokenizer(), JSON_SYSTEM)
    rng = random.Random(seed)  # noqa: S311 - examples
    batches = [[task.datum(example) for example in sentences(rng, BATCH)] for _ in range(STEPS)]
    futures = []
    for number, batch in enumerate(batches):
        output = training.forward_backward(batch, "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
        futures.append((output, step))
        if number == 0:
            step.result()  # the other steps are in flight together when the service is killed
    kill()
    losses = []
    for output, step in futures:
        losses.append(output.result().metrics["loss:sum"])
        step.result()
    last = training.forward(batches[0], "cross_entropy").result()
    return [*losses, last.metrics["loss:sum"]]
