"""Custom losses against a service: what is sent, in which order, and what a failure leaves."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.client.losses.composed import LossTerm, compose_losses
from tinsmith.client.losses.graph import LossHandle
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import InternalServerError, RequestFailedError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    PromptProvenanceSpan,
)

WAIT_S = 60.0
TRAINING = ("forward_backward", "optim_step")


def a_datum(token: int = 1, **inputs: Any) -> Datum:
    tokens = ModelInput.from_ints([token, 2, 3])
    return Datum(tokens, {"target_tokens": [2, 3, 4], **inputs})


def cubes(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """C = Σ_i (i + 1) Σ_t lp³."""
    loss = torch.zeros(())
    for index, lp in enumerate(logprobs):
        loss = loss + (index + 1) * (lp**3).sum()
    return loss, {"datums": len(data)}


def nll(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -sum(lp.sum() for lp in logprobs), {}


def passes(service: ScriptedService) -> list[Any]:
    return [received.request for received in service.requests("forward_backward")]


def sent(service: ScriptedService) -> list[tuple[str, int]]:
    return [
        (received.endpoint, received.request.seq_id)
        for received in service.requests()
        if received.endpoint in TRAINING and received.request is not None
    ]


def logprobs_of(output: ForwardBackwardOutput) -> list[np.ndarray[Any, Any]]:
    return [each["logprobs"].to_numpy().astype(np.float64) for each in output.loss_fn_outputs]


# The gradient


def test_s43_the_analytic_gradient_is_sent(
    training: TrainingClient, service: ScriptedService
) -> None:
    data = [a_datum(1), a_datum(7), a_datum(9)]
    before = logprobs_of(
        training.forward([a_datum(t, weights=[0.0] * 3) for t in (1, 7, 9)], "cross_entropy")
        .result(WAIT_S)
    )  # fmt: skip

    output = training.forward_backward_custom(data, cubes).result(WAIT_S)

    given = passes(service)[-1].forward_backward_input.data
    for index, (datum, lp) in enumerate(zip(given, before, strict=True)):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        np.testing.assert_allclose(weights, -3 * (index + 1) * lp**2, rtol=1e-5, atol=1e-5)
    loss = sum((index + 1) * (lp**3).sum() for index, lp in enumerate(before))
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert output.metrics["datums"] == 3.0


def test_s43_a_custom_loss_trains_like_the_same_built_in_loss(client: ServiceClient) -> None:
    ours = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4, seed=1)
    theirs = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4, seed=1)
    losses = []

    for _ in range(2):
        _ = ours.forward_backward_custom([a_datum()], nll)
        _ = ours.optim_step(AdamParams(learning_rate=1e-3))
        _ = theirs.forward_backward([a_datum(weights=[1.0] * 3)], "cross_entropy")
        _ = theirs.optim_step(AdamParams(learning_rate=1e-3))
        losses.append(
            [
                each.forward([a_datum(weights=[1.0] * 3)], "cross_entropy").result(WAIT_S).loss
                for each in (ours, theirs)
            ]
        )

    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-6)
    assert losses[1][0] == pytest.approx(losses[1][1], rel=1e-6)
    assert losses[1][0] < losses[0][0]


def test_the_first_pass_is_forward_only_with_the_user_s_weights_or_zeros(
    training: TrainingClient, service: ScriptedService
) -> None:
    data = [a_datum(), a_datum(weights=[1.0, 0.5, 0.0], advantages=[1.0, 1.0, 1.0])]

    training.forward_backward_custom(data, cubes).result(WAIT_S)

    forward, backward = passes(service)
    assert (forward.forward_only, backward.forward_only) == (True, False)
    first, second = forward.forward_backward_input.data
    assert first.loss_fn_inputs["weights"].tolist() == [0.0, 0.0, 0.0]
    assert second.loss_fn_inputs["weights"].tolist() == [1.0, 0.5, 0.0]
    assert all(set(d.loss_fn_inputs) == {"target_tokens", "weights"} for d in (first, second))


def test_spans_are_kept_in_both_passes(training: TrainingClient, service: ScriptedService) -> None:
    spans: Any = [PromptProvenanceSpan(sequence_id="a", length=3)]
    datum = a_datum().with_provenance(spans, spans)

    training.forward_backward_custom([datum], cubes).result(WAIT_S)

    for each in passes(service):
        assert each.forward_backward_input.data[0].model_input_spans == spans
        assert each.forward_backward_input.data[0].loss_fn_input_spans == spans


def test_sparse_targets_get_a_gradient_for_every_cell(
    training: TrainingClient, service: ScriptedService
) -> None:
    targets = torch.zeros(3, 8, dtype=torch.int64)
    targets[:, 0] = 5
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": targets})
    assert datum.loss_fn_inputs["target_tokens"].is_sparse

    training.forward_backward_custom([datum], nll).result(WAIT_S)

    weights = passes(service)[-1].forward_backward_input.data[0].loss_fn_inputs["weights"]
    assert weights.tolist() == [[1.0] * 8] * 3


def test_s43_user_supplied_gradients_train_without_torch(
    training: TrainingClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nll:
        def gradients(self, data: list[Datum], logprobs: list[list[float]]) -> Any:
            loss = -sum(map(sum, logprobs))
            return loss, [[-1.0] * len(values) for values in logprobs], {"n": len(data)}

    monkeypatch.setitem(sys.modules, "torch", None)

    output = training.forward_backward_custom([a_datum()], Nll()).result(WAIT_S)

    weights = passes(service)[-1].forward_backward_input.data[0].loss_fn_inputs["weights"]
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert output.metrics["loss:sum"] == pytest.approx(output.metrics["surrogate_loss:sum"])
    assert output.metrics["n"] == 1.0


def test_without_torch_a_loss_function_is_rejected_at_the_call(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match="pip install torch"):
            _ = training.forward_backward_custom([a_datum()], cubes)

    assert training.forward_backward_custom([a_datum()], cubes).result(WAIT_S).loss < 0


def test_composed_losses_train_and_report_their_terms(
    training: TrainingClient, service: ScriptedService
) -> None:
    loss = compose_losses(
        LossTerm("nll", nll), LossTerm("square", lambda _, lps: (lps[0] ** 2).sum(), lambda s: s)
    )

    first = training.forward_backward_custom([a_datum()], loss.at_step(0)).result(WAIT_S)
    second = training.forward_backward_custom([a_datum()], loss.at_step(2)).result(WAIT_S)

    sent_weights = [
        np.array(each.forward_backward_input.data[0].loss_fn_inputs["weights"].tolist())
        for each in passes(service)
    ]
    lp = logprobs_of(first)[0]
    np.testing.assert_allclose(sent_weights[1], np.ones(3), rtol=1e-5)
    np.testing.assert_allclose(sent_weights[3], 1 - 4 * lp, rtol=1e-5)
    assert second.metrics["loss:sum"] == pytest.approx(
        second.metrics["nll:sum"] + 2 * second.metrics["square:sum"]
    )


# Order and threads


def test_a_later_step_waits_for_the_second_pass(
    training: TrainingClient, service: ScriptedService
) -> None:
    may_end = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        assert may_end.wait(WAIT_S)
        return cubes(data, logprobs)

    output = training.forward_backward_custom([a_datum()], slow)
    step = training.optim_step(AdamParams())
    other = training.forward_backward([a_datum(weights=[1.0] * 3)], "cross_entropy")
    service.wait_requests("forward_backward", 1)
    time.sleep(0.1)
    assert not output.done()
    assert sent(service) == [("forward_backward", 1)]
    may_end.set()

    norm = step.result(WAIT_S).metrics
    output.result(WAIT_S)
    other.result(WAIT_S)
    assert norm is not None
    assert norm["tinsmith/grad_norm"] > 0
    assert sent(service) == [
        ("forward_backward", 1),
        ("forward_backward", 2),
        ("optim_step", 3),
        ("forward_backward", 4),
    ]


def test_the_call_returns_before_any_reply(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("forward_backward", times=1)

    output = training.forward_backward_custom([a_datum()], cubes)

    held.wait_held(1)
    assert not output.done()
    held.release()
    output.result(WAIT_S)


def test_the_loss_runs_once_over_all_chunks_on_its_own_thread() -> None:
    seen: list[tuple[str, int, bool]] = []
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")

    def watched(data: Any, logprobs: Any) -> Any:
        assert setting.get() == "the caller's"
        seen.append((threading.current_thread().name, len(logprobs), torch.is_grad_enabled()))
        return cubes(data, logprobs)

    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=2) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        setting.set("the caller's")
        with torch.no_grad():
            output = training.forward_backward_custom([a_datum(t) for t in range(7)], watched)
        again = output.result(WAIT_S), output.result(WAIT_S)

        assert len(service.requests("forward_backward")) == 8
    assert seen == [("tinsmith-loss", 7, True)]
    assert again[0] is again[1]
    assert len(again[0].loss_fn_outputs) == 7


def test_results_and_heartbeats_continue_while_a_loss_runs(
    client: ServiceClient, training: TrainingClient
) -> None:
    may_end = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        assert may_end.wait(WAIT_S)
        return cubes(data, logprobs)

    output = training.forward_backward_custom([a_datum()], slow)

    other = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    other.optim_step(AdamParams()).result(WAIT_S)
    assert training.get_info().model_id == training.model_id
    assert not output.done()
    may_end.set()
    output.result(WAIT_S)


def test_the_async_call_does_not_block_the_caller_s_loop(training: TrainingClient) -> None:
    threads = []
    may_end = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_end.wait(WAIT_S)
        return cubes(data, logprobs)

    async def scenario() -> tuple[ForwardBackwardOutput, int]:
        output = await training.forward_backward_custom_async([a_datum()], slow)
        step = await training.optim_step_async(AdamParams())
        ticks = 0
        while not output.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if threads and ticks > 10:
                may_end.set()
        await step
        return await output, ticks

    output, ticks = asyncio.run(scenario())

    assert output.metrics["loss:sum"] < 0
    assert ticks > 10
    assert threads != [threading.main_thread()]


def test_reading_the_result_twice_gives_the_same_losses(training: TrainingClient) -> None:
    future = training.forward_backward_custom([a_datum()], cubes)

    first = dict(future.result(WAIT_S).metrics)
    second = dict(future.result(WAIT_S).metrics)

    assert first == second
    assert first["loss:sum"] != first["surrogate_loss:sum"]


def test_arrays_are_read_at_the_call(training: TrainingClient, service: ScriptedService) -> None:
    targets = np.array([2, 3, 4])
    held = service.faults.hold("forward_backward", times=1)

    output = training.forward_backward_custom([a_datum(target_tokens=targets)], cubes)
    held.wait_held(1)
    targets[:] = 99
    held.release()
    output.result(WAIT_S)

    for each in passes(service):
        arrived = each.forward_backward_input.data[0].loss_fn_inputs["target_tokens"]
        assert arrived.tolist() == [2, 3, 4]


# Failures


class LossError(Exception):
    pass


def test_s43_a_raising_loss_fails_its_call_and_leaves_the_client_usable(
    training: TrainingClient, service: ScriptedService
) -> None:
    error = LossError("mine")

    def broken(*_: Any) -> Any:
        raise error

    output = training.forward_backward_custom([a_datum()], broken)
    step = training.optim_step(AdamParams())

    with pytest.raises(LossError) as caught:
        output.result(WAIT_S)
    assert caught.value is error
    step.result(WAIT_S)
    assert training.forward_backward_custom([a_datum()], cubes).result(WAIT_S).loss < 0
    assert [number for _, number in sent(service)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_loss_that_raises_a_base_exception_fails_only_its_own_call(
    training: TrainingClient, kind: type[BaseException]
) -> None:
    def broken(*_: Any) -> Any:
        raise kind("of the loss")

    with pytest.raises(RuntimeError, match=kind.__name__) as caught:
        training.forward_backward_custom([a_datum()], broken).result(WAIT_S)

    assert type(caught.value.__cause__) is kind
    training.optim_step(AdamParams()).result(WAIT_S)


def test_the_error_names_a_datum_without_a_gradient(training: TrainingClient) -> None:
    output = training.forward_backward_custom(
        [a_datum(), a_datum()], lambda _, lps: (lps[0].sum(), {})
    )

    with pytest.raises(ValueError, match="no gradient for datum 1"):
        output.result(WAIT_S)
    training.optim_step(AdamParams()).result(WAIT_S)


@pytest.mark.parametrize(("failing", "runs"), [(1, 0), (2, 1)])
def test_a_pass_that_fails_on_the_service_fails_the_call(
    training: TrainingClient, service: ScriptedService, failing: int, runs: int
) -> None:
    calls = []

    def counted(data: Any, logprobs: Any) -> Any:
        calls.append(len(data))
        return cubes(data, logprobs)

    service.faults.fail_command(
        "forward_backward", error="no room", when=lambda r: r.request.seq_id == failing
    )

    with pytest.raises(RequestFailedError, match="no room"):
        training.forward_backward_custom([a_datum()], counted).result(WAIT_S)

    assert len(calls) == runs
    training.optim_step(AdamParams()).result(WAIT_S)


def test_a_call_cancelled_while_its_loss_runs_frees_its_seq_id(
    training: TrainingClient, service: ScriptedService
) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        runs.set()
        assert may_end.wait(WAIT_S)
        return cubes(data, logprobs)

    output = training.forward_backward_custom([a_datum()], slow)
    assert runs.wait(WAIT_S)

    output.cancel()

    training.optim_step(AdamParams()).result(WAIT_S)
    may_end.set()
    assert sent(service) == [("forward_backward", 1), ("optim_step", 2)]


def test_a_call_cancelled_in_the_queue_frees_both_seq_ids(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("optim_step", times=1)
    first = training.optim_step(AdamParams())
    held.wait_held(1)
    output = training.forward_backward_custom([a_datum()], cubes)

    output.cancel()
    held.release()

    first.result(WAIT_S)
    training.optim_step(AdamParams()).result(WAIT_S)
    assert sent(service) == [("optim_step", 1), ("optim_step", 2)]


def test_invalid_arguments_raise_at_the_call(training: TrainingClient) -> None:
    without_targets = Datum(ModelInput.from_ints([1]), {"weights": [1.0]})

    with pytest.raises(ValueError, match="datum 1 has no 'target_tokens'"):
        _ = training.forward_backward_custom([a_datum(), without_targets], cubes)
    with pytest.raises(ValueError, match="empty"):
        _ = training.forward_backward_custom([], cubes)
    with pytest.raises(TypeError, match="not str"):
        _ = training.forward_backward_custom([a_datum()], "ppo")  # type: ignore[arg-type]
    training.optim_step(AdamParams()).result(WAIT_S)


def test_loss_type_input_warns(training: TrainingClient) -> None:
    with pytest.warns(DeprecationWarning, match="loss_type_input"):
        output = training.forward_backward_custom([a_datum()], cubes, loss_type_input="logprobs")
    with (
        pytest.warns(DeprecationWarning, match="type"),
        pytest.raises(ValueError, match="'hidden'"),
    ):
        _ = training.forward_backward_custom([a_datum()], cubes, loss_type_input="hidden")

    assert output.result(WAIT_S).loss < 0


@pytest.mark.usefixtures("eager_switching")
def test_s43_many_threads_keep_both_passes_together(
    training: TrainingClient, service: ScriptedService
) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pending: list[Any] = []
            for _ in range(4):
                pending.append(training.forward_backward_custom([a_datum()], cubes))
                pending.append(training.optim_step(AdamParams()))
            for future in pending:
                future.result(60)
        except BaseException as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert [number for _, number in sent(service)] == list(range(1, 49))
    kinds = [request.forward_only for request in passes(service)]
    assert kinds == [True, False] * 16


LEAVES_WHILE_A_LOSS_RUNS = """
import sys, threading, time
import torch, tinsmith

