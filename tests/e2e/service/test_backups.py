"""The commands of docs/operations.md that back a running service up, as they are printed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import tinsmith
from tests.e2e.service.served import BASE_MODEL, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
LARGE = 20_000
"""Tokens of a datum whose payload has a file of its own."""


def printed_commands() -> str:
    """The block that copies the database."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    found: str
    [found] = [block for block in blocks if "sqlite3" in block]
    return found


def test_a_backup_of_a_running_service_restores_models_and_checkpoints(tmp_path: Path) -> None:
    tokens = list(range(LARGE))
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(tokens),
        {"target_tokens": tokens, "weights": [1.0] * LARGE},
    )
    with (
        serving(tmp_path) as served,
        tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        training.forward_backward([datum], "cross_entropy").result(WAIT_S)
        training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result(WAIT_S)
        saved = training.save_state("before").result(WAIT_S).path
        before = training.forward([datum], "cross_entropy").result(WAIT_S).loss

        subprocess.run(["bash", "-ec", printed_commands()], cwd=tmp_path, check=True)
        training.optim_step(tinsmith.AdamParams(learning_rate=0.5)).result(WAIT_S)
        training.save_state("after").result(WAIT_S)
        served.kill()
        shutil.rmtree(tmp_path / "data")
        (tmp_path / "backup").rename(tmp_path / "data")
        served.start()

        resumed = service.create_training_client_from_state(saved, timeout=WAIT_S)
        kept = tinsmith.RestClient(base_url=served.base_url, api_key=API_KEY)
        listed = kept.list_user_checkpoints().result(WAIT_S).checkpoints
        assert [one.tinker_path for one in listed] == [saved]
        assert resumed.forward([datum], "cross_entropy").result(WAIT_S).loss == before
        assert "restored 1 models" in served.log_text()
