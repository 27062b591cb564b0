from __future__ import annotations

import pytest

from tinsmith import ParsedCheckpointTinkerPath
from tinsmith.errors import ValidationError


@pytest.mark.parametrize(
    ("kind", "checkpoint_type"),
    [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")],
)
def test_a_path_is_parsed(kind: str, checkpoint_type: str) -> None:
    path = f"tinker://run:train:0/{kind}/step-10"

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)

    assert parsed.tinker_path == path
    assert parsed.training_run_id == "run:train:0"
    assert parsed.checkpoint_type == checkpoint_type
    assert parsed.checkpoint_id == f"{kind}/step-10"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://run",
        "tinker://run/weights",
        "tinker://run/weights/",
        "tinker:///weights/x",
        "tinker://run//x",
        "tinker://run/weights/x/y",
        "tinker://run/weights/x/",
        "https://run/weights/x",
        "TINKER://run/weights/x",
        "run/weights/x",
        " tinker://run/weights/x",
    ],
)
def test_an_invalid_path_is_rejected_with_the_expected_form(path: str) -> None:
    with pytest.raises(ValueError, match="tinker://<training run>/<kind>/<name>"):
        ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_an_unknown_kind_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="sampler_weights, external_weights"):
        ParsedCheckpointTinkerPath.from_tinker_path("tinker://run/gradients/x")


def test_the_message_about_a_long_path_is_short() -> None:
    with pytest.raises(ValidationError) as caught:
        ParsedCheckpointTinkerPath.from_tinker_path("x" * 1_000_000)

    assert len(str(caught.value)) < 400
