"""Two tenants on one service: each has an API key and cannot see the other's data.

python examples/two_tenants.py
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The service is on this machine, whatever proxy the environment names."""


def main() -> None:
    """Create two keys, start the service, and train with both."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as data:
        keys = {tenant: create_key(data, tenant) for tenant in ("ada", "bob")}
        with serving(data) as url:
            for tenant, key in keys.items():
                with tinsmith.ServiceClient(base_url=url, api_key=key) as client:
                    training = client.create_lora_training_client(MODEL, rank=4)
                    path = training.save_state("mine").result().path
                    print(f"{tenant} trains {training.model_id} and saves {path}")
            for tenant, key in keys.items():
                runs = list(tinsmith.RestClient(base_url=url, api_key=key).iter_training_runs())
                print(f"{tenant} sees {len(runs)} run")
            with tinsmith.ServiceClient(base_url=url, api_key=keys["ada"]) as client:
                try:
                    client.create_training_client_from_state(path).result()
                except tinsmith.NotFoundError as error:
                    print(f"ada loads bob's checkpoint: {type(error).__name__}")
            try:
                tinsmith.ServiceClient(
                    base_url=url, api_key="tml-guessed"
                ).get_server_capabilities()
            except tinsmith.AuthenticationError as error:
                print(f"an invalid key: {type(error).__name__}")


def create_key(data: str, tenant: str) -> str:
    """Create a key as an operator does; it is shown once."""
    command = [sys.executable, "-m", "tinsmith", "key", "create", "--tenant", tenant]
    made = subprocess.run([*command, "--data", data], check=True, capture_output=True, text=True)
    return next(word for word in made.stdout.split() if word.startswith("tml-"))


@contextlib.contextmanager
def serving(data: str) -> Iterator[str]:
    """`tinsmith serve` on a free port, while the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tinsmith", "serve", "--data", data, "--port", str(port)]
    service = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_ready(url):
            if service.poll() is not None:
                sys.exit("the service did not start")
            time.sleep(0.1)
        yield url
    finally:
        service.terminate()
        service.wait()


def is_ready(url: str) -> bool:
    """Whether the service is ready."""
    with contextlib.suppress(OSError), DIRECTLY.open(f"{url}/readyz", timeout=5) as page:
        return bool(page.status == 200)
    return False


if __name__ == "__main__":
    main()
