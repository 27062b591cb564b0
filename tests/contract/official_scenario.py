"""Run by the unmodified official SDK, in a process of its own: train, save, sample, manage.

    python -m tests.contract.official_scenario <base url>

Prints one JSON object with what the SDK's own objects said. Run by `test_official_client.py`.
"""

from __future__ import annotations

import datetime
import json
import pickle
import sys
import warnings
from typing import Any

import tinker
import torch
from tinker import types

HOUR = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)


def main(base_url: str) -> None:
    said: dict[str, Any] = {}
    with tinker.ServiceClient(
        {"run": "scenario"}, "proj-1", display_name="näme", base_url=base_url, api_key="tml-test"
    ) as service:
        said["models"] = [m.model_name for m in service.get_server_capabilities().supported_models]
        trainer = service.create_lora_training_client("small/model", rank=8, seed=3)
        said |= train(trainer) | custom_loss(service, trainer) | save(trainer)
        sampler = trainer.save_weights_and_get_sampling_client()
        said |= sample(sampler) | resume(service)
        said["named sampler"] = service.create_sampling_client(
            model_path=said["sampler path"]
        ).get_base_model()
        said |= manage(trainer.model_id, base_url)
    print(json.dumps(said), flush=True)


def train(trainer: tinker.TrainingClient) -> dict[str, Any]:
    data = [
        types.Datum(
            model_input=types.ModelInput(
                chunks=[
                    types.EncodedTextChunk(tokens=[1, 2, 3]),
                    types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2),
                ]
            ),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
                "weights": types.TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3]),
            },
        ),
        types.Datum(
            types.ModelInput.from_ints([7]),
            {"target_tokens": torch.tensor([8])},  # type: ignore[dict-item]  # tensors are converted
        ),
    ]
    both = trainer.forward_backward(data, "cross_entropy", {"beta": 0.5, "note": "x"})
    forward = trainer.forward(data, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=0.25))
    failing = trainer.optim_step(types.AdamParams(learning_rate=-1.0))
    try:
        failure = [str(failing.result()), "no failure"]
    except tinker.RequestFailedError as exc:
        failure = [str(exc), exc.category.value]
    return {
        "loss": both.result().metrics["loss:sum"],
        "rows": both.result().metrics["rows:max"],
        "logprobs": [o["logprobs"].tolist() for o in both.result().loss_fn_outputs],
        "forward": [o["logprobs"].tolist() for o in forward.result().loss_fn_outputs],
        "step": step.result().metrics,
        "dimuon": trainer.optim_step(types.DimuonParams(learning_rate=0.5)).result().metrics,
        "failed": failure,
        "info": trainer.get_info().model_data.model_name,
    }


def custom_loss(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> dict[str, Any]:
    def sharpened(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
        loss = -(logprobs.sum(dim=0, dtype=None) * weights[:1].sum())
        return loss, {"custom/size:sum": logprobs.exp().sum()}

    handle = service.create_custom_loss(sharpened, {"logprobs": 1, "weights": 1}).result()
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {
            "target_tokens": types.TensorData(data=[2, 3], dtype="int64", shape=[2]),
            "weights": types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2]),
        },
    )
    done = trainer.forward_backward_custom([datum], handle).result()
    return {"loss id": handle.loss_id, "custom loss": done.metrics["loss:sum"]}


def save(trainer: tinker.TrainingClient) -> dict[str, Any]:
    saved = trainer.save_state("c1", ttl_seconds=3600, user_metadata={"k": "v"}).result()
    for_sampler = trainer.save_weights_for_sampler("s1").result()
    external = trainer.save_weights_external("e1", age_encryption_recipients=["age1x"]).result()
    return {
        "state path": saved.path,
        "sampler path": for_sampler.path,
        "external path": external.path,
    }


