"""Which heads of lines share one call of the engine."""

from __future__ import annotations

from collections import Counter

from tests.unit.service.scheduler.made import a_command
from tinsmith.service.ledger.records import Command, QueueId
from tinsmith.service.scheduler.batching import BYTES_PER_TOKEN, Batch, choose_batch
from tinsmith.service.scheduler.command_queues import CommandQueues, TenantShares


def _order(*commands: Command) -> CommandQueues:
    order = CommandQueues()
    for command in commands:
        order.begin(command.queue_id, 0)
        order.add(command, 0.0)
    return order


def _choose(
    order: CommandQueues,
    *,
    tokens: int = 1000,
    commands: int = 100,
    shares: TenantShares | None = None,
) -> Batch | None:
    return choose_batch(
        order,
        shares or TenantShares(),
        lambda queue_id: "other" if queue_id.startswith("other") else "base",
        most_tokens=tokens,
        most_commands=commands,
    )


def _chosen(
    order: CommandQueues, *, tokens: int = 1000, commands: int = 100
) -> list[tuple[str, int]]:
    batch = _choose(order, tokens=tokens, commands=commands)
    return [] if batch is None else [(one.queue_id, one.seq_id) for one in batch.commands]


def _sized(queue_id: str, number: int = 0, *, tokens: int, tenant: str = "t") -> Command:
    return a_command(queue_id, number, payload_bytes=tokens * BYTES_PER_TOKEN, tenant=tenant)


def test_heads_of_different_queues_share_a_batch() -> None:
    """Where their base model and their sort are the same."""
    order = _order(
        a_command("a"),
        a_command("b", kind="forward"),
        a_command("c", kind="optim_step"),
        a_command("other"),
        a_command("d", kind="save_weights"),
    )

    assert _chosen(order) == [("a", 0), ("b", 0)]


def test_no_batch_is_chosen_without_training_commands() -> None:
    """Saves and creations are none of its business."""
    assert _choose(_order(a_command(kind="save_weights"))) is None
    assert _choose(CommandQueues()) is None


def test_adjacent_passes_of_a_queue_share_a_batch_in_order() -> None:
    """Up to the step that follows them."""
    kinds = ["forward_backward", "forward_backward", "optim_step", "forward_backward"]
    order = _order(*(a_command("a", n, kind=kind) for n, kind in enumerate(kinds)))

    assert _chosen(order) == [("a", 0), ("a", 1)]


def test_the_token_budget_is_exceeded_only_by_a_single_command() -> None:
    """A larger command runs by itself."""
    small = _order(*(_sized(f"m{n}", tokens=300) for n in range(5)))
    large = _order(_sized("huge", tokens=5000), _sized("small", tokens=1))

    assert len(_chosen(small)) == 3
    assert _chosen(large) == [("huge", 0)]


def test_a_command_that_does_not_fit_does_not_block_another_tenant_s() -> None:
    """The rest of the budget goes to whoever has something small enough."""
    order = _order(
        _sized("a", tokens=600, tenant="a"),
        _sized("b", tokens=600, tenant="b"),
        _sized("c", tokens=300, tenant="c"),
    )

    assert _chosen(order) == [("a", 0), ("c", 0)]


def test_the_number_of_commands_in_a_batch_is_limited() -> None:
    """However small they are."""
    order = _order(*(a_command(f"m{n}") for n in range(9)))

    assert len(_chosen(order, commands=4)) == 4


def test_a_tenant_s_single_command_is_in_the_first_batch() -> None:
    """Before most of the other's hundred."""
    order = _order(
        *(_sized(f"m{n}", tokens=100, tenant="many") for n in range(100)),
        _sized("one", tokens=100, tenant="one"),
    )

    assert ("one", 0) in _chosen(order, tokens=400)


def test_queues_of_a_tenant_take_turns() -> None:
    """One long line does not keep out its neighbour."""
    order = _order(*(_sized("long", n, tokens=100) for n in range(10)), _sized("short", tokens=100))

    assert ("short", 0) in _chosen(order, tokens=400)


def test_tenants_get_equal_amounts_over_many_batches() -> None:
    """Whatever the sizes of what they ask."""
    shares, given, order = TenantShares(), Counter[str](), CommandQueues()
    sizes = {"small": 10, "large": 250}
    for queue_id, tokens in sizes.items():
        order.begin(QueueId(queue_id), 0)
        for number in range(20_000 // tokens):
            order.add(_sized(queue_id, number, tokens=tokens, tenant=queue_id), 0.0)
    for _ in range(20):
        batch = _choose(order, tokens=500, shares=shares)
        assert batch is not None
        for queue_id, commands in batch.by_queue.items():
            order.start(queue_id)
            order.finish(queue_id, commands, 0.0)
        for one in batch.commands:
            given[one.tenant_id] += sizes[one.tenant_id]

    assert abs(given["small"] - given["large"]) <= 750


def test_the_budget_may_be_used_up_to_its_last_token() -> None:
    order = _order(_sized("a", tokens=600), _sized("b", tokens=400), _sized("c", tokens=1))

    assert _chosen(order, tokens=1000) == [("a", 0), ("b", 0)]


def test_a_tenant_with_many_models_gets_no_more_when_batches_are_full() -> None:
    """Tenants for whom a batch has no room left are as far behind as before."""
    queues, shares, given = CommandQueues(), TenantShares(), Counter[str]()
    models = {f"many-{number}": "many" for number in range(6)}
    models |= {f"one-{number}": f"one-{number}" for number in range(6)}
    numbers = Counter[str]()
    for model in models:
        queues.begin(QueueId(model), 0)
    for _ in range(70):
        for model, tenant in models.items():
            queues.add(_sized(model, numbers[model], tokens=10, tenant=tenant), 0.0)
        batch = _choose(queues, tokens=35, shares=shares)
        assert batch is not None
        for command in batch.commands:
            given[command.tenant_id] += 1
            numbers[command.queue_id] += 1
            queues.start(command.queue_id)
            queues.finish(command.queue_id, [command], 0.0)

    assert set(given.values()) == {30}
