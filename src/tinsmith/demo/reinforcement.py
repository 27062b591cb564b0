"""Reinforcement learning: give short, correct answers.

Each question is answered several times. The advantage of an answer is its reward minus the mean
reward of its group, so training favours answers that are better than their group. Held-out
questions are answered in the same way before and after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.demo.tasks import (
    ANSWER_SYSTEM,
    QUESTIONS,
    TEST_QUESTIONS,
    ChatTask,
    TaskExample,
    reward,
)
from tinsmith.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

RANK = 16
GROUP = 8
MAX_ANSWER_TOKENS = 16
LEARNING_RATE = 3e-4


class HeldOutAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to the held-out questions, each asked `GROUP` times."""

    answers: list[str]
    """The first answer to each question."""
    rewards: list[float]
    """The mean reward of each question."""

    @property
    def mean(self) -> float:
        """The mean reward of all answers."""
        return sum(self.rewards) / len(self.rewards)


class ReinforcementResult(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of each step, and the answers to held-out questions before and after."""

    test: list[TaskExample]
    before: HeldOutAnswers
    after: HeldOutAnswers
    rewards: list[float]


def learn_short_answers(
    service: ServiceClient,
    model: str,
    *,
    steps: int,
    questions: int,
    tests: int,
    seed: int,
    on_step: Callable[[list[float]], None],
) -> ReinforcementResult:
    """Sample answers, score them and train on them, for a number of steps.

    Args:
        service: The service to sample and train on.
        model: The base model.
        steps: Number of optimizer steps.
        questions: Number of questions per step, each asked `GROUP` times.
        tests: Number of held-out questions.
        seed: Seed of the questions, the samples and the LoRA weights.
        on_step: Called after each step with the mean rewards so far.
    """
    test = list(TEST_QUESTIONS[:tests])
    training = service.create_lora_training_client(model, rank=RANK, seed=seed)
    task = ChatTask(training.get_tokenizer(), ANSWER_SYSTEM)
    sampler = training.save_weights_and_get_sampling_client()
    before = _test(task, sampler, test, seed)
    rng = random.Random(seed)  # noqa: S311 - questions
    left: list[TaskExample] = []
    rewards: list[float] = []
    for step in range(steps):
        if len(left) < questions:
            left = rng.sample(QUESTIONS, len(QUESTIONS))
        batch, left = left[:questions], left[questions:]
        data: list[Datum] = []
        step_rewards: list[float] = []
        for prompt, sequences, group in _answer(task, sampler, batch, seed + step):
            step_rewards += group
            data += _data(prompt.to_ints(), sequences, group)
        rewards.append(sum(step_rewards) / len(step_rewards))
        if data:
            gradients = training.forward_backward(data, "importance_sampling")
            update = training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            sampler = training.save_weights_and_get_sampling_client()
            gradients.result()
            update.result()
        on_step(rewards)
    after = _test(task, sampler, test, seed)
    return ReinforcementResult(test=test, before=before, after=after, rewards=rewards)


def _answer(
    task: ChatTask, sampler: SamplingClient, examples: Sequence[TaskExample], seed: int
) -> list[tuple[ModelInput, list[SampledSequence], list[float]]]:
    """Each prompt with its sampled answers and the reward of each answer."""
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, seed=seed)
    prompts = [ModelInput.from_ints(task.prompt(example)) for example in examples]
    responses = sampler.sample_many(prompts, params, num_samples=GROUP)
    return [
        (
            prompt,
            list(response.sequences),
            [reward(example, task.text(answer.tokens)) for answer in response.sequences],
        )
        for example, prompt, response in zip(examples, prompts, responses, strict=True)
    ]


def _test(
    task: ChatTask, sampler: SamplingClient, examples: Sequence[TaskExample], seed: int
) -> HeldOutAnswers:
    answered = _answer(task, sampler, examples, seed)
    return HeldOutAnswers(
        answers=[task.text(sequences[0].tokens) for _, sequences, _ in answered],
        rewards=[sum(group) / len(group) for _, _, group in answered],
    )


def _data(
    prompt: list[int], sequences: Sequence[SampledSequence], rewards: Sequence[float]
) -> list[Datum]:
    """Training data for the answers that were better or worse than their group."""
    mean = sum(rewards) / len(rewards)
    data: list[Datum] = []
    for sequence, answer_reward in zip(sequences, rewards, strict=True):
        if answer_reward == mean:
            continue  # its advantage is 0
        answer, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        tokens = prompt + answer
        padding = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": padding + logprobs,
            "advantages": padding + [answer_reward - mean] * len(answer),
        }
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data
