"""The two tasks that the model learns, and how its answers are scored.

*Sentences to JSON* is learned from examples. The names and cities of the test are in none of them,
so that what is learned is the form and not the words.

*Short answers* is learned from rewards alone: an answer is worth 1 if it is correct and short, else
0. The model knows most of the answers and often talks past them. It is trained on some questions
and tested on others.
"""

from __future__ import annotations

import json
import random
import re
from typing import NamedTuple


class Example(NamedTuple):
    """A request, and what the answer should be."""

    question: str
    answer: str


JSON_SYSTEM = "You turn a sentence into JSON."
ANSWER_SYSTEM = "You answer questions."
MOST_WORDS = 8

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
_OTHER_NAMES = ["Uma", "Wanda", "Xenia", "Yusuf", "Zoe", "Quinn"]
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
_OTHER_CITIES = ["Hanoi", "Bergen", "Malaga", "Riga"]
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
_OTHER_CAPITALS = {
    "Italy": "Rome",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Egypt": "Cairo",
    "Portugal": "Lisbon",
    "Thailand": "Bangkok",
    "Austria": "Vienna",
    "Greece": "Athens",
}


def _asked(capitals: dict[str, str]) -> tuple[Example, ...]:
    return tuple(
        Example(f"What is the capital of {country}?", city.lower())
        for country, city in capitals.items()
    )


QUESTIONS = _asked(_CAPITALS)
"""What is trained on."""
TEST_QUESTIONS = _asked(_OTHER_CAPITALS)
"""Held out: asked before and after, and never trained on."""
REWARD = f"1 if the answer names the capital in at most {MOST_WORDS} words, else 0"


def sentences(chance: random.Random, count: int, *, is_test: bool = False) -> list[Example]:
    """Sentences with the JSON that says the same."""
    names = _OTHER_NAMES if is_test else _NAMES
    cities = _OTHER_CITIES if is_test else _CITIES
    made: list[Example] = []
    for _ in range(count):
        facts = {
            "name": chance.choice(names),
            "job": chance.choice(_JOBS),
            "city": chance.choice(cities),
        }
        made.append(Example(chance.choice(_SENTENCES).format(**facts), json.dumps(facts)))
    return made


def is_right(example: Example, answer: str) -> bool:
    """Whether an answer is JSON, and says what the sentence says and no more."""
    try:
        return bool(json.loads(answer) == json.loads(example.answer))
    except ValueError:
        return False


def reward(example: Example, answer: str) -> float:
    """As `REWARD` says."""
    words = re.findall(r"[^\W_]+", answer.lower())
    return 1.0 if example.answer in words and len(words) <= MOST_WORDS else 0.0
