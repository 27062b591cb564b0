"""The tokenizer of a model that is trained or sampled from."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib
from collections.abc import Iterator

import pytest

from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.client.service import ServiceClient
from tinsmith.errors import TokenizerError
from tinsmith.testing import ScriptedService, running_service

TEXT = "hello world"


MODEL = "test/model"


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[ScriptedService]:
    """A service with a model whose tokenizer is in a folder, and one without."""
    write_tokenizer(tmp_path / "model")
    models = [f"{MODEL}={tmp_path / 'model'}", "nobody/nothing"]
    with running_service(long_poll_s=0.5, base_models=models) as service:
        yield service


def test_s32_a_training_client_asks_the_service_once(
    client: ServiceClient, service: ScriptedService
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tokenizers = list(pool.map(lambda _: training.get_tokenizer(), range(16)))

    ids = tokenizers[0].encode(TEXT)
    assert tokenizers[0].decode(ids, skip_special_tokens=True).strip() == TEXT
    assert all(tokenizer.encode(TEXT) == ids for tokenizer in tokenizers)
    assert len(service.requests("get_info")) == 1


def test_s32_a_sampling_client_asks_the_service_once(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL)

    blocking = sampler.get_tokenizer()
    awaited = asyncio.run(sampler.get_tokenizer_async())

    assert blocking.encode(TEXT) == awaited.encode(TEXT)
    assert len(service.requests("get_sampler")) == 1


def test_the_error_names_a_model_without_a_tokenizer(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sampler = client.create_sampling_client(base_model="nobody/nothing")

    with pytest.raises(TokenizerError, match="nobody/nothing"):
        sampler.get_tokenizer()
