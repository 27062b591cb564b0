"""Training commands: order, repetition, learning, and results in both formats."""

from __future__ import annotations

import math

import pytest

from tests.integration.testing.caller import (
    Caller,
    calling,
    forward_backward,
    optim_step,
)
from tinsmith import types as t
from tinsmith.types import requests as r
from tinsmith.wire import content
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import to_http


def loss(caller: Caller, model_id: str, seq_id: int) -> float:
    output = caller.do("forward_backward", forward_backward(model_id, seq_id))
    assert isinstance(output, t.ForwardBackwardOutput)
    return output.metrics["loss:sum"]


def test_loss_is_the_weighted_sum_of_the_answered_logprobs() -> None:
    with calling() as caller:
        request = forward_backward(caller.new_model(), 1)
        output = caller.do("forward_backward", request)

    logprobs = output.loss_fn_outputs[0]["logprobs"]
    assert logprobs.shape == [3]
    expected = math.fsum([-1.0 * lp for lp in logprobs.data[1:]])
    assert output.metrics == {"loss:sum": expected}


def test_loop_learns_what_it_is_shown() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        losses = []
        for step in range(4):
            losses.append(loss(caller, model_id, 2 * step + 1))
            metrics = caller.do("optim_step", optim_step(model_id, 2 * step + 2)).metrics
            assert metrics["tinsmith/step"] == step + 1

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4


def test_nothing_is_learned_without_a_step_or_from_forward_alone() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        first = loss(caller, model_id, 1)
        assert loss(caller, model_id, 2) == first
        other = caller.new_model()
        caller.do("forward_backward", forward_backward(other, 1, forward_only=True))
        caller.do("optim_step", optim_step(other, 2))

        assert loss(caller, other, 3) == first


def test_commands_run_in_the_order_of_their_numbers_whatever_order_they_come_in() -> None:
    """The step, sent first, still runs last: the loss is that of untouched weights."""
    with calling() as caller:
        model_id = caller.new_model()
        untouched = loss(caller, caller.new_model(), 1)
        step = caller.ask("optim_step", optim_step(model_id, 3))
        second = caller.ask("forward_backward", forward_backward(model_id, 2))
        first = caller.ask("forward_backward", forward_backward(model_id, 1))

        for submitted in (first, second):
            output = caller.result("forward_backward", submitted.request_id)
            assert output.metrics["loss:sum"] == untouched
        assert caller.result("optim_step", step.request_id).metrics["tinsmith/grad_norm"] > 0
        assert loss(caller, model_id, 4) < untouched


def test_missing_number_is_passed_over_after_a_bounded_wait() -> None:
    with calling(gap_wait_s=0.2) as caller:
        model_id = caller.new_model()

        caller.do("optim_step", optim_step(model_id, 5))

        late = caller.call("optim_step", optim_step(model_id, 4))
        assert (late.status, "seq_id 4" in late.plain["detail"]) == (400, True)
        caller.do("optim_step", optim_step(model_id, 6))


def test_refused_number_counts_as_done() -> None:
    """With no patience for gaps left to help, the next number runs at once."""
    with calling(gap_wait_s=60.0) as caller:
        model_id = caller.new_model()
        caller.service.faults.add(on="optim_step", status=422)

        refused = caller.call("optim_step", optim_step(model_id, 1))

        assert refused.status == 422
        caller.do("optim_step", optim_step(model_id, 2))


@pytest.mark.parametrize("status", [402, 409, 429, 500])
def test_number_that_will_be_sent_again_is_waited_for(status: int) -> None:
    with calling(gap_wait_s=60.0) as caller:
        model_id = caller.new_model()
        caller.service.faults.add(on="optim_step", status=status)
        assert caller.call("optim_step", optim_step(model_id, 1)).status == status
        second = caller.ask("optim_step", optim_step(model_id, 2))

        first = caller.ask("optim_step", optim_step(model_id, 1))

        assert caller.result("optim_step", first.request_id).metrics["tinsmith/step"] == 1
        assert caller.result("optim_step", second.request_id).metrics["tinsmith/step"] == 2


def test_same_submission_twice_is_one_command() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        request = forward_backward(model_id, 1)

        first, second = (caller.ask("forward_backward", request) for _ in range(2))

        assert first == second
        caller.result("forward_backward", first.request_id)
        assert caller.ask("forward_backward", request) == first  # also after it ran


