"""Learning from rewards: answers come to the point.

Each question is answered several times. What an answer is worth beyond the mean of its group is its
advantage: the model is told to give more of those above it and fewer of those below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo.talking import Talk
from tinsmith.demo.tasks import ANSWER_SYSTEM, QUESTIONS, Example, reward
from tinsmith.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

RANK = 16
GROUP = 8
LONGEST_ANSWER = 16
LEARNING_RATE = 2e-4


class Rewarded(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    questions: list[Example]
    before: list[str]
    after: list[str]
    rewards: list[float]
    """The mean of each step."""


def learn_to_the_point(
    service: ServiceClient,
    model: str,
    *,
    steps: int,
    questions: int,
    seed: int,
    told: Callable[[list[float]], None],
) -> Rewarded:
    """Sample, reward and train, some steps long.

    Args:
        service: Where to sample and train.
        model: The base model.
        steps: How many.
        questions: How many of them are asked in each step, `GROUP` times each.
        seed: What samples and weights follow from.
        told: Called with the mean rewards so far, after each step.
    """
    asked = list(QUESTIONS[:questions])
    training = service.create_lora_training_client(model, rank=RANK, seed=seed)
    talk = Talk(training.get_tokenizer(), ANSWER_SYSTEM)
    sampler = training.save_weights_and_get_sampling_client()
    before = talk.answers(sampler, asked)
    rewards: list[float] = []
    for step in range(steps):
        params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=1.0, seed=seed + step)
        prompts = [ModelInput.from_ints(talk.prompt(one)) for one in asked]
        found = sampler.sample_many(prompts, params, num_samples=GROUP)
        data: list[Datum] = []
        worth: list[float] = []
        for question, prompt, response in zip(asked, prompts, found, strict=True):
            group = [reward(question, talk.text(one.tokens)) for one in response.sequences]
            worth += group
            data += _data(prompt.to_ints(), response.sequences, group)
        rewards.append(sum(worth) / len(worth))
        if data:
            gathered = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            sampler = training.save_weights_and_get_sampling_client()
            gathered.result()
            stepped.result()
        told(rewards)
    return Rewarded(
        questions=asked, before=before, after=talk.answers(sampler, asked), rewards=rewards
    )


def _data(
    prompt: list[int], sequences: Sequence[SampledSequence], rewards: Sequence[float]
) -> list[Datum]:
    """The answers that were better or worse than their group, with how much."""
    mean = sum(rewards) / len(rewards)
    made: list[Datum] = []
    for sequence, worth in zip(sequences, rewards, strict=True):
        if worth == mean:
            continue  # nothing to learn from
        answer, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        tokens = prompt + answer
        lead = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": lead + logprobs,
            "advantages": lead + [worth - mean] * len(answer),
        }
        made.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return made
