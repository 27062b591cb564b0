"""What a tenant is told of the server's disk: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.service.served import BASE_MODEL, serving
from tinsmith.client.service import ServiceClient
from tinsmith.errors import TinkerError


def spoil(file: Path, how: str) -> None:
    """Make a file unreadable in one of the ways that disks know."""
    if how == "removed":
        file.unlink()
    elif how == "emptied":
        file.write_bytes(b"")
    else:
        file.write_bytes(b"{" + file.read_bytes()[1:][::-1])


@pytest.mark.filterwarnings("ignore:load_state is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["removed", "emptied", "flipped"])
def test_errors_about_a_damaged_checkpoint_never_reveal_server_paths(
    tmp_path: Path, how: str
) -> None:
    with (
        serving(tmp_path) as served,
        ServiceClient(base_url=served.base_url, api_key="tml-any") as client,
    ):
        training = client.create_lora_training_client(BASE_MODEL, rank=4)
        saved = training.save_state("one").result(60).path
        weights = [file for file in (tmp_path / "data").rglob("*") if "weights" in file.parts]
        originals = [file for file in weights if file.is_file()]
        assert originals
        told = []
        for file in originals:
            kept = file.read_bytes()
            spoil(file, how)
            try:
                training.load_state(saved).result(60)
            except TinkerError as exc:
                told.append(str(exc))
            file.write_bytes(kept)

    assert told
    assert not [text for text in told if str(tmp_path) in text or "/data/" in text]
