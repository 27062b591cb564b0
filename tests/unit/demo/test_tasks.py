from __future__ import annotations

import json
import random

import pytest

from tinsmith.demo.tasks import QUESTIONS, TEST_QUESTIONS, Example, is_right, reward, sentences


def test_examples_and_tests_share_no_name_and_no_city() -> None:
    """What is right in the test cannot have been learned by heart."""
    chance = random.Random(1)
    taught = [json.loads(one.answer) for one in sentences(chance, 200)]
    tested = [json.loads(one.answer) for one in sentences(chance, 50, is_test=True)]

    for fact in ("name", "city"):
        assert not {one[fact] for one in taught} & {one[fact] for one in tested}


def test_no_question_of_the_test_is_trained_on() -> None:
    trained, tested = ({one.question for one in asked} for asked in (QUESTIONS, TEST_QUESTIONS))

    assert trained
    assert tested
    assert not trained & tested


def test_a_sentence_holds_every_fact_of_its_answer() -> None:
    for example in sentences(random.Random(2), 50):
        assert all(fact in example.question for fact in json.loads(example.answer).values())


def test_the_seed_determines_the_sentences() -> None:
    first, again = (sentences(random.Random(3), 20) for _ in range(2))

    assert first == again != sentences(random.Random(4), 20)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"name": "Uma"}', True),
        ('{ "name":"Uma" }', True),
        ('{"name": "Zoe"}', False),
        ('{"name": "Uma"} and more', False),
        ("Uma", False),
        ("", False),
    ],
)
def test_an_answer_is_judged_by_what_it_says(answer: str, right: bool) -> None:
    assert is_right(Example("A sentence.", '{"name": "Uma"}'), answer) is right


@pytest.mark.parametrize(
    ("answer", "worth"),
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
def test_an_answer_is_worth_something_if_it_is_right_and_short(answer: str, worth: float) -> None:
    assert reward(QUESTIONS[0], answer) == pytest.approx(worth)
