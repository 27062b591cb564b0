from __future__ import annotations

import json
import random

import pytest

from tinsmith.demo.tasks import (
    QUESTIONS,
    TEST_QUESTIONS,
    TaskExample,
    is_correct,
    reward,
    sentences,
)


def test_examples_and_tests_share_no_name_and_no_city() -> None:
    """A correct test answer cannot have been memorized."""
    rng = random.Random(1)
    trained = [json.loads(one.answer) for one in sentences(rng, 200)]
    tested = [json.loads(one.answer) for one in sentences(rng, 50, is_test=True)]

    for fact in ("name", "city"):
        assert not {one[fact] for one in trained} & {one[fact] for one in tested}


def test_no_test_question_is_trained_on() -> None:
    trained, tested = ({one.question for one in asked} for asked in (QUESTIONS, TEST_QUESTIONS))

    assert trained
    assert tested
    assert not trained & tested


def test_a_sentence_contains_every_fact_of_its_answer() -> None:
    for example in sentences(random.Random(2), 50):
        assert all(fact in example.question for fact in json.loads(example.answer).values())


def test_the_seed_determines_the_sentences() -> None:
    first, again = (sentences(random.Random(3), 20) for _ in range(2))

    assert first == again != sentences(random.Random(4), 20)


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ('{"name": "Uma"}', True),
        ('{ "name":"Uma" }', True),
        ('{"name": "Zoe"}', False),
        ('{"name": "Uma"} and more', False),
        ("Uma", False),
        ("", False),
    ],
)
def test_an_answer_is_correct_if_it_is_json_with_the_same_facts(answer: str, correct: bool) -> None:
    assert is_correct(TaskExample("A sentence.", '{"name": "Uma"}'), answer) is correct


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", 1.0),
        ("Paris.", 1.0),
        ("It is Paris!", 1.0),
        ("The capital of France is the city of Paris, which", 0.0),
        ("Rome", 0.0),
        ("Parisian", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_that_is_correct_and_short_is_rewarded(answer: str, expected: float) -> None:
    assert reward(QUESTIONS[0], answer) == pytest.approx(expected)
