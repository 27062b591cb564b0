"""The two tasks that the model learns, and how its answers are scored.

*Sentences to JSON* is learned from examples. The names and cities in the test set occur in no
training example, so memorizing them does not help.

*Short answers* is learned from rewards alone: 1 for an answer that is correct and short, else 0.
The model knows most of the answers but tends to ramble. Test questions are not trained on.

A `ChatTask` is a task as the model sees it: prompts and training data in its own chat template.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tinsmith.client.sampling import SamplingClient
from tinsmith.types import Datum, ModelInput, SamplingParams


class TaskExample(NamedTuple):
    """A question and its correct answer."""

    question: str
    answer: str


JSON_SYSTEM = "You turn a sentence into JSON."
ANSWER_SYSTEM = "You answer questions."
MAX_WORDS = 8

_NAMES = [
    "Ada",
    "Boris",
    "Chen",
    "Dora",
    "Emil",
    "Fatima",
    "Goran",
    "Hana",
    "Igor",
    "Jonas",
    "Keiko",
    "Lena",
    "Marco",
    "Nadia",
    "Oskar",
    "Priya",
    "Rosa",
    "Stefan",
    "Tara",
    "Viktor",
]
_TEST_NAMES = ["Uma", "Wanda", "Xenia", "Yusuf", "Zoe", "Quinn"]
_CITIES = [
    "Lisbon",
    "Oslo",
    "Kyoto",
    "Quito",
    "Dakar",
    "Prague",
    "Austin",
    "Lima",
    "Delhi",
    "Turin",
    "Cairo",
    "Perth",
]
_TEST_CITIES = ["Hanoi", "Bergen", "Malaga", "Riga"]
_JOBS = [
    "baker",
    "pilot",
    "nurse",
    "welder",
    "painter",
    "lawyer",
    "farmer",
    "teacher",
    "sailor",
    "plumber",
    "tailor",
    "judge",
]
_SENTENCES = (
    "{name} is a {job} from {city}.",
    "A {job} called {name} lives in {city}.",
    "In {city} there is a {job} whose name is {name}.",
    "{name}, who lives in {city}, works as a {job}.",
)

_CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Russia": "Moscow",
    "China": "Beijing",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Canada": "Ottawa",
    "Hungary": "Budapest",
    "England": "London",
    "Norway": "Oslo",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "South Korea": "Seoul",
}
_TEST_CAPITALS = {
    "Italy": "Rome",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Egypt": "Cairo",
    "Portugal": "Lisbon",
    "Thailand": "Bangkok",
    "Austria": "Vienna",
    "Greece": "Athens",
}


def _questions(capitals: dict[str, str]) -> tuple[TaskExample, ...]:
    return tuple(
        TaskExample(f"What is the capital of {country}?", city.lower())
        for country, city in capitals.items()
    )


QUESTIONS = _questions(_CAPITALS)
"""Trained on."""
TEST_QUESTIONS = _questions(_TEST_CAPITALS)
"""Held out: asked before and after training."""
REWARD = f"1 if the answer names the capital in at most {MAX_WORDS} words, else 0"


def sentences(rng: random.Random, count: int, *, is_test: bool = False) -> list[TaskExample]:
    """Random sentences, each with its facts as JSON."""
    names = _TEST_NAMES if is_test else _NAMES
    cities = _TEST_CITIES if is_test else _CITIES
    examples: list[TaskExample] = []
    for _ in range(count):
        facts = {
            "name": rng.choice(names),
            "job": rng.choice(_JOBS),
            "city": rng.choice(cities),
        }
        examples.append(TaskExample(rng.choice(_SENTENCES).format(**facts), json.dumps(facts)))
    return examples


def is_correct(example: TaskExample, answer: str) -> bool:
    """Whether an answer is JSON with exactly the facts of the sentence."""
    try:
        return bool(json.loads(answer) == json.loads(example.answer))
    except ValueError:
        return False


def reward(example: TaskExample, answer: str) -> float:
    """Score an answer as `REWARD` says."""
    words = re.findall(r"[^\W_]+", answer.lower())
    return 1.0 if example.answer in words and len(words) <= MAX_WORDS else 0.0


MAX_ANSWER_TOKENS = 40


class ChatTask:
    """Turns the examples of one task into tokens, and tokens into answers."""

    def __init__(self, tokenizer: Any, system: str) -> None:
        self._tokenizer = tokenizer
        self._system = system

    def prompt(self, example: TaskExample) -> list[int]:
        """The tokens up to where the answer begins."""
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": example.question},
        ]
        found: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return found

    def datum(self, example: TaskExample) -> Datum:
        """The question and its correct answer; only the answer's tokens have a loss."""
        prompt = self.prompt(example)
        answer = [*self._tokenizer.encode(example.answer), self._tokenizer.eos_token_id]
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        return Datum(
            ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The decoded answer, without the end-of-turn token."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()

    def answers(self, sampler: SamplingClient, examples: Sequence[TaskExample]) -> list[str]:
        """The greedy answer to each question."""
        params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
        prompts = [ModelInput.from_ints(self.prompt(example)) for example in examples]
        responses = sampler.sample_many(prompts, params)
        return [self.text(response.sequences[0].tokens) for response in responses]
