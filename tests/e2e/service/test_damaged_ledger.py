"""A service whose ledger or secret was damaged says so, and never opens to those without a key."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import tinsmith
from tests.e2e.service.positions import wait_caught_up
from tests.e2e.service.served import BASE_MODEL, START_S, Served, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S


def create_key(data: Path) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "key", "create", "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def status_for(served: Served, key: str) -> int:
    """What a call with this key is answered."""
    request = urllib.request.Request(
        f"{served.base_url}/api/v1/get_server_capabilities", headers={"X-API-Key": key}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as exc:
        return exc.code


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def refused(served: Served) -> str:
    """Start it; it has to end by itself. Returns what it printed."""
    before = len(served.log_text())
    served.start(wait=False)
    assert served.wait_end() != 0
    return served.log_text()[before:]


def test_a_deleted_wal_does_not_open_the_service_without_a_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(tmp_path) as served:
        key = create_key(data)
        wait_for(data / "has-keys")
        with tinsmith.ServiceClient(base_url=served.base_url, api_key=key) as client:
            client.create_lora_training_client(BASE_MODEL, rank=4, timeout=WAIT_S).result()
        wait_caught_up(data, 5)
        served.kill()
        (data / "ledger" / "ledger.sqlite3-wal").unlink()

        told = refused(served)
        assert "are lost" in told
        assert "--accept-loss" in told

        accepting = Served(tmp_path, "--accept-loss")
        told = refused(accepting)
        assert "the loss is accepted" in told
        assert "tinsmith key create" in told, "without a key it does not start"

        new_key = create_key(data)
        served.start()
        assert status_for(served, new_key) == 200
        assert status_for(served, key) == 401
        assert status_for(served, "tml-anything") == 401


def test_a_service_that_never_had_a_key_stays_open_after_accept_loss(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
            client.create_lora_training_client(BASE_MODEL, rank=4, timeout=WAIT_S).result()
        wait_caught_up(tmp_path / "data", 5)
        served.kill()
        (tmp_path / "data" / "ledger" / "ledger.sqlite3-wal").unlink()
        assert "--accept-loss" in refused(served)

    with serving(tmp_path, "--accept-loss") as accepting:
        assert "the loss is accepted" in accepting.log_text()
        accepting.kill()
    with serving(tmp_path) as served:
        assert status_for(served, API_KEY) == 200


def test_an_empty_replacement_ledger_does_not_open_the_service_without_a_key(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    create_key(data)
    with serving(tmp_path) as served:
        assert served.stop() == 0
    (data / "ledger").rename(tmp_path / "elsewhere")

    told = refused(Served(tmp_path))

    assert "had API keys and its ledger has none now" in told
    assert str(data / "has-keys") in told


def test_a_missing_secret_is_reported_and_replaced(tmp_path: Path) -> None:
    secret = tmp_path / "data" / "secret"
    with serving(tmp_path) as served:
        assert "a new secret was created" not in served.log_text()
        with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as client:
            client.create_lora_training_client(BASE_MODEL, rank=4, timeout=WAIT_S).result()
        kept = secret.read_bytes()
        for damage in (secret.unlink, lambda: secret.write_bytes(b"")):
            served.stop()
            damage()
            served.start()
            assert secret.read_bytes() != kept
            assert len(secret.read_bytes()) == len(kept)
        log = served.log_text()
        assert "secret is missing, so a new secret was created" in log
        assert "secret has 0 bytes instead of 32, so a new secret was created" in log
