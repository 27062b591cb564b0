"""How each public method of `TrainingClient` is called; the functions have the methods' names."""

from __future__ import annotations

import math
from typing import Any

from tests.compatibility.caller import Caller, takes
from tests.compatibility.calls.losses import loss_over_all, per_datum_loss
from tests.compatibility.calls.queue_state import tell_queue_state
from tests.compatibility.calls.service_client import check_telemetry
from tests.compatibility.stage import BASE_MODEL, Stage, download, settled

RECIPIENT = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
"""A public key that exports can be encrypted for."""


def forward(stage: Stage, call: Caller) -> None:
    _check_output(call(stage.trainer, stage.data, "cross_entropy"))


def forward_backward(stage: Stage, call: Caller) -> None:
    _check_output(call(stage.trainer, stage.data, "cross_entropy"))
    _check_output(call(stage.trainer, [_drawn(stage, 3), _drawn(stage, 2)], "importance_sampling"))


def _drawn(stage: Stage, count: int) -> Any:
    """A datum of reinforcement learning."""
    inputs = {
        "target_tokens": stage.tensor([2, 3, 4][:count], "int64"),
        "logprobs": stage.tensor([-1.0] * count, "float32"),
        "advantages": stage.tensor([0.5] * count, "float32"),
    }
    text = stage.types.ModelInput.from_ints([1, 2, 3][:count])
    return stage.types.Datum(model_input=text, loss_fn_inputs=inputs)


def _check_output(output: Any) -> None:
    assert math.isfinite(output.metrics["loss:sum"])
    rows = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    assert [len(row) for row in rows] == [3, 2]
    assert all(value < 0 for row in rows for value in row)


def forward_backward_custom(stage: Stage, call: Caller) -> None:
    output = call(stage.trainer, stage.data, loss_over_all)

    assert output.metrics["datums"] == 2.0
    if not hasattr(stage.service, "create_custom_loss"):
        return
    service = stage.new_service()
    handle = settled(service.create_custom_loss(per_datum_loss, {"logprobs": 1, "weights": 1}))
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4)
    output = call(trainer, stage.data, handle)
    logprobs = [value for row in output.loss_fn_outputs for value in row["logprobs"].tolist()]
    assert math.isclose(output.metrics["loss:sum"], -sum(logprobs), rel_tol=1e-4)


def optim_step(stage: Stage, call: Caller) -> None:
    settled(stage.trainer.forward_backward(stage.data, "cross_entropy"))

    stepped = call(stage.trainer, stage.types.AdamParams(learning_rate=1e-4))

    assert stepped.metrics is None or all(map(math.isfinite, stepped.metrics.values()))
    if hasattr(stage.types, "DimuonParams"):
        optimizer = stage.types.DimuonOptimizerConfig()
        other = stage.service.create_lora_training_client(BASE_MODEL, optimizer=optimizer)
        settled(other.forward_backward(stage.data, "cross_entropy"))
        call(other, stage.types.DimuonParams(learning_rate=1e-3))


def save_state(stage: Stage, call: Caller) -> None:
    name = stage.new_name()

    saved = call(stage.trainer, name, ttl_seconds=3600, user_metadata={"k": "v"})

    assert saved.path == f"tinker://{stage.run_id}/weights/{name}"
    again = call(stage.trainer, f"{name}-2", overwrite=True)
    assert again.path == f"{saved.path}-2"


def save_weights_for_sampler(stage: Stage, call: Caller) -> None:
    name = stage.new_name()

    saved = call(stage.trainer, name, ttl_seconds=3600, user_metadata={"k": "v"})

    assert saved.path == f"tinker://{stage.run_id}/sampler_weights/{name}"


def save_weights_external(stage: Stage, call: Caller) -> None:
    name = stage.new_name()

    saved = call(stage.trainer, name, ttl_seconds=3600)

    assert saved.path == f"tinker://{stage.run_id}/external_weights/{name}"
    if takes(call.of(stage.trainer), "age_encryption_recipients"):
        secret = call(stage.trainer, f"{name}-2", age_encryption_recipients=[RECIPIENT])
        urls = settled(stage.rest.get_external_weights_urls(secret.path)).urls
        assert all(file.endswith(".age") for file in urls)
        assert all(download(url) for url in urls.values())


def load_state(stage: Stage, call: Caller) -> None:
    call(stage.new_trainer(), stage.state)


def load_state_with_optimizer(stage: Stage, call: Caller) -> None:
    call(stage.new_trainer(), stage.state)


def create_sampling_client(stage: Stage, call: Caller) -> None:
    check_sampler(stage, call(stage.trainer, stage.sampler_weights))


def save_weights_and_get_sampling_client(stage: Stage, call: Caller) -> None:
    check_sampler(stage, call(stage.trainer))


def save_weights_and_get_sampling_client_submit(stage: Stage, call: Caller) -> None:
    check_sampler(stage, call(stage.trainer))


def check_sampler(stage: Stage, sampler: Any) -> None:
    answer = settled(sampler.sample(stage.prompt, 2, stage.params))
    assert len(answer.sequences) == 2


def get_info(stage: Stage, call: Caller) -> None:
    info = call(stage.trainer)

    assert info.model_id == stage.run_id
    assert info.model_data.model_name == BASE_MODEL
    assert info.lora_rank == 8


def get_tokenizer(stage: Stage, call: Caller) -> None:
    check_tokenizer(call(stage.trainer))


def check_tokenizer(tokenizer: Any) -> None:
    ids = tokenizer.encode("hello world")
    assert ids and "hello world" in tokenizer.decode(ids)


def get_console_url(stage: Stage, call: Caller) -> None:
    url = call(stage.trainer)

    if stage.is_tinsmith:  # it knows that the service has no console
        assert url is None
    else:
        assert stage.session_id in url


def get_telemetry(stage: Stage, call: Caller) -> None:
    check_telemetry(stage, call(stage.trainer))


def on_queue_state_change(stage: Stage, call: Caller) -> None:
    tell_queue_state(stage, call, stage.trainer)


# Of our client alone


def holder(stage: Stage, call: Caller) -> None:
    assert call(stage.trainer).get_session_id() == stage.session_id


def load_weights(stage: Stage, call: Caller) -> None:
    call(stage.new_trainer(), stage.state, with_optimizer=True)


def unload_model(stage: Stage, call: Caller) -> None:
    trainer = stage.new_trainer()

    assert call(trainer).model_id == trainer.model_id
