from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.integration.cli.command import Commands
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService, running_service


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """A service whose polls are short."""
    with running_service(long_poll_s=0.5) as service:
        yield service


@pytest.fixture
def tinsmith(service: ScriptedService, tmp_path: pathlib.Path) -> Commands:
    """The command, with that service in its environment."""
    return Commands(service, tmp_path)


@pytest.fixture
def training(service: ScriptedService) -> Iterator[TrainingClient]:
    """A model, which is a training run."""
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        yield client.create_lora_training_client(
            "Qwen/Qwen3-8B", rank=4, user_metadata={"purpose": "a test"}
        )


@pytest.fixture
def checkpoint(training: TrainingClient) -> str:
    """The path of a training checkpoint."""
    return training.save_state("first").result().path
