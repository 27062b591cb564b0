"""A tour of the service: it is killed during a training run, and nothing is lost.

The service is real: `tinsmith serve` in a separate process, with its ledger and checkpoints in a
folder. Its engine is the fake one, which trains a small table of numbers instead of a neural
network: losses go down, but it knows no language.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import tinsmith

MODEL = "Qwen/Qwen3-8B:fake"
STEPS = 12
KILLED_AFTER = 5
TOKENS = [11, 12, 13, 14, 15, 16]

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The service is on this machine, whatever proxy the environment names."""


class Service:
    """`tinsmith serve` with a data folder and a port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the service, and wait until it is ready."""
        command = [sys.executable, "-m", "tinsmith", "serve", "--engine=fake", f"--model={MODEL}"]
        command += [f"--data={self._folder}", f"--port={self._port}", "--log-level=warning"]
        self._process = subprocess.Popen(command)
        while not self._is_ready():
            if self._process.poll() is not None:
                sys.exit("the service did not start")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        ready = f"{self.url}/readyz"
        with contextlib.suppress(OSError), DIRECTLY.open(ready, timeout=5) as page:
            return bool(page.status == 200)
        return False

    def kill(self) -> None:
        """Kill the service as `kill -9` does; it cannot save anything."""
        self._process.kill()
        self._process.wait()

    def metric(self, name: str) -> float:
        """The value of a metric."""
        with DIRECTLY.open(f"{self.url}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@contextlib.contextmanager
def serving() -> Iterator[Service]:
    """A service with a temporary data folder."""
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder))
        service.start()
        try:
            yield service
        finally:
            service.kill()


def main() -> None:
    """Train once undisturbed and once with a kill, and compare."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("The service with the fake engine (no neural network)\n")
    print(f"1. {STEPS} steps, undisturbed")
    with serving() as service:
        undisturbed = train(service, lambda _: None)
    print(f"   loss {undisturbed[0]:.4f} → {undisturbed[-1]:.4f}\n")

    print(f"2. The same, but the service is killed after step {KILLED_AFTER}")
    with serving() as service:

        def disturb(step: int) -> None:
            if step == KILLED_AFTER:
                service.kill()
                print("   killed; the client does not know", flush=True)
                service.start()
                replayed = service.metric("tinsmith_redone_commands_total")
                print(f"   restarted: {replayed:g} commands were repeated", flush=True)

        killed = train(service, disturb)
        print(f"   loss {killed[0]:.4f} → {killed[-1]:.4f}")
        sample(service)
    same = "bit-identical" if killed == undisturbed else "NOT identical"
    print(f"\n3. The {STEPS} losses of both runs are {same}.")
    if killed != undisturbed:
        sys.exit(1)


def train(service: Service, after_step: Callable[[int], None]) -> list[float]:
    """Run a training loop and return its losses."""
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(TOKENS[:-1]),
        {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    losses = []
    with tinsmith.ServiceClient(base_url=service.url, api_key="tml-tour") as client:
        training = client.create_lora_training_client(MODEL, rank=8, seed=1)
        for step in range(1, STEPS + 1):
            output = training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result()
            losses.append(output.result().metrics["loss:sum"])
            after_step(step)
        training.save_state("tour").result()
    return losses


def sample(service: Service) -> None:
    """Sample from the checkpoint in another session."""
    rest = tinsmith.RestClient(base_url=service.url, api_key="tml-tour")
    [checkpoint] = rest.iter_checkpoints()
    print(f"   saved: {checkpoint.checkpoint_id}, {checkpoint.size_bytes:,} bytes")
    with tinsmith.ServiceClient(base_url=service.url, api_key="tml-tour") as client:
        training = client.create_training_client_from_state(checkpoint.tinker_path)
        sampler = training.save_weights_and_get_sampling_client()
        prompt = tinsmith.ModelInput.from_ints(TOKENS[:2])
        params = tinsmith.SamplingParams(max_tokens=4, temperature=0.0)
        [sequence] = sampler.sample(prompt, 1, params).result().sequences
        print(f"   {TOKENS[:2]} continues with {list(sequence.tokens)}; trained on {TOKENS}")


if __name__ == "__main__":
    main()
