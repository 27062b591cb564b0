"""The tokenizer of a model that is trained or sampled from."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib

import pytest

from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.client.service import ServiceClient
from tinsmith.errors import TokenizerError
from tinsmith.testing import ScriptedService

TEXT = "hello world"


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    """A model whose name is a folder with a tokenizer."""
    write_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


def test_s32_a_training_client_asks_the_service_once(
    client: ServiceClient, service: ScriptedService, model: str
) -> None:
    training = client.create_lora_training_client(model, rank=4)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tokenizers = list(pool.map(lambda _: training.get_tokenizer(), range(16)))

    ids = tokenizers[0].encode(TEXT)
    assert tokenizers[0].decode(ids, skip_special_tokens=True).strip() == TEXT
    assert all(tokenizer.encode(TEXT) == ids for tokenizer in tokenizers)
    assert len(service.requests("get_info")) == 1


def test_s32_a_sampling_client_asks_the_service_once(
    client: ServiceClient, service: ScriptedService, model: str
) -> None:
    sampler = client.create_sampling_client(base_model=model)

    blocking = sampler.get_tokenizer()
    awaited = asyncio.run(sampler.get_tokenizer_async())

    assert blocking.encode(TEXT) == awaited.encode(TEXT)
    assert len(service.requests("get_sampler")) == 1


def test_a_model_without_a_tokenizer_is_told_by_name(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sampler = client.create_sampling_client(base_model="nobody/nothing")

    with pytest.raises(TokenizerError, match="nobody/nothing"):
        sampler.get_tokenizer()
