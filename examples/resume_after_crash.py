"""Resuming after a crash: a program is killed while it trains, and the next one continues.

The service runs inside the training program and dies with it. Checkpoints are in the data folder;
loading one with its optimizer state continues exactly where it was saved.

    python examples/resume_after_crash.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEP = tinsmith.AdamParams(learning_rate=1e-3)


def datum() -> tinsmith.Datum:
    """One training example."""
    tokens = list(range(10, 30))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def step(training: tinsmith.TrainingClient) -> float:
    """Run one training step and return its loss."""
    output = training.forward_backward([datum()], "cross_entropy")
    training.optim_step(STEP).result()
    return output.result().loss


def doomed() -> None:
    """Train two steps, save, train one more, and die as with `kill -9`."""
    training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=0)
    for number in (1, 2):
        print(f"step {number}: loss {step(training):.6f}", flush=True)
    print(f"saved {training.save_state('second').result().path}", flush=True)
    print(f"step 3: loss {step(training):.6f}; the program is killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the program that dies, then resume from its checkpoint."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    first = subprocess.run(
        [sys.executable, __file__, "doomed"], stdout=subprocess.PIPE, text=True, check=False
    )
    print(first.stdout, end="")
    print(f"the program was ended by {signal.Signals(-first.returncode).name}")
    path = next(line.split()[1] for line in first.stdout.splitlines() if line.startswith("saved"))
    with tinsmith.ServiceClient() as client:
        resumed = client.create_training_client_from_state_with_optimizer(path)
        print(f"resumed; step 3 again: loss {step(resumed):.6f}")
        print(f"step 4: loss {step(resumed):.6f}")


if __name__ == "__main__":
    doomed() if sys.argv[1:] == ["doomed"] else main()