def test_other_body_under_the_same_number_is_refused() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        caller.do("forward_backward", forward_backward(model_id, 1))

        for name, request in [
            ("forward_backward", forward_backward(model_id, 1, forward_only=True)),
            ("optim_step", optim_step(model_id, 1)),
        ]:
            reply = caller.call(name, request)
            assert (reply.status, "used for another" in reply.plain["detail"]) == (400, True)
        caller.do("optim_step", optim_step(model_id, 2))


def test_repeated_ephemeral_save_may_ask_for_another_sampler() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        saves = [
            r.SaveWeightsForSamplerRequest(
                model_id=model_id, seq_id=1, sampling_session_seq_id=number
            )
            for number in (0, 1)
        ]

        first, second = (caller.ask("save_weights_for_sampler", save) for save in saves)

        assert first == second
        saved = caller.result("save_weights_for_sampler", first.request_id)
        assert saved.sampling_session_id == f"{model_id.split(':')[0]}:sample:0"


def test_bad_datum_fails_its_future_and_not_the_model() -> None:
    with calling() as caller:
        model_id = caller.new_model()
        bad = forward_backward(model_id, 1, inputs={"target_tokens": [1], "weights": [1.0]})

        submitted = caller.ask("forward_backward", bad)
        failed = caller.poll(submitted.request_id).plain

        assert (failed["category"], "datum 0" in failed["error"]) == ("user", True)
        caller.do("forward_backward", forward_backward(model_id, 2))


def test_zstd_body_is_opened() -> None:
    with calling() as caller:
        request = forward_backward(caller.new_model(), 1)
        made = to_http(ENDPOINTS["forward_backward"], request)
        packed = content.compress(made.parts)

        reply = caller.send(
            made.method, made.path, packed, {**made.headers, "Content-Encoding": "zstd"}
        )

        assert reply.status == 200
        assert caller.service.requests("forward_backward")[0].request == request


def test_old_clients_send_and_get_json() -> None:
    """SDKs up to 0.18: JSON in, JSON out, no number, a route for each direction."""
    with calling() as caller:
        model_id = caller.new_model()
        old = Caller(caller.service, accept="application/json")
        body = (
            b'{"forward_input": {"data": [{"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, '
            b'"loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}, '
            b'"weights": {"data": [0, 1, 1], "dtype": "float32"}}}], '
            b'"loss_fn": "cross_entropy", "loss_fn_config": null}, "model_id": "%b"}'
        ) % model_id.encode()

        submitted = old.send("POST", "/api/v1/forward", body, {"Content-Type": "application/json"})
        reply = old.poll(submitted.plain["request_id"])

        assert reply.headers["content-type"] == "application/json"
        new = caller.do("forward_backward", forward_backward(model_id, 2))
        assert reply.plain["metrics"] == new.metrics


def test_model_made_from_a_checkpoint_goes_on_where_it_was() -> None:
    with calling() as caller:
        session_id = caller.new_session()
        model_id = caller.new_model(session_id)
        loss(caller, model_id, 1)
        caller.do("optim_step", optim_step(model_id, 2))
        learned = loss(caller, model_id, 3)
        save = r.SaveWeightsRequest(model_id=model_id, path="c1", seq_id=4)
        path = caller.do("save_weights", save).path

        request = r.LoadWeightsRequest(session_id=session_id, model_seq_id=7, path=path)
        made = caller.do("load_weights", request)

        assert made.model_id == f"{session_id}:train:7"
        assert loss(caller, made.model_id, 1) == learned
        other = caller.new_model(session_id, 8)
        load = r.LoadWeightsRequest(model_id=other, seq_id=1, path=path)
        caller.do("load_weights", load)
        assert loss(caller, other, 2) == learned


def test_uploaded_loss_is_used_by_its_id_and_names_its_metrics() -> None:
    from tests.integration.testing.test_endpoints import GRAPH

    with calling() as caller:
        session_id = caller.new_session()
        model_id = caller.new_model(session_id)
        upload = r.CreateCustomLossRequest(
            session_id=session_id, custom_loss_seq_id=0, name="f", inputs=[], graph=GRAPH
        )
        loss_id = caller.do("create_custom_loss", upload).loss_id
        given = forward_backward(model_id, 1).forward_backward_input
        custom = t.ForwardBackwardInput(given.data, "custom", {"loss_id": loss_id})

        output = caller.do("forward_backward", r.ForwardBackwardRequest(custom, model_id, 1))

        assert output.metrics.keys() == {"loss:sum", "custom/m:sum"}
        assert output.metrics["loss:sum"] == -math.fsum(output.loss_fn_outputs[0]["logprobs"].data)
