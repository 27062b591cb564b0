"""Names, numbers, adapters and optimizers: refused with the field, the value and the bound."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.errors import BadRequestError
from tinsmith.service.api import request_checks
from tinsmith.types.requests import (
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    OptimizerConfigBase,
    OptimParamsBase,
)

RUN = "session-1:train:0"


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a\\b", "a%2fb", "a?b", "a\0b", "x" * 300, ".", "con"]
)
def test_a_name_that_could_escape_its_folder_is_rejected(name: str) -> None:
    """It becomes part of a file's path."""
    with pytest.raises(BadRequestError, match="path"):
        request_checks.check_save(RUN, SaveWeightsRequest(model_id=RUN, path=name))


@pytest.mark.parametrize("ttl", [-1, 0, 3599, 10 * 365 * 24 * 3600 + 1, 10**12])
def test_a_ttl_has_limits(ttl: int) -> None:
    """An hour to ten years."""
    with pytest.raises(BadRequestError, match=f"ttl_seconds is {ttl}; it must be 3600 to"):
        request_checks.check_save(RUN, SaveWeightsRequest(model_id=RUN, path="a", ttl_seconds=ttl))


@pytest.mark.parametrize(
    "fields",
    [{}, {"path": "a", "sampling_session_seq_id": 1}, {"sampling_session_seq_id": -1}],
)
def test_a_save_for_a_sampler_needs_a_name_or_a_sampler_seq_id(fields: dict[str, Any]) -> None:
    """And not both."""
    with pytest.raises(BadRequestError):
        request_checks.check_save(RUN, SaveWeightsForSamplerRequest(model_id=RUN, **fields))


def test_good_saves_are_accepted() -> None:
    """Of all kinds."""
    request_checks.check_save(
        RUN, SaveWeightsRequest(model_id=RUN, path="a-1_b.c", ttl_seconds=3600)
    )
    request_checks.check_save(RUN, SaveWeightsRequest(model_id=RUN))
    request_checks.check_save(
        RUN, SaveWeightsForSamplerRequest(model_id=RUN, sampling_session_seq_id=0)
    )
    request_checks.check_save(RUN, SaveWeightsExternalRequest(model_id=RUN, path="a"))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "one",
        "tinker://run/weights",
        "tinker://run/snapshots/3",
        "snapshots/run/3",
        "http://x/y/z",
    ],
)
def test_only_paths_that_clients_can_address_are_accepted(path: str) -> None:
    """The service's own snapshots are not among them."""
    with pytest.raises(BadRequestError):
        request_checks.check_path(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("beta1", 1.0), ("beta2", -0.1), ("eps", -1.0)],
)
def test_an_optim_step_with_nonsensical_settings_is_rejected(name: str, value: float) -> None:
    """Named with their bounds."""
    step = OptimStepRequest(model_id=RUN, optim_params=AdamParams(**{name: value}))

    with pytest.raises(
        BadRequestError, match=f"adam_params.{name} is {value}; it must be at least 0"
    ):
        request_checks.check_step(step, AdamOptimizerConfig())


def test_an_optim_step_must_match_the_optimizer_of_its_model() -> None:
    """Which was chosen when the model was made."""
    adam = OptimStepRequest(model_id=RUN, optim_params=AdamParams())
    dimuon = OptimStepRequest(model_id=RUN, optim_params=DimuonParams(learning_rate=0.1))

    request_checks.check_step(adam, AdamOptimizerConfig())
    request_checks.check_step(dimuon, DimuonOptimizerConfig())
    with pytest.raises(BadRequestError, match="created with optimizer 'dimuon'"):
        request_checks.check_step(adam, DimuonOptimizerConfig())
    with pytest.raises(BadRequestError, match="created with optimizer 'adamw'"):
        request_checks.check_step(dimuon, AdamOptimizerConfig())
    unknown = OptimStepRequest(model_id=RUN, optim_params=OptimParamsBase(type="lion"))
    with pytest.raises(BadRequestError, match=r"optimizer_params\.type is 'lion'"):
        request_checks.check_step(unknown, DimuonOptimizerConfig())
    with pytest.raises(BadRequestError, match=r"optimizer_config\.type is 'lion'"):
        request_checks.check_optimizer(OptimizerConfigBase(type="lion"))


@pytest.mark.parametrize("text", ["a\0", "\ud800"])
def test_text_that_a_database_cannot_store_is_rejected(text: str) -> None:
    """In names and anywhere inside of metadata."""
    with pytest.raises(BadRequestError):
        request_checks.check_texts(("name", text))
    for metadata in ({"a": [text]}, {text: 1}, {"a": {"b": text}}):
        with pytest.raises(BadRequestError):
            request_checks.check_metadata("user_metadata", metadata)


def test_metadata_and_texts_have_size_limits() -> None:
    """They are kept for long."""
    with pytest.raises(BadRequestError, match="the maximum is 65536"):
        request_checks.check_metadata("user_metadata", {"a": "x" * 70_000})
    with pytest.raises(BadRequestError, match="display_name has 1001 characters"):
        request_checks.check_texts(("display_name", "x" * 1001))
