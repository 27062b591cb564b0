"""What `tinsmith serve` says to whoever looks at its terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.service.served import BASE_MODEL, serving

TRAIN = f"""
import tinsmith

tokens = tinsmith.ModelInput.from_ints([1, 2, 3])
datum = tinsmith.Datum(tokens, {{"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]}})
with tinsmith.ServiceClient() as client:
    training = client.create_lora_training_client({BASE_MODEL!r}, rank=8)
    for _ in range(3):
        output = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result()
    print(training.model_id)
"""


def test_serve_prints_the_client_settings_and_the_progress_of_runs(tmp_path: Path) -> None:
    """It printed nothing while clients trained, and not how to get them to it."""
    with serving(tmp_path) as served:
        printed = served.log_text()
        # As pasted into a shell.
        exports = dict(re.findall(r"^  export (\w+)=(\S+)$", printed, re.MULTILINE))
        trained = subprocess.run(
            [sys.executable, "-c", TRAIN],
            env={**os.environ, "HOME": str(tmp_path), **exports},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        served.stop()
        said = served.log_text()

    assert trained.returncode == 0, trained.stderr
    assert set(exports) == {"TINKER_BASE_URL", "TINKER_API_KEY"}
    assert exports["TINKER_BASE_URL"] == served.base_url
    run = trained.stdout.strip().removeprefix("session-")[:8]
    assert re.search(rf"run {run}:train:0: began to train {re.escape(BASE_MODEL)}", said)
    assert re.search(rf"run {run}:train:0: step 3, loss per token [\d.]+, [\d,]+ tokens/s", said)
    assert re.search(rf"run {run}:train:0: ended after step 3", said)


def test_serve_never_prints_existing_keys(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "key", "create", "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    [key] = re.findall(r"tml-[\w-]{20,}", made.stdout)
    with serving(tmp_path) as served:
        served.stop()

        assert "export TINKER_API_KEY='<your key>'" in served.log_text()
        assert key not in served.log_text()
