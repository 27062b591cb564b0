"""Record what older releases of the official SDK really send, into `old_sdk/<release>.json`.

    .venv/bin/python -m tests.golden.record_old_sdks SCRATCH_DIR

Downloads each release's wheel into SCRATCH_DIR (outside of the repository), unpacks it there, and
runs the unmodified release with this environment's other packages against the loopback server of
`tests/contract`. Takes about twenty seconds for each release: heartbeats are waited for.

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

from tests.contract.loopback import Call, LoopbackServer
from tests.contract.small_service import SmallService

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
data = [
    types.Datum(
        model_input=types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=[1, 2, 3]),
                types.ImageChunk(**IMAGE, data=b"\\x89PNG", format="png"),
            ]
        ),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
            "weights": types.TensorData(data=[0.0, 1.0, 0.5], dtype="float32", shape=[3]),
        },
    )
]
trained = trainer.forward_backward(data, "cross_entropy").result()
assert trained.loss_fn_outputs[0]["logprobs"].tolist() == [-0.25, -0.375, -0.5], trained
assert trained.metrics["loss:sum"] == 1.125, trained
configured = dict(loss_fn_config={"clip_low_threshold": 0.5}) if CONFIGURABLE else {}
trainer.forward_backward(data, "ppo", **configured).result()
forward = trainer.forward(data, "cross_entropy").result()
assert forward.loss_fn_outputs[0]["logprobs"].tolist() == [-0.25, -0.375, -0.5], forward
step = trainer.optim_step(types.AdamParams(learning_rate=0.25)).result()
assert step.metrics == {"grad_norm": 0.25}, step
saved = trainer.save_state("c1").result()
assert saved.path == "tinker://sess-1:train:0/weights/c1", saved
trainer.load_state(saved.path).result()
trainer.save_weights_for_sampler("s1").result()
sampler = trainer.save_weights_and_get_sampling_client("s2")
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=2, stop=["x"], temperature=0.5)
plain = sampler.sample(prompt, 2, params).result()
assert [s.tokens for s in plain.sequences] == [[6, 7], [6, 7]], plain
assert [s.logprobs for s in plain.sequences] == [[-1.5, -1.75]] * 2, plain
rich = sampler.sample(
    prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
).result()
assert rich.prompt_logprobs == [None, -3.0, -3.5], rich
assert rich.topk_prompt_logprobs == [[(1, -0.5), (2, -0.5)], [(1, -0.5)], [(1, -0.5)]], rich
assert sampler.compute_logprobs(prompt).result() == [None, -3.0, -3.5]
base = service.create_sampling_client(base_model="small/model")
assert base.sample(prompt, 1, types.SamplingParams()).result().sequences[0].tokens == [6, 7, 8]
service.get_server_capabilities()
trainer.get_info()
rest = service.create_rest_client()
rest.list_checkpoints("sess-1:train:0").result()
rest.delete_checkpoint("sess-1:train:0", "weights/c1").result()
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
    """Run the release against the loopback server and give back what it sent."""
    image = {"height": 1, "width": 1, "tokens": 2} if release == "0.3.0" else {"expected_tokens": 2}
    client = f"IMAGE, CONFIGURABLE = {image!r}, {release != '0.3.0'}\n{CLIENT}"
    with LoopbackServer(SmallService()) as server:
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", client, server.url],
            env={**os.environ, "PYTHONPATH": str(packages), "TINKER_TELEMETRY": "1"},
            cwd=packages,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if finished.returncode or server.problems:
        raise SystemExit(f"{release}: {server.problems}\n{finished.stderr}")
    distinct = {json.dumps(entry, sort_keys=True): entry for entry in map(as_entry, server.calls)}
    return [distinct[key] for key in sorted(distinct)]


def as_entry(call: Call) -> dict[str, Any]:
    """What a test needs of a call: the route, and everything that was said."""
    entry: dict[str, Any] = {
        "route": call.endpoint.name,
        "method": call.method,
        "path": call.path,
        "query": call.query,
        "accept": call.headers.get("accept"),
        "content_type": call.headers.get("content-type"),
        "body": json.loads(call.body) if call.body else None,
    }
    if call.endpoint.name == "telemetry":
        kinds = {event["event"]: event for event in entry["body"]["events"]}
        entry["body"]["events"] = [
            {**event, **({"event_data": {}} if "event_data" in event else {})}
            for event in kinds.values()
        ]
    settled: dict[str, Any] = json.loads(steady(json.dumps(entry)))
    return settled


def steady(text: str) -> str:
    """The text without what differs from run to run."""
    text = re.sub(r'"[0-9a-f]{8}-[0-9a-f-]{27}"', '"00000000-0000-0000-0000-000000000000"', text)
    text = re.sub(r'"20\d\d-\d\d-\d\dT[^"]*"', '"2026-01-02T03:04:05.678901Z"', text)
    text = re.sub(r'"platform": "[^"]*"', '"platform": "Linux"', text)
    return re.sub(r'"duration": "[^"]*"', '"duration": "0:00:12"', text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
