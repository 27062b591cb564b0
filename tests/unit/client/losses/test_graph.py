from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.fx

from tinsmith.client.losses.graph import (
    LossHandle,
    check_inputs,
    evaluate,
    trace,
)
from tinsmith.types import Datum, ModelInput
from tinsmith.types.loss_operations import MAX_INPUTS


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss, "custom/weight:mean": weights.mean()}


def a_handle(fn: Any = weighted, **ranks: int) -> LossHandle:
    traced = trace(fn, ranks or {"logprobs": 1, "weights": 1})
    return LossHandle(traced.name, traced.inputs, "s-1", traced.module)


def a_datum(**inputs: Any) -> Datum:
    given = {"target_tokens": [2, 3, 4], "weights": [1.0, 0.0, 2.0], **inputs}
    return Datum.received(
        ModelInput.from_ints([1, 2, 3]),
        {name: value for name, value in given.items() if value is not None},
    )


def test_a_handle_names_its_inputs_in_order() -> None:
    handle = a_handle()

    assert handle.input_names == ("weights",)
    assert [given.rank for given in handle.inputs] == [1, 1]
    assert handle.loss_id is None
    assert "graph" not in repr(handle)


def test_handles_compare_equal_regardless_of_their_graph_object() -> None:
    assert a_handle() == a_handle()
    assert hash(a_handle()) == hash(a_handle())


def test_the_key_depends_on_the_computation_and_the_ranks() -> None:
    def same(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss, "custom/weight:mean": weights.mean()}

    def other(logprobs: Any, weights: Any) -> Any:
        return (logprobs * weights).sum(), {}

    assert a_handle().key == a_handle(same).key
    assert a_handle().key != a_handle(other).key
    assert a_handle().key != a_handle(logprobs=2, weights=2).key


def test_losses_are_summed_and_means_divided() -> None:
    data = [a_datum(), a_datum(weights=[3.0, 3.0, 3.0])]
    logprobs = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -1.0])]

    loss, metrics = evaluate(a_handle(), data, logprobs)

    assert float(loss) == 16.0
    assert metrics == {"custom/loss:sum": 16.0, "custom/weight:mean": 2.0}


def test_inputs_of_all_ranks_are_passed() -> None:
    def scaled(logprobs: Any, scale: Any, table: Any) -> Any:
        return (logprobs * scale * table).sum(), {}

    handle = a_handle(scaled, logprobs=2, scale=0, table=2)
    datum = a_datum(
        target_tokens=torch.ones(3, 2, dtype=torch.int64),
        scale=torch.tensor(2.0),
        table=torch.full((3, 2), 0.5),
    )

    check_inputs(handle, [datum])
    loss, _ = evaluate(handle, [datum], [torch.ones(3, 2)])

    assert float(loss) == 6.0


def test_the_error_names_the_datum_whose_loss_is_not_a_number() -> None:
    handle = a_handle(lambda logprobs: (logprobs * 1, {}), logprobs=1)

    with pytest.raises(ValueError, match="for datum 0"):
        evaluate(handle, [a_datum()], [torch.ones(3)])


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (a_datum(weights=None), "datum 1 has no 'weights'"),
        (a_datum(target_tokens=None), "datum 1 has no 'target_tokens'"),
        (a_datum(weights=[[1.0, 2.0]]), "'weights' of datum 1 has rank 2"),
        (a_datum(target_tokens=[[2, 3, 4]]), "'target_tokens' of datum 1 has rank 2"),
    ],
)
def test_every_datum_must_have_every_input_at_its_rank(datum: Datum, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_inputs(a_handle(), [a_datum(), datum])


def test_the_number_of_loss_inputs_is_limited() -> None:
    names = ["logprobs", *(f"x{number}" for number in range(MAX_INPUTS))]
    source = f"lambda {', '.join(names)}: ({' + '.join(names)}, {{}})"

    with pytest.raises(ValueError, match="17 parameters"):
        trace(eval(source), dict.fromkeys(names, 1))
    allowed = f"lambda {', '.join(names[:-1])}: ({' + '.join(names[:-1])}, {{}})"
    assert len(trace(eval(allowed), dict.fromkeys(names[:-1], 1)).inputs) == MAX_INPUTS


@torch.fx.wrap
def elsewhere(x: Any) -> Any:
    return x


def test_a_function_of_another_library_is_rejected() -> None:
    def uses_elsewhere(logprobs: Any) -> Any:
        return elsewhere(logprobs).sum(), {}

    with pytest.raises(ValueError, match=r"calls .*elsewhere"):
        trace(uses_elsewhere, {"logprobs": 1})


def test_without_torch_a_loss_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.fx", None)

    with pytest.raises(ImportError, match="pip install torch"):
        trace(weighted, {"logprobs": 1, "weights": 1})
