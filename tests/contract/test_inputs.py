"""What users call on prompts, spans and checkpoint paths does what the official SDK does."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinker import types as official

from tests.contract.strategies import as_ours, contract, int32s, models
from tinsmith import types as ours

OURS: Any = ours
THEIRS: Any = official


def outcome(call: Callable[[], Any]) -> object:
    """What a call gives, or that it refuses."""
    try:
        return as_ours(call())
    except ValueError:
        return "refused"


@contract
@given(models(official.ModelInput), int32s)
def test_prompts_are_read_and_extended_like_the_official_ones(
    prompt: official.ModelInput, token: int
) -> None:
    mine = as_ours(prompt)

    assert outcome(mine.to_ints) == outcome(prompt.to_ints)
    assert outcome(lambda: mine.length) == outcome(lambda: prompt.length)
    assert mine.append_int(token) == as_ours(prompt.append_int(token))
    for chunk in prompt.chunks:
        assert mine.append(as_ours(chunk)) == as_ours(prompt.append(chunk))
        assert outcome(lambda: as_ours(chunk).length) == outcome(lambda: chunk.length)  # noqa: B023 - called at once


@contract
@given(st.lists(int32s))
def test_prompts_are_built_from_tokens_like_the_official_ones(tokens: list[int]) -> None:
    assert ours.ModelInput.from_ints(tokens) == as_ours(official.ModelInput.from_ints(tokens))
    assert ours.ModelInput.empty() == as_ours(official.ModelInput.empty())


headers = st.builds(
    lambda marker, dtype, rank, rest: bytes([*marker, dtype, rank]) + rest,
    st.sampled_from([[], [254]]),
    st.integers(0, 9),
    st.integers(0, 4),
    st.binary(max_size=24),
)


@settings(contract, max_examples=300)
@given(headers | st.binary(max_size=40))
@example(b"")
@example(b"\xfe")
@example(b"\x00\x02\x85\x01\x03")
@example(b"\x00\x01" + b"\xff" * 9 + b"\x01")
def test_audio_is_as_long_as_its_header_says(dmel: bytes) -> None:
    theirs = outcome(lambda: official.DmelChunk(dmel=dmel).length)

    assert outcome(lambda: ours.DmelChunk(dmel=dmel).length) == theirs


@pytest.mark.parametrize("name", ["PromptProvenanceSpan", "SampledProvenanceSpan"])
@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_id": "s", "length": 0},
        {"sequence_id": "s", "length": 3, "offset": 2},
        {"sequence_id": "", "length": 1},
        {"sequence_id": "s", "length": -1},
        {"sequence_id": "s", "length": 1, "offset": -1},
    ],
)
def test_spans_are_validated_like_the_official_ones(name: str, fields: dict[str, Any]) -> None:
    theirs = outcome(lambda: getattr(official, name)(**fields))

    assert outcome(lambda: getattr(ours, name)(**fields)) == theirs


@pytest.mark.parametrize(("input_length", "target_length"), [(2, 3), (1, 3), (2, 2)])
def test_provenance_must_tile_both_fields(input_length: int, target_length: int) -> None:
    def with_spans(types: Any) -> Any:
        datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2, 3]})
        return datum.with_provenance(
            [types.PromptProvenanceSpan(sequence_id="s", length=input_length)],
            [types.SampledProvenanceSpan(sequence_id="s", length=target_length)],
        )

    assert outcome(lambda: with_spans(OURS)) == outcome(lambda: with_spans(THEIRS))


def test_one_list_of_spans_without_the_other_is_rejected() -> None:
    with pytest.raises(AssertionError):
        official.Datum(official.ModelInput.empty(), model_input_spans=[])
    with pytest.raises(ValueError, match="both or neither"):
        ours.Datum(ours.ModelInput.empty(), model_input_spans=[])


segments = st.sampled_from(["", "run:train:0", "weights", "sampler_weights", "external_weights"])
paths = st.lists(segments, max_size=4).map(lambda parts: "tinker://" + "/".join(parts))


@settings(contract, max_examples=150)
@given(paths | st.text(max_size=20))
@example("tinker://run:train:0/weights/c1")
def test_checkpoint_paths_are_parsed_like_the_official_ones(path: str) -> None:
    theirs = outcome(lambda: official.ParsedCheckpointTinkerPath.from_tinker_path(path))
    mine = outcome(lambda: ours.ParsedCheckpointTinkerPath.from_tinker_path(path))

    if "" in path.removeprefix("tinker://").split("/"):
        assert mine == "refused"  # an empty run or name is no path, though the SDK takes it
    else:
        assert mine == theirs


@pytest.mark.parametrize("run", ["session-{}:train:0", "copy-{}", "upload-{}"])
def test_checkpoints_of_a_service_without_a_console_have_no_page(run: str) -> None:
    path = f"tinker://{run.format('0a' * 16)}/sampler_weights/x"
    now = datetime.datetime.now(datetime.UTC)
    listed = ours.Checkpoint(
        checkpoint_id="sampler_weights/x", checkpoint_type="sampler", time=now, tinker_path=path
    )
    for_sampler = OURS.SaveWeightsForSamplerResponse(path=path)

    assert OURS.SaveWeightsResponse(path=path).get_console_url() is None
    assert for_sampler.get_console_url() is None
    assert for_sampler.get_playground_url() is None
    assert listed.get_console_url() is None


@pytest.mark.parametrize("path", ["tinker://r:train:0/weights/ä b", "tinker://r/sampler_weights/x"])
def test_console_urls_match_the_official_ones(path: str) -> None:
    saved, theirs = OURS.SaveWeightsResponse(path=path), THEIRS.SaveWeightsResponse(path=path)
    for_sampler = OURS.SaveWeightsForSamplerResponse(path=path)
    their_sampler = THEIRS.SaveWeightsForSamplerResponse(path=path)

    assert saved.get_console_url() == theirs.get_console_url()
    assert for_sampler.get_console_url() == their_sampler.get_console_url()
    assert for_sampler.get_playground_url() == their_sampler.get_playground_url()
