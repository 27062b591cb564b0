"""How each public method of `ServiceClient` is called; the functions have the methods' names."""

from __future__ import annotations

from typing import Any

from tests.compatibility.caller import Caller
from tests.compatibility.calls.losses import per_datum_loss
from tests.compatibility.stage import BASE_MODEL, Stage, settled


def get_server_capabilities(stage: Stage, call: Caller) -> None:
    models = call(stage.service).supported_models

    assert BASE_MODEL in [model.model_name for model in models]


def create_lora_training_client(stage: Stage, call: Caller) -> None:
    trainer = call(
        stage.service,
        BASE_MODEL,
        rank=4,
        seed=7,
        train_unembed=False,
        user_metadata={"k": "v"},
    )

    assert ":train:" in trainer.model_id
    assert trainer.get_info().model_data.model_name == BASE_MODEL


def create_training_client_from_state(stage: Stage, call: Caller) -> None:
    _check_resumed(stage, call(stage.service, stage.state, user_metadata={"k": "v"}))


def create_training_client_from_state_with_optimizer(stage: Stage, call: Caller) -> None:
    _check_resumed(stage, call(stage.service, stage.state, user_metadata={"k": "v"}))


def _check_resumed(stage: Stage, trainer: Any) -> None:
    assert trainer.model_id != stage.run_id
    assert settled(trainer.forward(stage.data, "cross_entropy")).metrics


def create_sampling_client(stage: Stage, call: Caller) -> None:
    for where in ({"base_model": BASE_MODEL}, {"model_path": stage.sampler_weights}):
        sampler = call(stage.service, **where)

        sequences = settled(sampler.sample(stage.prompt, 1, stage.params)).sequences
        assert len(sequences) == 1


def create_custom_loss(stage: Stage, call: Caller) -> None:
    handle = call(stage.new_service(), per_datum_loss, {"logprobs": 1, "weights": 1})

    assert isinstance(handle.loss_id, str)


def copy_weights(stage: Stage, call: Caller) -> None:
    path = call(stage.service, stage.state, ttl_seconds=3600)

    assert path.startswith("tinker://") and path != stage.state


def create_rest_client(stage: Stage, call: Caller) -> None:
    assert settled(call(stage.service).list_training_runs(limit=1)) is not None


def close(stage: Stage, call: Caller) -> None:
    service = stage.new_service()
    service.create_lora_training_client(BASE_MODEL, rank=4)

    call(service, "success", detail="done")

    try:
        service.get_server_capabilities()
    except RuntimeError:
        return
    raise AssertionError("a closed client can be used")


def get_console_url(stage: Stage, call: Caller) -> None:
    url = call(stage.service)

    if stage.is_tinsmith:  # it knows that the service has no console
        assert url is None
    else:
        assert url.startswith("https://")


def get_telemetry(stage: Stage, call: Caller) -> None:
    check_telemetry(stage, call(stage.service))


def check_telemetry(stage: Stage, telemetry: Any) -> None:
    """Our client sends none; the official one has it switched on here."""
    assert (telemetry is None) == stage.is_tinsmith


def holder(stage: Stage, call: Caller) -> None:
    assert call(stage.service).get_session_id()


# Of our client alone


def unload_model(stage: Stage, call: Caller) -> None:
    trainer = stage.new_trainer()

    assert call(stage.service, trainer.model_id).model_id == trainer.model_id
