"""One working day, run by the official SDK and by ours as it stands, for `test_wire_equality.py`.

    python wire_scenario.py KEY PART=URL…
    python -m tinsmith.as_tinker wire_scenario.py KEY PART=URL…

The parts are `day`, and `losses` for a service whose engine runs uploaded losses. It waits for each
result before it goes on, so that what arrives has one order. Prints one JSON object for each
service with what the SDK's own objects said.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

BASE_MODEL = "Qwen/Qwen3-8B"
WAIT_S = 60.0
Said = dict[str, Any]


def datum(first: int, length: int = 3) -> types.Datum:
    tokens = [(first + place) % 900 for place in range(length + 1)]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rich_data() -> list[types.Datum]:
    """Every kind of chunk, tensor and span that a training request can hold."""
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    mixed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2, 3]), image])
    five: dict[str, Any] = {
        "target_tokens": np.array([2, 3, 4, 5, 6], np.int64),
        "weights": np.array([0.0, 0.25, 0.5, 1.0, 2.0], np.float32),
    }
    sparse: dict[str, Any] = {
        "target_tokens": torch.tensor([[4] + [0] * 15, [5] + [0] * 15]),
        "weights": torch.tensor([[1.0] + [0.0] * 15, [0.5] + [0.0] * 15]),
    }
    traced: dict[str, Any] = {
        "target_tokens": types.TensorData(data=[8, 9], dtype="int64", shape=[2]),
        "weights": torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
    }
    return [
        types.Datum(model_input=mixed, loss_fn_inputs=five),
        types.Datum(types.ModelInput.from_ints([7, 8]), sparse),
        types.Datum(
            types.ModelInput.from_ints([7, 8]),
            traced,
            model_input_spans=[types.PromptProvenanceSpan(sequence_id="s", offset=0, length=2)],
            loss_fn_input_spans=[
                types.PromptProvenanceSpan(sequence_id="s", offset=1, length=1),
                types.SampledProvenanceSpan(sequence_id="s", offset=0, length=1),
            ],
        ),
    ]


def output(future: Any) -> Said:
    result = future.result(timeout=WAIT_S)
    return {
        "metrics": result.metrics,
        "logprobs": [one["logprobs"].tolist() for one in result.loss_fn_outputs],
    }


def train(client: tinker.TrainingClient) -> Said:
    said: Said = {"one chunk": output(client.forward_backward([datum(1)], "cross_entropy"))}
    many = [datum(place, 2 + place) for place in range(5)]
    said["many chunks"] = output(client.forward_backward(many, "cross_entropy"))
    said["step"] = client.optim_step(types.AdamParams(learning_rate=1e-4)).result(WAIT_S).metrics
    full = types.AdamParams(
        learning_rate=1e-5, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
    )
    said["full step"] = client.optim_step(adam_params=full).result(WAIT_S).metrics
    said["forward"] = output(client.forward([datum(1)], "cross_entropy"))
    for one in rich_data():
        client.forward_backward([one], "cross_entropy").result(WAIT_S)
    inputs: dict[str, Any] = {
        "target_tokens": [2, 3],
        "logprobs": [-1.0, -2.0],
        "advantages": [0.5, -0.5],
    }
    sampled = types.Datum(types.ModelInput.from_ints([1, 2]), inputs)
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        client.forward_backward([sampled], loss).result(WAIT_S)
    client.forward_backward([sampled], "dro", {"beta": 0.5}).result(WAIT_S)
    client.optim_step(types.AdamParams()).result(WAIT_S)
    try:  # the service was told to fail the next one
        client.optim_step(types.AdamParams()).result(WAIT_S)
    except tinker.RequestFailedError as exc:
        said["failed"] = [exc.category.value, "too steep" in str(exc)]
    info = client.get_info()
    return said | {"info": [info.model_id, info.model_data.model_name, info.lora_rank]}


def custom_losses(service: tinker.ServiceClient, client: tinker.TrainingClient) -> Said:
    def squared(_: Any, logprobs: Any) -> Any:
        total = sum((one**2).sum() for one in logprobs)
        return total, {"mine": total.item()}

    def weighted(logprobs: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum(), {"custom/weight:sum": weights.sum()}

    said: Said = {"function": output(client.forward_backward_custom([datum(7), datum(9)], squared))}
    handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result(WAIT_S)
    said["loss"] = [handle.loss_id, handle.name, list(handle.input_names)]
    said["handle"] = output(client.forward_backward_custom([datum(7)], handle))
    said["built in"] = output(client.forward([datum(7)], "cross_entropy"))
    client.optim_step(types.AdamParams()).result(WAIT_S)
    return said


def save(client: tinker.TrainingClient) -> Said:
    state = client.save_state("c1", ttl_seconds=4000, user_metadata={"a": "b"}).result(WAIT_S)
    again = client.save_state("c1", overwrite=True).result(WAIT_S)
    sampler = client.save_weights_for_sampler("s1", 4000, {"c": "d"}).result(WAIT_S)
    external = client.save_weights_external("e1", ttl_seconds=5000).result(WAIT_S)
    return {
        "state": state.path,
        "again": again.path,
        "sampler": sampler.path,
        "external": external.path,
    }


def resume(service: tinker.ServiceClient, path: str) -> Said:
    said: Said = {}
    plain = service.create_training_client_from_state(path, user_metadata={"e": "f"})
    said["plain"] = output(plain.forward([datum(1)], "cross_entropy"))
    whole = service.create_training_client_from_state_with_optimizer(path)
    said["whole"] = output(whole.forward([datum(1)], "cross_entropy"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.load_state(path).result(WAIT_S)
        whole.load_state_with_optimizer(path).result(WAIT_S)
    return said


def everything(
    client: tinker.SamplingClient, prompt: types.ModelInput, targets: types.TensorData
) -> Said:
    """A sample with every field that can be asked for."""
    result = client.sample(
        prompt=prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=6, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result(WAIT_S)
    (sequence,), drawn = result.sequences, result.prompt_alt_tokens
    assert result.target_prompt_logprobs is not None and drawn is not None
    return {
        "sequence": [sequence.sequence_id, list(sequence.tokens), list(sequence.logprobs or [])],
        "top sampled": [[list(cell) for cell in row or []] for row in sequence.topk_logprobs or []],
        "prompt": result.prompt_logprobs,
        "top prompt": [
            row and [list(cell) for cell in row] for row in result.topk_prompt_logprobs or []
        ],
        "targets": result.target_prompt_logprobs.tolist(-1),
        "drawn": [drawn.tokens.tolist(), drawn.logprobs.tolist()],
    }


def sample(client: tinker.SamplingClient) -> Said:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    said: Said = {}
    for name, params in {
        "plain": types.SamplingParams(max_tokens=3, seed=1),
        "all": types.SamplingParams(max_tokens=4, seed=2, temperature=0.5, top_k=9, top_p=0.75),
        "stop text": types.SamplingParams(max_tokens=4, seed=3, stop="xyz"),
        "stop texts": types.SamplingParams(max_tokens=4, seed=4, stop=["x", "yz"]),
        "stop tokens": types.SamplingParams(max_tokens=4, seed=5, stop=[11, 12]),
    }.items():
        result = client.sample(prompt, 2, params).result(WAIT_S)
        said[name] = [(list(one.tokens), one.stop_reason) for one in result.sequences]
    dense = types.TensorData(data=[2, 4, -1, 3], dtype="int64", shape=[2, 2])
    sparse = types.TensorData(
        data=[2, 3],
        dtype="int64",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[2, 0],
    )
    said["everything"] = [everything(client, prompt, targets) for targets in (dense, sparse)]
    image = types.ImageAssetPointerChunk(format="png", location="x://y", expected_tokens=4)
    dmel = types.DmelChunk(dmel=bytes([0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]))
    pictured = prompt.append(image).append(dmel).append_int(9)
    with contextlib.suppress(tinker.BadRequestError):  # the service fetches no pictures
        client.sample(pictured, 1, types.SamplingParams(max_tokens=1, seed=7)).result(WAIT_S)
    said["logprobs"] = client.compute_logprobs(prompt).result(WAIT_S)
    said["last"] = client.compute_logprobs(prompt, prompt_logprobs_last_n=1).result(WAIT_S)
    said["base model"] = client.get_base_model()
    return said


def clone(client: tinker.SamplingClient, key: str) -> Said:
    prompt, params = types.ModelInput.from_ints([5]), types.SamplingParams(max_tokens=2, seed=8)
    pickled = pickle.loads(pickle.dumps(client))
    handled = tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle(), api_key=key)
    drawn = [one.sample(prompt, 1, params).result(WAIT_S) for one in (pickled, handled)]
    return {"clones": [list(one.sequences[0].tokens) for one in drawn]}


def manage(url: str, key: str, run: str, saved: Said) -> Said:
    rest = tinker.RestClient(base_url=url, api_key=key)
    path = saved["state"]
    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, 4000).result(WAIT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(WAIT_S)
    said: Said = {
        "run": rest.get_training_run(run).result(WAIT_S).base_model,
        "by path": rest.get_training_run_by_tinker_path(path, "accessible").result(WAIT_S).is_lora,
        "info": rest.get_weights_info_by_tinker_path(path).result(WAIT_S).lora_rank,
        "runs": len(rest.list_training_runs(5, 0, "owned", "p-1").result(WAIT_S).training_runs),
        "checkpoints": [c.public for c in rest.list_checkpoints(run).result(WAIT_S).checkpoints],
        "all": len(rest.list_user_checkpoints(limit=7, offset=1).result(WAIT_S).checkpoints),
        "sessions": rest.list_sessions(limit=3).result(WAIT_S).sessions,
    }
    session = said["sessions"][0]
    said["session"] = rest.get_session(session, "accessible").result(WAIT_S).training_run_ids
    sampler = rest.get_session(session).result(WAIT_S).sampler_ids[0]
    said["sampler"] = rest.get_sampler(sampler).result(WAIT_S).base_model
    rest.assign_session_project(session, "p-2").result(WAIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rest.search_sessions(
            types.SessionSearchRequest(project_ids=["p-2"], user_metadata={"run": "scenario"})
        ).result(WAIT_S)
    said["found"] = [one.session_id for one in found.sessions]
    try:
        said["who"] = rest.whoami().result(WAIT_S).model_dump()
    except RuntimeError:
        said["who"] = "a plain key"
    urls = rest.get_external_weights_urls(saved["external"]).result(WAIT_S).urls
    said["files"] = sorted(urls)
    said["trace"] = rest.export_session_trace(session).result(WAIT_S).rsplit("/", 1)[-1]
    said["copy"] = rest.copy_weights(path, "p-3", weights_access_token="tml-x").result(WAIT_S)
    rest.delete_checkpoint(run, "sampler_weights/s1").result(WAIT_S)
    rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    try:
        rest.get_training_run("nobody").result(WAIT_S)
    except tinker.NotFoundError as error:
        said["missing"] = [error.status_code, "no training run 'nobody'" in str(error)]
    admin = tinker.AdminClient(base_url=url, api_key=key)
    start = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    admin.get_billing_usage(start, start + datetime.timedelta(days=1)).result(WAIT_S)
    admin.get_audit_log("checkpoints", day=start.date()).result(WAIT_S)
    admin.get_current_checkpoint_storage_usage("p-1").result(WAIT_S)
    return said


def losses(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
    said = custom_losses(service, client)
    service.close("success").result(timeout=WAIT_S)
    print(json.dumps(said), flush=True)


def day(url: str, key: str) -> None:
    service = tinker.ServiceClient(
        {"run": "scenario"},
        "p-1",
        display_name="näme",
        base_url=url,
        api_key=key,
        default_headers_overrides={"x-team": "blue"},
    )
    models = service.get_server_capabilities().supported_models
    said: Said = {"models": [model.model_name for model in models]}
    client = service.create_lora_training_client(
        BASE_MODEL, rank=8, seed=3, train_mlp=False, user_metadata={"g": "h"}
    )
    said["train"] = train(client)
    said["custom"] = custom_losses(service, client)
    said["saved"] = save(client)
    sampler = client.save_weights_and_get_sampling_client()
    said["sample"] = sample(sampler)
    said["clone"] = clone(sampler, key)
    named = service.create_sampling_client(
        model_path=said["saved"]["sampler"], record_stability_info=True
    )
    params = types.SamplingParams(max_tokens=2, seed=9)
    named.sample(types.ModelInput.from_ints([1]), 1, params).result(WAIT_S)
    base = service.create_sampling_client(base_model=BASE_MODEL)
    said["base"] = base.compute_logprobs(types.ModelInput.from_ints([1, 2])).result(WAIT_S)
    said["resumed"] = resume(service, said["saved"]["state"])
    dimuon = service.create_lora_training_client(
        BASE_MODEL, rank=4, optimizer=types.DimuonOptimizerConfig()
    )
    dimuon.optim_step(types.DimuonParams(learning_rate=0.5)).result(WAIT_S)
    said["copied"] = service.copy_weights(said["saved"]["state"], ttl_seconds=4000).result(WAIT_S)
    said["managed"] = manage(url, key, client.model_id, said["saved"])
    service.close("success", detail="done").result(timeout=WAIT_S)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        part, _, service_url = argument.partition("=")
        {"day": day, "losses": losses}[part](service_url, sys.argv[1])
