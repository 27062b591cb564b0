from __future__ import annotations

import weakref

from tinsmith.types.buffers import pack
from tinsmith.types.last_list import MOST_IDS, LastList


def kept_of(last: LastList, values: object) -> object:
    """What is found for values that were packed last."""
    copied = last.copied(values)
    numbers, _ = pack(copied, "int32")
    last.keep(numbers, copied)
    return last.take(numbers)


def a_wanted_one() -> LastList:
    last = LastList()
    last.take(pack([0], "int32")[0])
    return last


def test_nothing_is_kept_before_somebody_asks() -> None:
    assert kept_of(LastList(), [1, 2]) is None


def test_the_last_list_is_given_once_to_who_has_its_numbers() -> None:
    last = a_wanted_one()
    values = last.copied([1, 2])
    numbers, _ = pack(values, "int32")
    last.keep(numbers, values)

    assert last.take(pack([1, 2], "int32")[0]) is None  # equal, but another
    assert last.take(numbers) == (1, 2)
    assert last.take(numbers) is None


def test_what_is_kept_does_not_change_with_the_caller_s_list() -> None:
    last, mine = a_wanted_one(), [1, 2]
    values = last.copied(mine)
    numbers, _ = pack(values, "int32")
    last.keep(numbers, values)

    mine[0] = 9

    assert last.take(numbers) == (1, 2)


def test_very_long_lists_and_other_things_than_lists_are_not_kept() -> None:
    last = a_wanted_one()

    assert kept_of(last, range(3)) is None
    assert kept_of(last, [7] * (MOST_IDS + 1)) is None
    assert kept_of(last, [7] * MOST_IDS) == (7,) * MOST_IDS


class Element:
    """Of an array, whose memory it holds."""

    def __index__(self) -> int:
        return 7


def test_elements_of_arrays_are_not_kept() -> None:
    last, elements = a_wanted_one(), [Element(), Element()]
    held = weakref.ref(elements[0])

    values = last.copied(elements)
    last.keep(pack(values, "int32")[0], values)
    del elements, values

    assert held() is None
