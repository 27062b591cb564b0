"""Each model's line of commands, and which of them may run next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.made import a_command
from tinsmith.ledger.records import LineId
from tinsmith.scheduler.order import PASSES, Gap, Order

M, N = LineId("m"), LineId("n")


def _order(*lines: LineId) -> Order:
    order = Order()
    for line in lines or (M,):
        order.begin(line, 0)
    return order


def test_second_command_waits_for_the_first() -> None:
    """A model's next command may run once the one before it has ended."""
    first, second = a_command(number=0), a_command(number=1)
    order = _order()
    order.add(second, 0.0)
    before = order.ready()
    order.add(first, 0.0)

    assert before == []
    assert order.head(M) == first
    order.start(M)
    assert order.ready() == []
    order.finish(M, [first], 0.0)
    assert order.head(M) == second


def test_lines_are_free_of_each_other() -> None:
    """What one waits for does not hold up another."""
    order = _order(M, N)
    order.add(a_command("m", 1), 0.0)
    order.add(a_command("n", 0), 0.0)

    assert order.ready() == [N]


@given(st.permutations(range(12)))
def test_any_order_of_arrival_gives_the_order_of_numbers(numbers: list[int]) -> None:
    """Each is ready exactly when all before it have ended."""
    order = _order()
    for number in numbers:
        assert order.add(a_command(number=number), 0.0)

    ran = []
    while order.ready():
        head = order.head(M)
        order.start(M)
        order.finish(M, [head], 0.0)
        ran.append(head.seq_id)

    assert ran == list(range(12))
    assert len(order) == 0


def test_a_gap_is_told_with_the_time_since_when() -> None:
    """From the moment when something waits for it."""
    order = _order()
    order.add(a_command(number=3), 5.0)
    order.add(a_command(number=2), 6.0)

    assert order.gaps() == [Gap(M, 0, 2, 5.0)]


def test_a_line_that_is_empty_or_busy_has_no_gap() -> None:
    """Nothing waits for the missing number, or not yet."""
    order = _order()
    empty = order.gaps()
    order.add(a_command(number=0), 0.0)
    order.add(a_command(number=2), 0.0)
    order.start(M)
    busy = order.gaps()
    order.finish(M, [a_command(number=0)], 9.0)

    assert empty == busy == []
    assert order.gaps() == [Gap(M, 1, 2, 9.0)]


def test_a_line_goes_on_beyond_a_gap_when_it_is_told_to() -> None:
    """And what comes late is refused; a line never goes back."""
    order = _order()
    order.add(a_command(number=2), 0.0)
    order.skip_to(M, 2, 1.0)
    order.skip_to(M, 1, 1.0)

    assert order.gaps() == []
    assert order.head(M).seq_id == order.position(M) == 2
    assert not order.add(a_command(number=1), 1.0)


def test_a_command_is_in_its_line_once() -> None:
    """The same number again is refused."""
    order = _order()

    assert order.add(a_command(number=0), 0.0)
    assert not order.add(a_command(number=0), 0.0)
    assert len(order) == 1


def test_a_dropped_command_counts_as_done() -> None:
    """The next one is not held up by it, whether it was the head or behind it."""
    order = _order()
    for number in range(4):
        order.add(a_command(number=number), 0.0)

    assert order.drop(M, 2, 0.0)
    assert order.drop(M, 0, 0.0)
    assert not order.drop(M, 9, 0.0)
    assert order.head(M).seq_id == 1
    order.start(M)
    order.finish(M, [a_command(number=1)], 0.0)
    assert order.head(M).seq_id == 3


def test_a_command_that_runs_is_not_dropped() -> None:
    """It is too late for that."""
    order = _order()
    order.add(a_command(number=0), 0.0)
    order.start(M)

    assert not order.drop(M, 0, 0.0)


def test_a_line_begins_where_it_was_left() -> None:
    """What ended before, also out of order, is not waited for."""
    order = Order()
    order.begin(M, 3, done=[1, 3, 4, 7])
    order.add(a_command(number=5), 0.0)

    assert order.head(M).seq_id == 5
    assert not order.add(a_command(number=7), 0.0)


def test_a_run_ends_at_another_kind_and_at_a_gap() -> None:
    """Only commands that follow each other may share a call."""
    order = _order(M, N)
    for number, kind in enumerate(["forward_backward", "forward", "optim_step", "forward"]):
        order.add(a_command(number=number, kind=kind), 0.0)
    for number in (0, 2):
        order.add(a_command("n", number), 0.0)

    assert [one.seq_id for one in order.run_of(M, PASSES)] == [0, 1]
    assert [one.seq_id for one in order.run_of(N, PASSES)] == [0]


def test_a_forgotten_line_leaves_nothing() -> None:
    """Neither waiting commands nor gaps."""
    order = _order(M, N)
    order.add(a_command("m", 1), 0.0)
    order.add(a_command("n", 0), 0.0)
    order.forget(M)
    order.forget(N)
    order.finish(N, [a_command("n", 0)], 0.0)

    assert (len(order), order.lines(), order.ready(), order.gaps()) == (0, 0, [], [])


def test_a_line_of_which_something_runs_is_not_moved_and_has_no_gap() -> None:
    """Such as a snapshot of it: what is missing may come meanwhile."""
    order = _order()
    order.start(M)
    order.add(a_command(number=2), 1.0)

    order.skip_to(M, 2, 2.0)

    assert order.position(M) == 0
    assert order.gaps() == []
    order.finish(M, [], 3.0)
    assert order.gaps() == [Gap(M, 0, 2, 3.0)]
