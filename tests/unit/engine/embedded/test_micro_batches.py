"""What of a pass is computed together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinsmith.engine.embedded.micro_batches import (
    LEAST_SHARED,
    MicroBatch,
    RowBudget,
    TrainingExample,
    make_examples,
    pack_micro_batches,
    read_tokens,
    split_examples,
)
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ImageChunk, ModelInput

BUDGET = RowBudget(rows=256, recompute_rows=1024)
PROMPT = list(range(100, 140))


def _datum(tokens: list[int], targets: Any = None) -> Datum:
    given = [*tokens, 5][1:] if targets is None else targets
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": np.array(given, np.int64)})


def _read(
    data: list[Datum], vocabulary: int = 10_000, max_context: int = 10_000
) -> list[TrainingExample]:
    targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in data]
    return make_examples(read_tokens(data, vocabulary, max_context), targets, vocabulary)


def _examples(*sequences: list[int]) -> list[TrainingExample]:
    return _read([_datum(one) for one in sequences])


def _sequences(micro_batches: list[MicroBatch]) -> dict[int, list[int]]:
    """What each example reads, from the rows of its piece; each comes once."""
    found: dict[int, list[int]] = {}
    for micro_batch in micro_batches:
        for part in micro_batch.parts:
            assert part.example.place not in found
            assert micro_batch.positions_T[part.rows_N].tolist() == list(range(len(part.rows_N)))
            found[part.example.place] = micro_batch.tokens_T[part.rows_N].tolist()
    return found


def test_examples_are_packed_in_order_up_to_the_budget() -> None:
    """In their order, each in one piece."""
    sequences = [[n] * 100 for n in range(1, 8)]

    micro_batches = split_examples(_examples(*sequences), BUDGET)

    assert [micro_batch.rows for micro_batch in micro_batches] == [200, 200, 200, 100]
    assert _sequences(micro_batches) == dict(enumerate(sequences))
    assert not any(micro_batch.recomputes for micro_batch in micro_batches)


def test_a_long_example_is_a_micro_batch_of_its_own_that_recomputes() -> None:
    """Nothing is cut in two."""
    micro_batches = split_examples(_examples([1, 2], [3] * 300, [4, 5]), BUDGET)

    assert [(micro_batch.rows, micro_batch.recomputes) for micro_batch in micro_batches] == [
        (2, False),
        (300, True),
        (2, False),
    ]


def test_a_shared_prompt_is_packed_once() -> None:
    """Its rows are first, and the tails see them."""
    sequences = [[*PROMPT, n, n + 1, n + 2] for n in range(16)]

    [micro_batch] = split_examples(_examples(*sequences), BUDGET)

    assert micro_batch.rows == 40 + 16 * 3
    assert _sequences([micro_batch]) == dict(enumerate(sequences))
    assert micro_batch.ranges[0] == (0, 40, None)
    assert all(one.prefix == (0, 40) for one in micro_batch.ranges[1:])


def test_groups_with_a_shared_prompt_are_found_in_any_order() -> None:
    """What saves most is shared: the prompts, not the few tokens that all of them begin with."""
    head = list(range(1, 34))
    prompts = [[*head, *[50 + n] * 30] for n in range(3)]
    sequences = [[*prompts[n % 3], 200 + n] for n in range(12)]

    micro_batches = split_examples(_examples(*sequences), BUDGET)

    assert sum(micro_batch.rows for micro_batch in micro_batches) == 3 * 63 + 12
    assert _sequences(micro_batches) == dict(enumerate(sequences))


def test_a_short_common_prefix_is_not_shared() -> None:
    """It would cost more than it saves."""
    prompt = PROMPT[: LEAST_SHARED - 1]

    [micro_batch] = split_examples(_examples([*prompt, 1], [*prompt, 2]), BUDGET)

    assert micro_batch.rows == 2 * LEAST_SHARED
    assert [one.prefix for one in micro_batch.ranges] == [None, None]


def test_duplicate_examples_and_prefixes_of_others_need_no_extra_rows() -> None:
    """A tail may be empty."""
    sequences = [PROMPT, PROMPT, [*PROMPT, 7]]

    [micro_batch] = split_examples(_examples(*sequences), BUDGET)

    assert micro_batch.rows == 41
    assert _sequences([micro_batch]) == dict(enumerate(sequences))
    assert len(micro_batch.ranges) == 2


def test_many_nested_examples_do_not_exhaust_the_stack() -> None:
    """As in a long conversation that is trained on turn by turn."""
    sequences = [[7] * (LEAST_SHARED + n) for n in range(1500)]

    micro_batches = split_examples(_examples(*sequences), RowBudget(1 << 20, 1 << 20))

    assert _sequences(micro_batches) == dict(enumerate(sequences))


@pytest.mark.parametrize(("shared", "tails"), [(40, 100), (200, 30)])
def test_a_group_beyond_the_budget_is_split(shared: int, tails: int) -> None:
    """Into whole pieces if the prompt is short, and else into few that save memory."""
    sequences = [[*range(300, 300 + shared), *[n] * 16] for n in range(tails)]

    micro_batches = split_examples(_examples(*sequences), BUDGET)

    assert _sequences(micro_batches) == dict(enumerate(sequences))
    is_long = shared > 100
    assert all(micro_batch.recomputes == is_long for micro_batch in micro_batches)
    assert all(micro_batch.rows <= (1024 if is_long else 256) for micro_batch in micro_batches)
    assert len(micro_batches) == (1 if is_long else 8)


def test_targets_of_a_shared_prompt_are_looked_up_once() -> None:
    """Equal ones; where the next tokens differ each has its own."""
    [micro_batch] = split_examples(_examples([*PROMPT, 1], [*PROMPT, 2]), BUDGET)

    [found] = micro_batch.lookups()

    assert len(found.rows_R) == 39 + 2 + 2
    tokens, targets = [*PROMPT, 1, *PROMPT, 2], [*PROMPT[1:], 1, 5, *PROMPT[1:], 2, 5]
    assert sorted(found.cells_CK[:, 0]) == list(range(82))
    assert (np.diff(found.row_of_C) >= 0).all()
    for row, cell in zip(found.row_of_C, found.cells_CK[:, 0], strict=True):
        assert found.targets_RK[row] == targets[cell]
        assert micro_batch.tokens_T[found.rows_R[row]] == tokens[cell]


def test_targets_with_several_columns_are_looked_up_separately() -> None:
    """Each table has rows of one width."""
    data = [_datum([1, 2]), _datum([3, 4], [[1, 2, 3], [4, 5, 6]]), _datum([5])]
    [micro_batch] = split_examples(_read(data), BUDGET)

    narrow, wide = micro_batch.lookups()

    assert narrow.targets_RK.tolist() == [[2], [5], [5]]
    assert wide.targets_RK.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert wide.rows_R.tolist() == [2, 3]
    assert narrow.cells_CK.tolist() == [[0], [1], [8]]
    assert wide.cells_CK.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_an_empty_datum_takes_no_rows() -> None:
    """It is there all the same."""
    micro_batches = split_examples(_examples([], [1, 2]), BUDGET)

    assert _sequences(micro_batches) == {0: [], 1: [1, 2]}


def test_micro_batches_of_several_works_share_batches_and_stay_in_order() -> None:
    """Sums over a work's pieces are formed in the same order whoever shares the packs."""
    works = [
        (name, split_examples(_examples(*[[n] * size for n in range(1, 4)]), BUDGET))
        for name, size in (("a", 100), ("b", 20), ("c", 10), ("d", 300))
    ]

    batches = pack_micro_batches(works, BUDGET)

    for name, micro_batches in works:
        assert [
            one for batch in batches for owner, one in batch.micro_batches if owner == name
        ] == micro_batches
    assert [[owner for owner, _ in batch.micro_batches] for batch in batches[:2]] == [
        ["a", "c"],
        ["a", "b"],
    ]
    assert all(batch.rows <= 256 or len(batch.micro_batches) == 1 for batch in batches)
    assert [batch.recomputes for batch in batches] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("datum", "words"),
    [
        (_datum([1, 2], [1, 100]), "target 100"),
        (_datum([1, 200]), "token 200"),
        (_datum([1, 2], [1, -1]), "target -1"),
        (_datum([1] * 60), "context is 50"),
        (
            Datum(
                ModelInput([ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                {"target_tokens": [1]},
            ),
            "image",
        ),
    ],
)
def test_invalid_data_is_rejected_with_its_position(datum: Datum, words: str) -> None:
    """The message names the datum and what is wrong."""
    with pytest.raises(ValidationError, match=words) as caught:
        _read([_datum([1, 2]), datum], vocabulary=100, max_context=50)

    assert "datum 1" in str(caught.value)
