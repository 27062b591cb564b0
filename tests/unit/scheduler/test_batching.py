"""Which heads of lines share one call of the engine."""

from __future__ import annotations

from collections import Counter

from tests.unit.scheduler.made import a_command
from tinsmith.ledger.records import Command, LineId
from tinsmith.scheduler.batching import BYTES_PER_TOKEN, Batch, choose_batch
from tinsmith.scheduler.fairness import Shares
from tinsmith.scheduler.order import Order


def _order(*commands: Command) -> Order:
    order = Order()
    for command in commands:
        order.begin(command.line, 0)
        order.add(command, 0.0)
    return order


def _choose(
    order: Order, *, tokens: int = 1000, commands: int = 100, shares: Shares | None = None
) -> Batch | None:
    return choose_batch(
        order,
        shares or Shares(),
        lambda line: "other" if line.startswith("other") else "base",
        most_tokens=tokens,
        most_commands=commands,
    )


def _chosen(order: Order, *, tokens: int = 1000, commands: int = 100) -> list[tuple[str, int]]:
    batch = _choose(order, tokens=tokens, commands=commands)
    return [] if batch is None else [(one.line, one.seq_id) for one in batch.commands]


def _sized(line: str, number: int = 0, *, tokens: int, tenant: str = "t") -> Command:
    return a_command(line, number, payload_bytes=tokens * BYTES_PER_TOKEN, tenant=tenant)


def test_heads_of_different_lines_share_a_call() -> None:
    """Where their base model and their sort are the same."""
    order = _order(
        a_command("a"),
        a_command("b", kind="forward"),
        a_command("c", kind="optim_step"),
        a_command("other"),
        a_command("d", kind="save_weights"),
    )

    assert _chosen(order) == [("a", 0), ("b", 0)]


def test_nothing_is_chosen_where_nothing_can_be_trained() -> None:
    """Saves and creations are none of its business."""
    assert _choose(_order(a_command(kind="save_weights"))) is None
    assert _choose(Order()) is None


def test_adjacent_passes_of_a_line_share_a_call_in_order() -> None:
    """Up to the step that follows them."""
    kinds = ["forward_backward", "forward_backward", "optim_step", "forward_backward"]
    order = _order(*(a_command("a", n, kind=kind) for n, kind in enumerate(kinds)))

    assert _chosen(order) == [("a", 0), ("a", 1)]


def test_the_budget_is_kept_unless_one_alone_exceeds_it() -> None:
    """A larger command runs by itself."""
    small = _order(*(_sized(f"m{n}", tokens=300) for n in range(5)))
    large = _order(_sized("huge", tokens=5000), _sized("small", tokens=1))

    assert len(_chosen(small)) == 3
    assert _chosen(large) == [("huge", 0)]


def test_what_does_not_fit_does_not_keep_out_another_tenants() -> None:
    """The rest of the budget goes to whoever has something small enough."""
    order = _order(
        _sized("a", tokens=600, tenant="a"),
        _sized("b", tokens=600, tenant="b"),
        _sized("c", tokens=300, tenant="c"),
    )

    assert _chosen(order) == [("a", 0), ("c", 0)]


def test_there_are_at_most_so_many_commands() -> None:
    """However small they are."""
    order = _order(*(a_command(f"m{n}") for n in range(9)))

    assert len(_chosen(order, commands=4)) == 4


def test_a_tenants_one_command_is_in_the_first_batch() -> None:
    """Before most of the other's hundred."""
    order = _order(
        *(_sized(f"m{n}", tokens=100, tenant="many") for n in range(100)),
        _sized("one", tokens=100, tenant="one"),
    )

    assert ("one", 0) in _chosen(order, tokens=400)


def test_a_tenants_lines_take_turns() -> None:
    """One long line does not keep out its neighbour."""
    order = _order(*(_sized("long", n, tokens=100) for n in range(10)), _sized("short", tokens=100))

    assert ("short", 0) in _chosen(order, tokens=400)


def test_tenants_get_equal_amounts_over_many_batches() -> None:
    """Whatever the sizes of what they ask."""
    shares, given, order = Shares(), Counter[str](), Order()
    sizes = {"small": 10, "large": 250}
    for line, tokens in sizes.items():
        order.begin(LineId(line), 0)
        for number in range(20_000 // tokens):
            order.add(_sized(line, number, tokens=tokens, tenant=line), 0.0)
    for _ in range(20):
        batch = _choose(order, tokens=500, shares=shares)
        assert batch is not None
        for line_id, commands in batch.lines.items():
            order.start(line_id)
            order.finish(line_id, commands, 0.0)
        for one in batch.commands:
            given[one.tenant_id] += sizes[one.tenant_id]

    assert abs(given["small"] - given["large"]) <= 750


def test_the_budget_may_be_used_up_to_its_last_token() -> None:
    order = _order(_sized("a", tokens=600), _sized("b", tokens=400), _sized("c", tokens=1))

    assert _chosen(order, tokens=1000) == [("a", 0), ("b", 0)]
