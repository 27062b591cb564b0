"""An adapter that was made elsewhere, trained on by a running service."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S, datum_of
from tinsmith.cli.main import main
from tinsmith.types import AdamParams

DATA = [datum_of(random.Random(0))]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "service") as running:
        yield running


def run_import(
    served: Served, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int | None, str, str]:
    data = str(served.folder / "data")
    status = main(["checkpoint", "import", "--data", data, *words, "-f", "json"])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def logprobs(training: tinsmith.TrainingClient) -> list[float]:
    result = training.forward(DATA, "cross_entropy").result(WAIT_S)
    return [float(value) for value in result.loss_fn_outputs[0]["logprobs"].tolist()]


def rest(served: Served) -> tinsmith.RestClient:
    return tinsmith.RestClient(base_url=served.base_url, api_key=API_KEY)


def export(served: Served, service: tinsmith.ServiceClient, folder: Path) -> list[float]:
    """Train a little and fetch the adapter as a folder; returns what it computes."""
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    for _ in range(3):
        training.forward_backward(DATA, "cross_entropy").result(WAIT_S)
        training.optim_step(AdamParams(learning_rate=0.05)).result(WAIT_S)
    path = training.save_weights_external("out").result(WAIT_S).path
    urls = rest(served).get_external_weights_urls(path).result(WAIT_S).urls
    folder.mkdir()
    for name, url in urls.items():
        with urllib.request.urlopen(url) as reply:
            (folder / name).write_bytes(reply.read())
    return logprobs(training)


def test_training_goes_on_from_an_adapter_that_was_imported(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my adapter"
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        exported = export(served, service, folder)

        status, out, err = run_import(served, capsys, str(folder))
        assert (status, err) == (0, "")
        shown = json.loads(out)
        path = shown["checkpoint_path"]
        training = service.create_training_client_from_state(path)
        imported = logprobs(training)
        training.forward_backward(DATA, "cross_entropy").result(WAIT_S)
        training.optim_step(AdamParams(learning_rate=0.05)).result(WAIT_S)

        assert path.endswith("/weights/my-adapter")
        assert (shown["base_model"], shown["lora_rank"]) == (BASE_MODEL, 4)
        assert imported == pytest.approx(exported, abs=1e-5)
        assert logprobs(training) != pytest.approx(imported, abs=1e-4)
        listed = rest(served).list_user_checkpoints().result(WAIT_S)
        assert path in {checkpoint.tinker_path for checkpoint in listed.checkpoints}


def test_what_cannot_be_imported_is_told_and_leaves_nothing(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        export(served, service, folder)
        before = rest(served).list_user_checkpoints().result(WAIT_S)

        for words, why in [
            ([str(tmp_path / "missing")], "is not a folder"),
            ([str(folder), "--name", "../x"], "not allowed"),
            ([str(folder), "--tenant", "nobody"], "there is no tenant"),
            ([str(folder), "--model", "another"], "which is not served"),
            ([str(folder), "--database", "memory:"], "in memory"),
        ]:
            status, out, err = run_import(served, capsys, *words)
            assert status, words
            assert out == ""
            assert why in err

        assert rest(served).list_user_checkpoints().result(WAIT_S) == before
    stored = served.folder / "data" / "checkpoints"
    assert not list(stored.rglob("import*"))
    assert list((stored / "staging").iterdir()) == []
