"""A program that uses the official client ends well, whatever it leaves in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.service.served import BASE_MODEL, serving

RUNS = 5

LEAVES_SAMPLES_IN_FLIGHT = f"""
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-exit")
sampler = service.create_sampling_client(base_model="{BASE_MODEL}")
prompt = tinker.ModelInput.from_ints([1, 2, 3])
params = tinker.SamplingParams(max_tokens=20)
futures = [sampler.sample(prompt, 1, params) for _ in range(200)]
futures[0].result()
assert "pyqwest" not in sys.modules
"""


def test_the_official_client_exits_with_status_0_with_samples_in_flight(tmp_path: Path) -> None:
    """Its default transport aborted the process in about one of ten runs."""
    with serving(tmp_path) as service:
        for _ in range(RUNS):
            done = subprocess.run(
                [sys.executable, "-c", LEAVES_SAMPLES_IN_FLIGHT, service.base_url],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr
