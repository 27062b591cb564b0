"""Record what older releases of the official SDK really send, into `old_sdk/<release>.json`.

    .venv/bin/python -m tests.golden.record_old_sdks SCRATCH_DIR

Downloads each release's wheel into SCRATCH_DIR (outside of the repository), unpacks it there, and
runs the unmodified release with this environment's other packages against the service of
`tinsmith.testing`. Takes about twenty seconds for each release: heartbeats are waited for.

What varies from run to run is replaced: ids, times and the platform. Telemetry keeps one event of
each kind, without its free-form data, which holds stack traces. The recorded files hold one entry
for each distinct body of a route.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tinsmith.testing import ReceivedRequest, running_service

RELEASES = ("0.3.0", "0.16.1", "0.18.0", "0.22.7", "0.24.0")
OUT = Path(__file__).parent / "old_sdk"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0

CLIENT = """
import sys, time
import tinker
from tinker import types

service = tinker.ServiceClient(
    user_metadata={"run": "old"}, base_url=sys.argv[1], api_key="tml-test"
)
trainer = service.create_lora_training_client(base_model="small/model", rank=8)


def tensor(data, dtype="float32"):
    return types.TensorData(data=data, dtype=dtype, shape=[len(data)])


model_input = types.ModelInput(
    chunks=[
        types.EncodedTextChunk(tokens=[1, 2, 3]),
        types.ImageChunk(**IMAGE, data=b"\\x89PNG", format="png"),
    ]
)
targets = tensor([2, 3, 4, 5, 6], "int64")


def datum(**inputs):
    return types.Datum(
        model_input=model_input, loss_fn_inputs={"target_tokens": targets, **inputs}
    )


weights = tensor([0.0, 1.0, 0.5, 0.0, 0.0])
data = [datum(weights=weights)]
trained = trainer.forward_backward(data, "cross_entropy").result()
logprobs = trained.loss_fn_outputs[0]["logprobs"]
loss = -logprobs.data[1] - 0.5 * logprobs.data[2]
assert abs(trained.metrics["loss:sum"] - loss) < 1e-5, trained
sampled = tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
configured = dict(loss_fn_config={"clip_low_threshold": 0.5}) if CONFIGURABLE else {}
clipped = [datum(advantages=weights, logprobs=sampled)]
trainer.forward_backward(clipped, "ppo", **configured).result()
forward = trainer.forward(data, "cross_entropy").result()
assert forward.loss_fn_outputs[0]["logprobs"].data == logprobs.data, forward
step = trainer.optim_step(types.AdamParams(learning_rate=0.25)).result()
assert step.metrics, step
saved = trainer.save_state("c1").result()
assert saved.path == f"tinker://{trainer.model_id}/weights/c1", saved
trainer.load_state(saved.path).result()
trainer.save_weights_for_sampler("s1").result()
sampler = trainer.save_weights_and_get_sampling_client("s2")
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=2, stop=["x"], temperature=0.5)
plain = sampler.sample(prompt, 2, params).result()
assert [len(s.tokens) for s in plain.sequences] == [2, 2], plain
assert [len(s.logprobs) for s in plain.sequences] == [2, 2], plain
rich = sampler.sample(
    prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
).result()
assert [row and len(row) for row in rich.topk_prompt_logprobs] == [None, 2, 2], rich
assert rich.prompt_logprobs[0] is None and len(rich.prompt_logprobs) == 3, rich
assert sampler.compute_logprobs(prompt).result() == rich.prompt_logprobs
base = service.create_sampling_client(base_model="small/model")
assert base.sample(prompt, 1, types.SamplingParams()).result().sequences[0].tokens
service.get_server_capabilities()
trainer.get_info()
rest = service.create_rest_client()
rest.list_checkpoints(trainer.model_id).result()
rest.delete_checkpoint(trainer.model_id, "weights/c1").result()
time.sleep(11)  # the first heartbeat
"""
"""What each release runs. The constants in capitals are what the oldest does not know."""


def main(scratch: Path) -> None:
    OUT.mkdir(exist_ok=True)
    for release in RELEASES:
        calls = record(release, unpacked(scratch, release))
        text = json.dumps(calls, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        (OUT / f"{release}.json").write_text(text, encoding="utf-8")
        print(f"{release}: {len(calls)} bodies")


def unpacked(scratch: Path, release: str) -> Path:
    """The folder that holds the release's packages."""
    folder = scratch / release
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*pip, "-d", str(scratch), f"tinker=={release}"], check=True)
        with zipfile.ZipFile(next(scratch.glob(f"tinker-{release}-*.whl"))) as wheel:
            wheel.extractall(folder)
    return folder


def record(release: str, packages: Path) -> list[dict[str, Any]]:
    """Run the release against a service and give back what it sent."""
    image = {"height": 1, "width": 1, "tokens": 2} if release == "0.3.0" else {"expected_tokens": 2}
    client = f"IMAGE, CONFIGURABLE = {image!r}, {release != '0.3.0'}\n{CLIENT}"
    with running_service(
        base_models=["small/model"], inline_bytes=64, keep_bodies=True, long_poll_s=5.0
    ) as server:
        # Telemetry tells of a poll that is to be repeated.
        server.faults.pause("optim_step", queue_state="paused_capacity", polls=1, poll_after_s=0.0)
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", client, server.base_url],
            env={**os.environ, "PYTHONPATH": str(packages), "TINKER_TELEMETRY": "1"},
            cwd=packages,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    unread = [one.path for one in server.requests() if one.request is None]
    if finished.returncode or unread:
        raise SystemExit(f"{release}: {unread}\n{finished.stderr}")
    entries = map(as_entry, server.requests())
    distinct = {json.dumps(entry, sort_keys=True): entry for entry in entries}
    return [distinct[key] for key in sorted(distinct)]


def as_entry(received: ReceivedRequest) -> dict[str, Any]:
    """What a test needs of a request: the route, and everything that was said."""
    entry: dict[str, Any] = {
        "route": received.endpoint,
        "method": received.method,
        "path": received.path,
        "query": received.query,
        "accept": received.headers.get("accept"),
        "content_type": received.headers.get("content-type"),
        "body": json.loads(received.body) if received.body else None,
    }
    if received.endpoint == "telemetry":
        kinds = {event["event"]: event for event in entry["body"]["events"]}
        entry["body"]["events"] = [
            {**event, **({"event_data": {}} if "event_data" in event else {})}
            for event in kinds.values()
        ]
    settled: dict[str, Any] = json.loads(steady(json.dumps(entry)))
    return settled


def steady(text: str) -> str:
    """The text without what differs from run to run."""
    text = re.sub(r"session-[0-9a-f]{32}", "sess-1", text)
    text = re.sub(r'"[0-9a-f]{8}-[0-9a-f-]{27}"', '"00000000-0000-0000-0000-000000000000"', text)
    text = re.sub(r'"20\d\d-\d\d-\d\dT[^"]*"', '"2026-01-02T03:04:05.678901Z"', text)
    text = re.sub(r'"platform": "[^"]*"', '"platform": "Linux"', text)
    return re.sub(r'"duration": "[^"]*"', '"duration": "0:00:12"', text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
