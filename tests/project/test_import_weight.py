"""What importing tinsmith and starting its command may load.

Each case runs in an interpreter of its own, because this one has long loaded half of them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tinsmith.testing import running_service

HEAVY = {
    "aiohttp",
    "asyncpg",
    "fastapi",
    "google.protobuf",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "orjson",
    "pydantic",
    "ray",
    "sqlite3",
    "starlette",
    "tinker",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
}
TOUCH_EVERY_NAME = "import tinsmith\nfor name in tinsmith.__all__: getattr(tinsmith, name)\n"
SHOW_HELP = "from tinsmith.cli.main import main; main(['--help'])"
SHOW_EVERY_HELP = """\
from tinsmith.cli.completion import levels
from tinsmith.cli.main import main, root_parser
for level in levels(root_parser()): main([*level.words, "--help"])
"""
DRAW_A_SAMPLE = """\
import tinsmith
service = tinsmith.ServiceClient(base_url={base_url!r}, api_key={api_key!r})
sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
prompt, params = tinsmith.ModelInput.from_ints([1]), tinsmith.SamplingParams(max_tokens=1)
sampler.sample(prompt, 1, params).result(60)
"""


def modules_loaded_by(program: str) -> set[str]:
    """Names of the modules in memory after `program` has run in a fresh interpreter."""
    # -I keeps the caller's PYTHON* settings out; the report is the last line, after any output.
    report = "\nimport json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    finished = subprocess.run(
        [sys.executable, "-I", "-c", program + report], capture_output=True, text=True, check=True
    )
    return set(json.loads(finished.stdout.splitlines()[-1]))


@pytest.mark.parametrize("program", ["import tinsmith", TOUCH_EVERY_NAME, SHOW_HELP])
def test_nothing_heavy_is_loaded(program: str) -> None:
    loaded = modules_loaded_by(program)

    assert "tinsmith" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("program", ["import tinsmith", SHOW_HELP, SHOW_EVERY_HELP])
def test_import_and_help_load_neither_msgspec_nor_asyncio(program: str) -> None:
    loaded = modules_loaded_by(program)

    heavy = {"msgspec", "asyncio", "tinsmith.types", "tinsmith.wire", "tinsmith.client"}
    assert loaded & heavy == set()


def test_every_public_name_loads_without_rarely_used_modules() -> None:
    loaded = modules_loaded_by(TOUCH_EVERY_NAME)

    seldom_needed = {"ctypes", "difflib", "email.utils", "fractions", "hashlib"}
    seldom_needed |= {
        "tinsmith.client.tokenization.lookup",
        "tinsmith.client.transports.in_process",
    }
    assert loaded & seldom_needed == set()


def test_a_sample_is_drawn_without_rarely_used_modules() -> None:
    """Of a client of thirty megabytes, each library would be half a megabyte."""
    with running_service() as service:
        program = DRAW_A_SAMPLE.format(base_url=service.base_url, api_key=service.api_key)
        loaded = modules_loaded_by(program)

    assert "tinsmith.client.transports.direct" in loaded
    seldom_needed = {"email.utils", "encodings.idna", "hashlib", "queue", "urllib.parse"}
    assert loaded & (HEAVY | seldom_needed) == set()
    others = ["losses.graph", "model_creation", "rest", "training"]
    others += ["samples.sampler_handle", "samples.stream", "samples.window"]
    assert loaded & {f"tinsmith.client.{name}" for name in others} == set()
    assert "tinsmith.wire.proto_format" not in loaded