client = tinsmith.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
datum = tinsmith.Datum(tinsmith.ModelInput.from_ints([1]), {"target_tokens": [2]})
runs = threading.Event()


def busy(data, logprobs):
    runs.set()
    ends_at = time.monotonic() + 0.5
    while time.monotonic() < ends_at:
        torch.ones(200, 200) @ torch.ones(200, 200)
    return logprobs[0].sum(), {}


training.forward_backward_custom([datum], busy)
runs.wait()
"""


def test_a_program_may_end_while_a_loss_runs(service: ScriptedService) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_A_LOSS_RUNS, service.base_url, service.api_key],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")


# Losses made for the service


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weight:sum": weights.sum(), "custom/weight:mean": weights.sum()}


RANKS: Any = {"logprobs": 1, "weights": 1}


def test_a_handle_runs_in_the_client_if_the_service_does_not_run_losses(
    client: ServiceClient, training: TrainingClient, service: ScriptedService
) -> None:
    handle = client.create_custom_loss(weighted, RANKS).result(WAIT_S)
    data = [a_datum(weights=[1.0, 2.0, 3.0]), a_datum(weights=[0.0, 0.5, 0.5])]

    output = training.forward_backward_custom(data, handle).result(WAIT_S)

    assert isinstance(handle, LossHandle)
    assert handle.loss_id is None
    assert service.requests("create_custom_loss") == []
    given = passes(service)[-1].forward_backward_input.data
    assert [d.loss_fn_inputs["weights"].tolist() for d in given] == [[1, 2, 3], [0, 0.5, 0.5]]
    assert output.metrics["custom/weight:sum"] == 7.0
    assert output.metrics["custom/weight:mean"] == 3.5
    assert output.metrics["loss:sum"] == pytest.approx(output.metrics["surrogate_loss:sum"])


def test_a_handle_is_uploaded_and_run_in_one_pass_if_the_service_runs_losses() -> None:
    with (
        running_service(long_poll_s=0.5, custom_loss_server_side=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        handle = client.create_custom_loss(weighted, RANKS).result(WAIT_S)

        output = training.forward_backward_custom([a_datum(weights=[1.0, 2.0, 3.0])], handle)
        step = training.optim_step(AdamParams())

        with pytest.raises(RequestFailedError, match="--engine embedded"):
            output.result(WAIT_S)
        step.result(WAIT_S)
        (only,) = passes(service)
        assert only.forward_backward_input.loss_fn == "custom"
        assert only.forward_backward_input.loss_fn_config == {"loss_id": handle.loss_id}
        assert only.forward_only is False
        assert sent(service) == [("forward_backward", 1), ("optim_step", 2)]
        (upload,) = service.requests("create_custom_loss")
        assert (upload.request.name, upload.request.custom_loss_seq_id) == ("weighted", 0)


def test_a_loss_is_created_once_per_session_unless_that_failed() -> None:
    with (
        running_service(long_poll_s=0.5, custom_loss_server_side=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        service.faults.fail_command("create_custom_loss", error="not now", category="server")
        with pytest.raises((RequestFailedError, InternalServerError)):
            client.create_custom_loss(weighted, RANKS).result(WAIT_S)

        assert client.create_custom_loss(weighted, RANKS).result(WAIT_S).loss_id

        with pytest.raises(ValueError, match="already exists in this session"):
            _ = client.create_custom_loss(weighted, RANKS)


def test_a_handle_of_another_session_is_rejected(
    client: ServiceClient, training: TrainingClient, service: ScriptedService
) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as other:
        handle = other.create_custom_loss(weighted, RANKS).result(WAIT_S)

        with pytest.raises(ValueError, match="belongs to session"):
            training.forward_backward_custom([a_datum(weights=[1.0] * 3)], handle).result(WAIT_S)

    assert client.create_custom_loss(weighted, RANKS).result(WAIT_S) != handle
    training.optim_step(AdamParams()).result(WAIT_S)
    assert sent(service) == [("optim_step", 1)]


def test_a_handle_needs_its_inputs(client: ServiceClient, training: TrainingClient) -> None:
    handle = client.create_custom_loss(weighted, RANKS).result(WAIT_S)

    with pytest.raises(ValueError, match="datum 0 has no 'weights'"):
        _ = training.forward_backward_custom([a_datum()], handle)


def test_loss_function_rules_are_checked_at_the_call(
    client: ServiceClient, service: ScriptedService
) -> None:
    with pytest.raises(ValueError, match="must take logprobs"):
        _ = client.create_custom_loss(lambda x: (x.sum(), {}), {"x": 1})

    assert service.requests("create_session") == []
