"""Programs in the style of the cookbook, unchanged on the official SDK and on tinsmith."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.small_models import make_model
from tinsmith.testing import ScriptedService, running_service

PROGRAMS = Path(__file__).with_name("programs")
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "batches")
TIME_LIMIT_S = 300


def prepare(service: ScriptedService, name: str) -> None:
    """What goes wrong on the service, alike for both."""
    if name == "retry_layer":
        service.faults.expire_results("forward_backward", times=2)
        service.faults.fail_command("optim_step", category="user", times=1)


def options(name: str, model: Path) -> dict[str, Any]:
    """What the service is like; uploaded losses need an engine that runs them."""
    if name != "custom_losses":
        return {}
    return {
        "engine": "embedded",
        "base_models": [f"Qwen/Qwen3-8B={model}"],
        "custom_loss_server_side": True,
    }


def output_of(name: str, interpreter: list[str], model: Path) -> str:
    """What a program prints on a service of its own."""
    with running_service(
        long_poll_s=2.0, fwdbwd_max_chunk_len=64, **options(name, model)
    ) as service:
        prepare(service, name)
        finished = subprocess.run(
            [sys.executable, *interpreter, str(PROGRAMS / f"{name}.py")],
            env={
                **os.environ,
                "TINKER_BASE_URL": service.base_url,
                "TINKER_API_KEY": service.api_key,
                "TINKER_TELEMETRY": "0",
            },
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


@pytest.mark.parametrize("name", NAMES)
def test_programs_print_the_same_output_with_both_packages(name: str, tmp_path: Path) -> None:
    if name == "custom_losses":
        make_model(tmp_path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        official = pool.submit(output_of, name, [], tmp_path)
        ours = pool.submit(output_of, name, ["-m", "tinsmith.as_tinker"], tmp_path)

    assert ours.result() == official.result()
    assert len(official.result().splitlines()) >= 2
