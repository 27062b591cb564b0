"""What of a pass is computed together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinsmith.engines.embedded.pieces import (
    LEAST_SHARED,
    Budget,
    Example,
    Piece,
    cut,
    make_examples,
    make_packs,
    read_tokens,
)
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ImageChunk, ModelInput

BUDGET = Budget(rows=256, saving_rows=1024)
PROMPT = list(range(100, 140))


def _datum(tokens: list[int], targets: Any = None) -> Datum:
    given = [*tokens, 5][1:] if targets is None else targets
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": np.array(given, np.int64)})


def _read(data: list[Datum], vocabulary: int = 10_000, max_context: int = 10_000) -> list[Example]:
    targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in data]
    return make_examples(read_tokens(data, vocabulary, max_context), targets, vocabulary)


def _examples(*sequences: list[int]) -> list[Example]:
    return _read([_datum(one) for one in sequences])


def _sequences(pieces: list[Piece]) -> dict[int, list[int]]:
    """What each example reads, from the rows of its piece; each comes once."""
    found: dict[int, list[int]] = {}
    for piece in pieces:
        for part in piece.parts:
            assert part.example.place not in found
            assert piece.positions_T[part.rows_N].tolist() == list(range(len(part.rows_N)))
            found[part.example.place] = piece.tokens_T[part.rows_N].tolist()
    return found


def test_examples_follow_each_other_up_to_the_budget() -> None:
    """In their order, each in one piece."""
    sequences = [[n] * 100 for n in range(1, 8)]

    pieces = cut(_examples(*sequences), BUDGET)

    assert [piece.rows for piece in pieces] == [200, 200, 200, 100]
    assert _sequences(pieces) == dict(enumerate(sequences))
    assert not any(piece.saves_memory for piece in pieces)


def test_a_long_example_is_a_piece_of_its_own_that_saves_memory() -> None:
    """Nothing is cut in two."""
    pieces = cut(_examples([1, 2], [3] * 300, [4, 5]), BUDGET)

    assert [(piece.rows, piece.saves_memory) for piece in pieces] == [
        (2, False),
        (300, True),
        (2, False),
    ]


def test_a_shared_prompt_comes_once() -> None:
    """Its rows are first, and the tails see them."""
    sequences = [[*PROMPT, n, n + 1, n + 2] for n in range(16)]

    [piece] = cut(_examples(*sequences), BUDGET)

    assert piece.rows == 40 + 16 * 3
    assert _sequences([piece]) == dict(enumerate(sequences))
    assert piece.ranges[0] == (0, 40, None)
    assert all(one.prefix == (0, 40) for one in piece.ranges[1:])


def test_groups_are_found_among_others_and_whatever_their_order() -> None:
    """What saves most is shared: the prompts, not the few tokens that all of them begin with."""
    head = list(range(1, 34))
    prompts = [[*head, *[50 + n] * 30] for n in range(3)]
    sequences = [[*prompts[n % 3], 200 + n] for n in range(12)]

    pieces = cut(_examples(*sequences), BUDGET)

    assert sum(piece.rows for piece in pieces) == 3 * 63 + 12
    assert _sequences(pieces) == dict(enumerate(sequences))


def test_a_short_common_beginning_is_not_shared() -> None:
    """It would cost more than it saves."""
    prompt = PROMPT[: LEAST_SHARED - 1]

    [piece] = cut(_examples([*prompt, 1], [*prompt, 2]), BUDGET)

    assert piece.rows == 2 * LEAST_SHARED
    assert [one.prefix for one in piece.ranges] == [None, None]


def test_equal_examples_and_beginnings_of_others_need_no_rows_of_their_own() -> None:
    """A tail may be empty."""
    sequences = [PROMPT, PROMPT, [*PROMPT, 7]]

    [piece] = cut(_examples(*sequences), BUDGET)

    assert piece.rows == 41
    assert _sequences([piece]) == dict(enumerate(sequences))
    assert len(piece.ranges) == 2


def test_many_nested_examples_do_not_exhaust_the_stack() -> None:
    """As in a long conversation that is trained on turn by turn."""
    sequences = [[7] * (LEAST_SHARED + n) for n in range(1500)]

    pieces = cut(_examples(*sequences), Budget(1 << 20, 1 << 20))

    assert _sequences(pieces) == dict(enumerate(sequences))


@pytest.mark.parametrize(("shared", "tails"), [(40, 100), (200, 30)])
def test_a_group_beyond_the_budget_is_parted(shared: int, tails: int) -> None:
    """Into whole pieces if the prompt is short, and else into few that save memory."""
    sequences = [[*range(300, 300 + shared), *[n] * 16] for n in range(tails)]

    pieces = cut(_examples(*sequences), BUDGET)

    assert _sequences(pieces) == dict(enumerate(sequences))
    is_long = shared > 100
    assert all(piece.saves_memory == is_long for piece in pieces)
    assert all(piece.rows <= (1024 if is_long else 256) for piece in pieces)
    assert len(pieces) == (1 if is_long else 8)


def test_targets_of_a_shared_prompt_are_looked_up_once() -> None:
    """Equal ones; where the next tokens differ each has its own."""
    [piece] = cut(_examples([*PROMPT, 1], [*PROMPT, 2]), BUDGET)

    [found] = piece.lookups()

    assert len(found.rows_R) == 39 + 2 + 2
    tokens, targets = [*PROMPT, 1, *PROMPT, 2], [*PROMPT[1:], 1, 5, *PROMPT[1:], 2, 5]
    assert sorted(found.cells_CK[:, 0]) == list(range(82))
    assert (np.diff(found.row_of_C) >= 0).all()
    for row, cell in zip(found.row_of_C, found.cells_CK[:, 0], strict=True):
        assert found.targets_RK[row] == targets[cell]
        assert piece.tokens_T[found.rows_R[row]] == tokens[cell]


def test_targets_of_several_columns_are_apart_from_those_of_one() -> None:
    """Each table has rows of one width."""
    data = [_datum([1, 2]), _datum([3, 4], [[1, 2, 3], [4, 5, 6]]), _datum([5])]
    [piece] = cut(_read(data), BUDGET)

    narrow, wide = piece.lookups()

    assert narrow.targets_RK.tolist() == [[2], [5], [5]]
    assert wide.targets_RK.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert wide.rows_R.tolist() == [2, 3]
    assert narrow.cells_CK.tolist() == [[0], [1], [8]]
    assert wide.cells_CK.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_an_empty_datum_takes_no_rows() -> None:
    """It is there all the same."""
    pieces = cut(_examples([], [1, 2]), BUDGET)

    assert _sequences(pieces) == {0: [], 1: [1, 2]}


def test_pieces_of_several_works_share_packs_and_stay_in_order() -> None:
    """Sums over a work's pieces are formed in the same order whoever shares the packs."""
    works = [
        (name, cut(_examples(*[[n] * size for n in range(1, 4)]), BUDGET))
        for name, size in (("a", 100), ("b", 20), ("c", 10), ("d", 300))
    ]

    packs = make_packs(works, BUDGET)

    for name, pieces in works:
        assert [one for pack in packs for owner, one in pack.pieces if owner == name] == pieces
    assert [[owner for owner, _ in pack.pieces] for pack in packs[:2]] == [["a", "c"], ["a", "b"]]
    assert all(pack.rows <= 256 or len(pack.pieces) == 1 for pack in packs)
    assert [pack.saves_memory for pack in packs] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("datum", "words"),
    [
        (_datum([1, 2], [1, 100]), "target 100"),
        (_datum([1, 200]), "token 200"),
        (_datum([1, 2], [1, -1]), "target -1"),
        (_datum([1] * 60), "at most 50"),
        (
            Datum(
                ModelInput([ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                {"target_tokens": [1]},
            ),
            "image",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(datum: Datum, words: str) -> None:
    """The message names the datum and what is wrong."""
    with pytest.raises(ValidationError, match=words) as caught:
        _read([_datum([1, 2]), datum], vocabulary=100, max_context=50)

    assert "datum 1" in str(caught.value)
