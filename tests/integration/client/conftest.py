from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.integration.client.transport_runs import LOOPS, Maker, Run, run_with
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.client.transports.proxied import ProxiedTransport
from tinsmith.testing import ScriptedService, running_service


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """A service whose polls and gaps are short."""
    with running_service(long_poll_s=0.5, gap_wait_s=20.0) as service:
        yield service


@pytest.fixture
def client(service: ScriptedService) -> Iterator[ServiceClient]:
    """A client of that service."""
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        yield client


@pytest.fixture
def training(client: ServiceClient) -> TrainingClient:
    """A model of that client."""
    return client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)


@pytest.fixture(params=[DirectTransport, ProxiedTransport])
def made_by(request: pytest.FixtureRequest) -> Maker:
    """Each transport that uses sockets."""
    made: Maker = request.param
    return made


@pytest.fixture
def run(made_by: Maker) -> Run:
    """Runs a scenario with each such transport."""
    return functools.partial(run_with, made_by)


@pytest.fixture(params=list(LOOPS.values()), ids=list(LOOPS))
def run_direct(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario with our own connections, on each event loop."""
    return functools.partial(run_with, DirectTransport, new_loop=request.param)
