"""The formula that stands for a network: a distribution, drawn from by seed, that learns."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter

import pytest

from tinsmith.testing.arithmetic import Weights

VOCABULARY = 50


def weights() -> Weights:
    return Weights("a/model", VOCABULARY)


def taught() -> Weights:
    made = weights()
    made.learn({(1, 7): 1.0, (1, 8): 0.5, (2, 7): 1.0}, step=1.0)
    return made


@pytest.mark.parametrize("made", [weights(), taught()])
def test_probabilities_sum_to_one(made: Weights) -> None:
    """Over all numbers; those outside of the vocabulary have 1 / (vocabulary + 1) of the base."""
    inside = math.fsum(math.exp(lp) for _, lp in made.best(1, VOCABULARY))
    outside = math.fsum(
        math.exp(lp) for lp in made.logprobs((1, token) for token in range(VOCABULARY, 20_000))
    )

    assert inside + outside == pytest.approx(1.0, abs=1e-4)


def test_logprobs_are_float32_numbers() -> None:
    for lp in taught().logprobs((1, token) for token in range(20)):
        assert struct.unpack("f", struct.pack("f", lp))[0] == lp


def test_learning_makes_a_token_likelier_and_others_less_likely() -> None:
    before, after = weights(), taught()

    assert after.logprobs([(1, 7)]) > before.logprobs([(1, 7)])
    assert after.logprobs([(1, 30)]) < before.logprobs([(1, 30)])
    assert after.logprobs([(3, 7)]) == before.logprobs([(3, 7)])


def test_what_was_learned_can_be_unlearned_and_no_more_than_that() -> None:
    made = taught()

    made.learn({(1, 7): -100.0, (1, 8): -100.0}, step=1.0)

    assert made.logprobs([(1, 7), (1, 30)]) == pytest.approx(weights().logprobs([(1, 7), (1, 30)]))


def test_copy_is_changed_apart() -> None:
    made = taught()
    copied = made.copy()

    made.learn({(1, 7): 1.0}, step=1.0)

    assert copied.logprobs([(1, 7)]) == taught().logprobs([(1, 7)]) != made.logprobs([(1, 7)])


def test_best_are_the_likeliest_in_order() -> None:
    made = taught()
    everything = zip(
        range(VOCABULARY), made.logprobs((1, token) for token in range(VOCABULARY)), strict=True
    )

    expected = sorted(everything, key=lambda cell: (-cell[1], cell[0]))

    assert made.best(1, 5) == expected[:5]
    assert len(made.best(1, 1000)) == VOCABULARY


def test_draws_follow_the_probabilities() -> None:
    made, chance = taught(), random.Random(0)

    drawn = Counter(made.draw(1, chance) for _ in range(20_000))

    for token, lp in made.best(1, 5):
        assert drawn[token] / 20_000 == pytest.approx(math.exp(lp), abs=0.02)
    assert all(0 <= token < VOCABULARY for token in drawn)


def test_draw_keeps_to_top_k_and_top_p() -> None:
    made, chance = taught(), random.Random(0)
    best = [token for token, _ in made.best(1, 3)]

    of_three = {made.draw(1, chance, top_k=3) for _ in range(300)}
    likeliest = {made.draw(1, chance, top_p=0.01) for _ in range(50)}

    assert of_three == set(best)
    assert likeliest == {best[0]}


def test_temperature_sharpens_and_flattens() -> None:
    made, best = taught(), taught().best(1, 1)[0][0]

    def share_of_best(temperature: float) -> float:
        chance = random.Random(0)
        return sum(made.draw(1, chance, temperature=temperature) == best for _ in range(500))

    assert share_of_best(0.0) == 500
    assert share_of_best(1e-6) == 500
    assert share_of_best(0.5) > share_of_best(1.0) > share_of_best(5.0)


def test_base_models_differ() -> None:
    assert weights().best(1, 1) != Weights("another/model", VOCABULARY).best(1, 1)
