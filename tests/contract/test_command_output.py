"""What the official command prints as JSON, ours prints too, for the same service."""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cli.command import TIME_LIMIT_S, Commands
from tinsmith.client.service import ServiceClient
from tinsmith.testing import running_service

TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d.*")

RUN = "RUN"
"""Stands for the id of the run."""
LINES = [
    ("run", "list"),
    ("run", "info", RUN),
    ("checkpoint", "list"),
    ("checkpoint", "list", "--run-id", RUN),
    ("checkpoint", "info", f"tinker://{RUN}/weights/first"),
    ("model", "list", "qwen"),
    ("auth", "whoami"),
    ("billing", "checkpoint-storage"),
]
OFFICIAL = """
import contextlib, io, json, sys
from tinker.cli.__main__ import main_cli

printed = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main_cli.main(["-f", "json", *words], standalone_mode=False)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def tinsmith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """A service with a run and two checkpoints of it."""
    with running_service(long_poll_s=0.5, pjwt_auth_enabled=True) as service:
        with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
            training = client.create_lora_training_client(
                "Qwen/Qwen3-8B", rank=4, user_metadata={"purpose": "a test"}
            )
            training.save_state("first", ttl_seconds=7200).result()
            training.save_weights_for_sampler("second").result()
        folder: pathlib.Path = tmp_path_factory.mktemp("commands")
        commands = Commands(service, folder)
        commands.environment["RUN"] = training.model_id
        yield commands


def with_run(words: tuple[str, ...], tinsmith: Commands) -> list[str]:
    """A line with the id of the run in the place of `RUN`."""
    return [word.replace(RUN, tinsmith.environment["RUN"]) for word in words]


@pytest.fixture(scope="module")
def official(tinsmith: Commands) -> dict[tuple[str, ...], Any]:
    """What the official command prints as JSON for each line; one process, as it starts slowly."""
    finished = subprocess.run(
        [sys.executable, "-c", OFFICIAL, json.dumps([with_run(line, tinsmith) for line in LINES])],
        env=tinsmith.environment,
        cwd=tinsmith.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIME_LIMIT_S,
    )
    printed = json.loads(finished.stdout)
    return {words: json.loads(text) for words, text in zip(LINES, printed, strict=True)}


def with_moments(plain: Any) -> Any:
    """The same with times as moments, however they are written.

    A checkpoint's base model is left out: SDK 0.36 does not know it yet.
    """
    if isinstance(plain, dict):
        if "checkpoint_id" in plain:
            plain = {key: value for key, value in plain.items() if key != "base_model"}
        return {key: with_moments(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [with_moments(value) for value in plain]
    if isinstance(plain, str) and TIME.fullmatch(plain):
        return datetime.datetime.fromisoformat(plain)
    return plain


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_json_output_equals_that_of_the_official_command(
    tinsmith: Commands, official: dict[tuple[str, ...], Any], words: tuple[str, ...]
) -> None:
    ours = tinsmith.run(*with_run(words, tinsmith), "-f", "json").json

    assert with_moments(ours) == with_moments(official[words])