def sample(sampler: tinker.SamplingClient) -> dict[str, Any]:
    prompt = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[5, 6, 7]),
            types.ImageAssetPointerChunk(format="png", location="gs://x", expected_tokens=1),
        ]
    )
    params = types.SamplingParams(max_tokens=2, seed=1, stop=["x"], temperature=0.5)
    text = types.ModelInput.from_ints([5, 6, 7])
    asked = types.TensorData(
        data=[4, 8],
        dtype="int64",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[2, 0],
    )
    plain = sampler.sample(prompt, 2, params).result()
    rich = sampler.sample(
        text,
        1,
        types.SamplingParams(max_tokens=3, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=asked,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=1,
    ).result()
    clone = pickle.loads(pickle.dumps(sampler))
    target, drawn = rich.target_prompt_logprobs, rich.prompt_alt_tokens
    assert target is not None and drawn is not None
    return {
        "samples": [[s.stop_reason, s.sequence_id, s.tokens, s.logprobs] for s in plain.sequences],
        "cache hits": plain.prompt_cache_hit_tokens,
        "prompt logprobs": sampler.compute_logprobs(text).result(),
        "last prompt logprob": rich.prompt_logprobs,
        "top prompt": rich.topk_prompt_logprobs,
        "top sampled": rich.sequences[0].topk_logprobs,
        "targets": target.tolist(-1),
        "drawn": [drawn.tokens.tolist(), drawn.logprobs.tolist()],
        "clone": clone.sample(text, 1, params).result().sequences[0].tokens,
    }


def resume(service: tinker.ServiceClient) -> dict[str, Any]:
    again = service.create_training_client_from_state_with_optimizer(
        "tinker://sess-1:train:0/weights/c1"
    )
    return {"resumed": again.model_id}


def manage(run_id: str, base_url: str) -> dict[str, Any]:
    rest = tinker.RestClient(base_url=base_url, api_key="tml-test")
    admin = tinker.AdminClient(base_url=base_url, api_key="tml-test")
    path = f"tinker://{run_id}/weights/c1"
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.delete_checkpoint(run_id, "sampler_weights/s1").result()
    rest.assign_session_project("sess-1", "proj-2").result()
    try:
        who = rest.whoami().result().model_dump()
    except RuntimeError:  # the server exchanges no credentials, so nobody knows
        who = None
    missing = rest.get_training_run("nobody:train:0").exception(30)
    assert isinstance(missing, tinker.NotFoundError)
    urls = rest.get_external_weights_urls(f"tinker://{run_id}/external_weights/e1").result()
    usage = admin.get_billing_usage(HOUR, HOUR + datetime.timedelta(hours=1)).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # search is experimental
        found = rest.search_sessions(_search()).result()
    return {
        "runs": [
            r.training_run_id
            for r in rest.list_training_runs(project_id="p").result().training_runs
        ],
        "run": rest.get_training_run(run_id, access_scope="accessible")
        .result()
        .last_request_time.isoformat(),
        "checkpoints": [c.tinker_path for c in rest.list_checkpoints(run_id).result().checkpoints],
        "all checkpoints": rest.list_user_checkpoints(limit=5)
        .result()
        .model_dump(mode="json")["cursor"],
        "weights": rest.get_weights_info_by_tinker_path(path).result().lora_rank,
        "session": rest.get_session("sess-1").result().user_metadata,
        "sessions": rest.list_sessions(limit=3).result().sessions,
        "statuses": [s.status and s.status.type for s in found.sessions],
        "copy": rest.copy_weights(path, "proj-2", weights_access_token="tml-other").result(),
        "trace": rest.export_session_trace("sess-1").result(),
        "urls": urls.urls,
        "audit": [
            e.event for e in admin.get_audit_log("checkpoints", HOUR.date()).result().entries
        ],
        "billing": [e.event_info.type for e in usage.data],
        "storage": admin.get_current_checkpoint_storage_usage("p").result().data[0].size_bytes,
        "missing": str(missing),
        "who": who,
    }


def _search() -> types.SessionSearchRequest:
    return types.SessionSearchRequest(
        display_name="näme",
        owner=types.UserSearchOwner(owner_urns=["u"]),
        statuses=[types.ClientFinishedSessionStatusQuery(reasons=["errored"])],
        cursor=types.SessionSearchCursor(last_created_at=HOUR, last_session_id="s"),
    )


if __name__ == "__main__":
    main(sys.argv[1])
