"""SDK 0.3 to 0.24: what they really sent is read, and what they read has the shape they expect.

`tests/golden/old_sdk/` holds what unmodified releases sent, running the same program; see
`tests/golden/record_old_sdks.py`. Since the program was the same, so must be what we read.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinsmith import types as t
from tinsmith.errors import DecodeError
from tinsmith.wire import content, json_format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import read_request
from tinsmith.wire.routes import Router

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "old_sdk"
RECORDED: dict[str, list[dict[str, Any]]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in GOLDEN.glob("*.json")
}
RELEASES = sorted(RECORDED, key=lambda release: [int(part) for part in release.split(".")])

RUN = "sess-1:train:0"
NO_TIME = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)


def read(entry: dict[str, Any]) -> Any:
    """The typed request that a server of ours makes of a recorded call."""
    found = Router().find(entry["method"], entry["path"])
    assert found is not None
    endpoint, path_fields = found
    assert endpoint.name == entry["route"]
    body = b"" if entry["body"] is None else json.dumps(entry["body"]).encode()
    headers = {"content-type": entry["content_type"] or ""}
    return read_request(endpoint, path_fields, entry["query"], headers, body)


def read_all(release: str, name: str) -> list[Any]:
    return [read(entry) for entry in RECORDED[release] if entry["route"] == name]


def test_the_five_releases_are_recorded() -> None:
    assert RELEASES == ["0.3.0", "0.16.1", "0.18.0", "0.22.7", "0.24.0"]


# What the recorded program means


def expected_data(**inputs: list[float]) -> list[t.Datum]:
    # Every release said, under one name or another, that the image takes two tokens.
    image = t.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    model_input = t.ModelInput([t.EncodedTextChunk([1, 2, 3]), image])
    return [t.Datum(model_input, {"target_tokens": [2, 3, 4, 5, 6], **inputs})]


def expected_samples() -> list[t.SampleRequest]:
    prompt = t.ModelInput.from_ints([5, 6, 7])
    params = t.SamplingParams(max_tokens=2, stop=["x"], temperature=0.5)
    common: dict[str, Any] = {"prompt": prompt, "sampling_session_id": "sess-1:sample:0"}
    return [
        t.SampleRequest(
            **common, num_samples=2, sampling_params=params, seq_id=0, prompt_logprobs=False
        ),
        t.SampleRequest(
            **common,
            sampling_params=params,
            seq_id=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ),
        t.SampleRequest(
            **common,
            sampling_params=t.SamplingParams(max_tokens=1),
            seq_id=2,
            prompt_logprobs=True,
        ),
        t.SampleRequest(
            prompt=prompt,
            sampling_session_id="sess-1:sample:1",
            sampling_params=t.SamplingParams(),
            seq_id=0,
            prompt_logprobs=False,
        ),
    ]


def expected(release: str) -> dict[str, list[Any]]:
    ppo_config = None if release == "0.3.0" else {"clip_low_threshold": 0.5}
    weights, sampled = [0.0, 1.0, 0.5, 0.0, 0.0], [-1.0, -2.0, -3.0, -4.0, -5.0]
    trained = t.ForwardBackwardInput(expected_data(weights=weights), "cross_entropy")
    configured = t.ForwardBackwardInput(
        expected_data(advantages=weights, logprobs=sampled), "ppo", ppo_config
    )
    checkpoint = t.CheckpointRequest(training_run_id=RUN, checkpoint_id="weights/c1")
    listing = "list_model_checkpoints" if release == "0.3.0" else "list_checkpoints"
    return {
        "create_session": [
            t.CreateSessionRequest(tags=[], user_metadata={"run": "old"}, sdk_version=release)
        ],
        "session_heartbeat": [t.SessionHeartbeatRequest(session_id="sess-1")],
        "get_server_capabilities": [t.EmptyRequest()],
        "create_model": [
            t.CreateModelRequest(
                session_id="sess-1",
                model_seq_id=0,
                base_model="small/model",
                lora_config=t.LoraConfig(rank=8),
            )
        ],
        "forward_backward": [
            t.ForwardBackwardRequest(trained, RUN, 1),
            t.ForwardBackwardRequest(configured, RUN, 2),
        ],
        "forward": [t.ForwardRequest(trained, RUN, 3)],
        "optim_step": [
            t.OptimStepRequest(adam_params=t.AdamParams(learning_rate=0.25), model_id=RUN, seq_id=4)
        ],
        "save_weights": [t.SaveWeightsRequest(model_id=RUN, path="c1", seq_id=5)],
        "load_weights": [
            t.LoadWeightsRequest(
                model_id=RUN, path=f"tinker://{RUN}/weights/c1", seq_id=6, optimizer=False
            )
        ],
        "save_weights_for_sampler": [
            t.SaveWeightsForSamplerRequest(model_id=RUN, path="s1", seq_id=7),
            t.SaveWeightsForSamplerRequest(model_id=RUN, sampling_session_seq_id=0, seq_id=8),
        ],
        "create_sampling_session": [
            t.CreateSamplingSessionRequest(
                session_id="sess-1", sampling_session_seq_id=1, base_model="small/model"
            )
        ],
        "asample": expected_samples(),
        "get_info": [t.GetInfoRequest(model_id=RUN)],
        listing: [t.ListCheckpointsRequest(training_run_id=RUN)],
        "delete_checkpoint": [checkpoint],
    }


@pytest.mark.parametrize("name", expected("0.24.0"))
@pytest.mark.parametrize("release", RELEASES)
def test_the_same_program_decodes_to_the_same_requests_from_every_release(
    release: str, name: str
) -> None:
    if name == "list_checkpoints" and release == "0.3.0":
        name = "list_model_checkpoints"

    found = read_all(release, name)

    wanted = expected(release)[name]
    assert len(found) == len(wanted)
    for request in wanted:
        assert request in found


@pytest.mark.parametrize("release", RELEASES)
def test_the_recorded_routes_are_exactly_the_expected_ones(release: str) -> None:
    others = {"telemetry", "retrieve_future", "client_config"}
    recorded = {entry["route"] for entry in RECORDED[release]}

    assert recorded - others == set(expected(release))


@pytest.mark.parametrize("release", RELEASES)
def test_polls_of_sdks_without_metadata_only_do_not_allow_it(release: str) -> None:
    """SDK 0.13 and older do not know `allow_metadata_only`."""
    polls = read_all(release, "retrieve_future")

    assert len({poll.request_id for poll in polls}) == 13
    if release == "0.3.0":
        assert not any(poll.allow_metadata_only for poll in polls)
    else:
        assert {poll.allow_metadata_only for poll in polls} == {True, False}


@pytest.mark.parametrize("release", RELEASES)
def test_telemetry_is_decoded_with_and_without_process_info(release: str) -> None:
    """A refusal would be retried every second for ever; `process_uuid` came with 0.24."""
    (batch,) = read_all(release, "telemetry")

    assert [type(event) for event in batch.events] == [t.SessionStartEvent, t.GenericEvent]
    assert batch.events[0].timestamp == NO_TIME
    assert (batch.process_uuid is None) == (release != "0.24.0")


@pytest.mark.parametrize("release", RELEASES)
def test_results_are_json_unless_the_release_names_protobuf(release: str) -> None:
    accepted = {
        content.accepts_protobuf(entry["accept"])
        for entry in RECORDED[release]
        if entry["route"] == "retrieve_future"
    }

    is_bilingual = release in ("0.22.7", "0.24.0")
    assert accepted == ({True, False} if is_bilingual else {False})


def test_old_releases_omit_type_tags_and_send_nulls() -> None:
    """So that the tests above show that both are understood, not that neither was there."""
    oldest = json.dumps(RECORDED["0.3.0"]) + json.dumps(RECORDED["0.16.1"])
    newest = json.dumps([e for e in RECORDED["0.24.0"] if e["body"]])

    assert '"type"' not in oldest
    assert '"seed": null' in oldest and '"loss_fn_config": null' in oldest
    assert '"user_metadata": null' in oldest and '"model_path": null' in oldest
    assert '"type": "encoded_text"' in newest and "null" not in newest


# Inference and nulls, beyond what was recorded

ASAMPLE = ENDPOINTS["asample"]
JSON = {"content-type": "application/json"}


def read_prompt(chunk: dict[str, Any]) -> Any:
    body = json.dumps({"prompt": {"chunks": [chunk]}, "sampling_params": {}}).encode()
    return read_request(ASAMPLE, {}, {}, JSON, body).prompt.chunks[0]


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        ({"tokens": [1, 2]}, t.EncodedTextChunk),
        ({"data": "AA==", "format": "png"}, t.ImageChunk),
        ({"data": "AA==", "format": "png", "tokens": 3, "height": 1, "width": 1}, t.ImageChunk),
        ({"location": "gs://x", "format": "jpeg"}, t.ImageAssetPointerChunk),
        ({"location": "gs://x", "format": "jpeg", "tokens": 3}, t.ImageAssetPointerChunk),
        ({"dmel": "AA=="}, t.DmelChunk),
    ],
)
def test_the_type_of_an_untagged_chunk_is_inferred_from_its_keys(
    chunk: dict[str, Any], kind: type[Any]
) -> None:
    read_chunk = read_prompt(chunk)

    assert type(read_chunk) is kind
    assert read_prompt({**chunk, "type": read_chunk.type}) == read_chunk
    assert read_prompt({**chunk, "type": None}) == read_chunk


@pytest.mark.parametrize("chunk", [{}, {"type": "video"}, {"format": "png"}, {"type": 1}])
def test_a_chunk_of_unknown_kind_is_rejected(chunk: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="unknown chunk type"):
        read_prompt(chunk)


@pytest.mark.parametrize(
    ("name", "needed", "nulls"),
    [
        ("create_session", {"tags": [], "sdk_version": "x"}, ["user_metadata", "project_id"]),
        ("save_weights", {"model_id": "m"}, ["path", "ttl_seconds", "overwrite", "type"]),
        ("optim_step", {"model_id": "m", "adam_params": {}}, ["seq_id", "optimizer_params"]),
        ("load_weights", {"model_id": "m", "path": "p"}, ["optimizer", "optimizer_config"]),
        ("retrieve_future", {"request_id": "r"}, ["allow_metadata_only"]),
        (
            "create_model",
            {"session_id": "s", "model_seq_id": 0, "base_model": "b"},
            ["user_metadata", "lora_config", "optimizer_config", "type"],
        ),
        (
            "asample",
            {"prompt": {"chunks": []}, "sampling_params": {}},
            ["num_samples", "topk_prompt_logprobs", "prompt_logprobs", "target_prompt_logprobs"],
        ),
    ],
)
def test_explicit_nulls_mean_the_same_as_absent(
    name: str, needed: dict[str, Any], nulls: list[str]
) -> None:
    bare = read_request(ENDPOINTS[name], {}, {}, JSON, json.dumps(needed).encode())
    body = json.dumps({**needed, **dict.fromkeys(nulls)}).encode()

    assert read_request(ENDPOINTS[name], {}, {}, JSON, body) == bare


# Results as JSON


def test_samples_have_the_json_shape_that_old_releases_read() -> None:
    topk = t.TopkLogprobs(
        [[5, 6], [7, 0], [0, 0]], [[-0.5, -1.0], [-2.0, -99999.0], [-99999.0] * 2]
    )
    response = t.SampleResponse(
        [
            t.SampledSequence("stop", "id-0", tokens=[1, 2], logprobs=[-0.5, -math.inf]),
            t.SampledSequence("length", "id-1", tokens=[]),
        ],
        prompt_logprobs=[None, -3.0, math.nan],
        topk_prompt_logprobs_np=topk,
        prompt_cache_hit_tokens=9,
    )

    sent = json.loads(json_format.encode(response))

    lowest = -3.4028234663852886e38  # JSON has no infinity
    assert sent == {
        "sequences": [
            {"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-0.5, lowest]},
            {"stop_reason": "length", "tokens": []},
        ],
        "type": "sample",
        "prompt_logprobs": [None, -3.0, None],
        "topk_prompt_logprobs": [[[5, -0.5], [6, -1.0]], [[7, -2.0]], None],
    }


def test_samples_contain_only_requested_fields() -> None:
    response = t.SampleResponse([t.SampledSequence("stop", tokens=[1])])

    sent = json.loads(json_format.encode(response))

    assert sent == {"sequences": [{"stop_reason": "stop", "tokens": [1]}], "type": "sample"}


def test_training_results_have_the_json_shape_that_old_releases_read() -> None:
    output = t.ForwardBackwardOutput(
        "ArrayRecord",
        [
            {"logprobs": t.TensorData([-0.25, -0.5], "float32", [2])},
            {
                "logprobs": t.TensorData([[1.0], [2.0]], "float32"),
                "n": t.TensorData([3], "int64", [1]),
            },
        ],
        {"loss:sum": 1.5, "nan:mean": math.nan, "inf:max": math.inf},
    )

    sent = json.loads(json_format.encode(output))

    assert sent == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-0.25, -0.5], "dtype": "float32", "shape": [2]}},
            {
                "logprobs": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2, 1]},
                "n": {"data": [3], "dtype": "int64", "shape": [1]},
            },
        ],
        "metrics": {"loss:sum": 1.5, "inf:max": 1.7976931348623157e308},
    }
