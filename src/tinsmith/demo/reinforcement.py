"""Reinforcement learning: answers become short and correct.

Each question is answered several times. The advantage of an answer is its reward minus the mean of
its group: the model is trained towards the answers above it and away from those below. Before and
after, held-out questions are answered in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.demo.talking import Talk
from tinsmith.demo.tasks import ANSWER_SYSTEM, QUESTIONS, TEST_QUESTIONS, Example, reward
from tinsmith.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

RANK = 16
GROUP = 8
LONGEST_ANSWER = 16
LEARNING_RATE = 3e-4


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    """How held-out questions are answered, `GROUP` times each."""

    answers: list[str]
    """The first one to each question."""
    rewards: list[float]
    """The mean of each question."""

    @property
    def mean(self) -> float:
        """The mean reward of all answers."""
        return sum(self.rewards) / len(self.rewards)


class Rewarded(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    test: list[Example]
    before: Tested
    after: Tested
    rewards: list[float]
    """The mean of each training step."""


def learn_short_answers(
    service: ServiceClient,
    model: str,
    *,
    steps: int,
    questions: int,
    tests: int,
    seed: int,
    told: Callable[[list[float]], None],
) -> Rewarded:
    """Sample, reward and train, some steps long.

    Args:
        service: Where to sample and train.
        model: The base model.
        steps: How many.
        questions: How many are asked in each step, `GROUP` times each.
        tests: How many held-out questions are asked before and after.
        seed: What questions, samples and weights follow from.
        told: Called with the mean rewards so far, after each step.
    """
    test = list(TEST_QUESTIONS[:tests])
    training = service.create_lora_training_client(model, rank=RANK, seed=seed)
    talk = Talk(training.get_tokenizer(), ANSWER_SYSTEM)
    sampler = training.save_weights_and_get_sampling_client()
    before = _tested(talk, sampler, test, seed)
    chance = random.Random(seed)  # noqa: S311 - questions
    left: list[Example] = []
    rewards: list[float] = []
    for step in range(steps):
        if len(left) < questions:
            left = chance.sample(QUESTIONS, len(QUESTIONS))
        asked, left = left[:questions], left[questions:]
        data: list[Datum] = []
        worth: list[float] = []
        for prompt, sequences, group in _answered(talk, sampler, asked, seed + step):
            worth += group
            data += _data(prompt.to_ints(), sequences, group)
        rewards.append(sum(worth) / len(worth))
        if data:
            gathered = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            sampler = training.save_weights_and_get_sampling_client()
            gathered.result()
            stepped.result()
        told(rewards)
    after = _tested(talk, sampler, test, seed)
    return Rewarded(test=test, before=before, after=after, rewards=rewards)


def _answered(
    talk: Talk, sampler: SamplingClient, asked: Sequence[Example], seed: int
) -> list[tuple[ModelInput, list[SampledSequence], list[float]]]:
    """Each prompt with its answers and what each of them is worth."""
    params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=1.0, seed=seed)
    prompts = [ModelInput.from_ints(talk.prompt(one)) for one in asked]
    found = sampler.sample_many(prompts, params, num_samples=GROUP)
    return [
        (
            prompt,
            list(response.sequences),
            [reward(question, talk.text(one.tokens)) for one in response.sequences],
        )
        for question, prompt, response in zip(asked, prompts, found, strict=True)
    ]


def _tested(talk: Talk, sampler: SamplingClient, asked: Sequence[Example], seed: int) -> Tested:
    answered = _answered(talk, sampler, asked, seed)
    return Tested(
        answers=[talk.text(sequences[0].tokens) for _, sequences, _ in answered],
        rewards=[sum(group) / len(group) for _, _, group in answered],
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
