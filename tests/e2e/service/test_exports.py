"""Weights that leave a running service, whole and readable for those they are meant for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest

import tinsmith
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S
from tinsmith.checkpoints.format import ADAPTER_CONFIG, ADAPTER_MODEL, read_adapter
from tinsmith.checkpoints.safetensors_file import read_header
from tinsmith.errors import BadRequestError


@pytest.fixture(scope="module", params=["folder", "url"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """With checkpoints in a folder, and at a URL, which here leads to the server's own memory."""
    where = ["--checkpoints", "memory://bucket/folder"] if request.param == "url" else []
    with serving(tmp_path_factory.mktemp(f"at-a-{request.param}"), *where) as running:
        yield running


@pytest.fixture
def training(served: Served) -> Iterator[tinsmith.TrainingClient]:
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        yield service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
        content: bytes = reply.read()
        return content


def rest(served: Served) -> tinsmith.RestClient:
    return tinsmith.RestClient(base_url=served.base_url, api_key=API_KEY)


def test_only_its_recipient_can_read_an_encrypted_export(
    served: Served, training: tinsmith.TrainingClient, tmp_path: Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    stranger = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]

    saving = training.save_weights_external("secret", age_encryption_recipients=recipients)
    path = saving.result(WAIT_S).path
    urls = rest(served).get_external_weights_urls(path).result(WAIT_S).urls

    assert set(urls) == {f"{ADAPTER_CONFIG}.age", f"{ADAPTER_MODEL}.age"}
    for name, url in urls.items():
        content = fetched(url)
        (tmp_path / name.removesuffix(".age")).write_bytes(pyrage.decrypt(content, [identity]))
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [stranger])
    assert read_adapter(tmp_path).rank == 4
    assert not list((served.folder / "data").rglob(f"external_weights/**/{ADAPTER_MODEL}"))


def test_an_invalid_recipient_is_rejected_and_training_continues(
    training: tinsmith.TrainingClient,
) -> None:
    with pytest.raises(BadRequestError, match=r"recipients\[0\] is not a valid age public key"):
        training.save_weights_external("x", age_encryption_recipients=["age1x"]).result(WAIT_S)

    assert training.save_state("after").result(WAIT_S).path.endswith("/weights/after")


def test_the_archive_of_sampler_weights_has_the_names_that_tools_read(
    served: Served, training: tinsmith.TrainingClient, tmp_path: Path
) -> None:
    path = training.save_weights_for_sampler("s").result(WAIT_S).path
    url = rest(served).get_checkpoint_archive_url_from_tinker_path(path).result(WAIT_S).url

    with tarfile.open(fileobj=io.BytesIO(fetched(url))) as tar:
        tar.extractall(tmp_path, filter="data")

    names = read_header(tmp_path / ADAPTER_MODEL).tensors
    assert any(name.startswith("base_model.model.model.layers.0.") for name in names)
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    assert read_adapter(tmp_path).rank == 4


def test_the_download_command_writes_the_names_that_peft_reads(
    served: Served, training: tinsmith.TrainingClient, tmp_path: Path
) -> None:
    path = training.save_weights_for_sampler("s").result(WAIT_S).path
    command = [sys.executable, "-m", "tinsmith", "checkpoint", "download", path]

    ended = subprocess.run(
        [*command, "-f", "json", "-o", str(tmp_path)],
        env=os.environ | {"TINKER_BASE_URL": served.base_url, "TINKER_API_KEY": API_KEY},
        capture_output=True,
        check=True,
        timeout=WAIT_S,
    )

    told = json.loads(ended.stdout)
    folder = Path(told["destination"])
    names = read_header(folder / ADAPTER_MODEL).tensors
    assert "base_model.model.lm_head.lora_A.weight" in names
    assert not any("unembed_tokens" in name for name in names)
    assert told["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
