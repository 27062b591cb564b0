"""A program written for the official `tinker` package; it does not import tinsmith.

    python -m tinsmith.as_tinker examples/written_for_tinker.py     with tinsmith's client
    python examples/written_for_tinker.py                           with the official client

The second command requires `tinker`, and TINKER_BASE_URL and TINKER_API_KEY to be set, for example
to a service that was started with `tinsmith serve`.
"""

from __future__ import annotations

import argparse

import tinker
from tinker import types

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main() -> None:
    """Train three steps, then sample."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0)
    tokens = [11, 12, 13, 14, 15, 16, 17, 18]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
        },
    )
    print(f"client: {tinker.ServiceClient.__module__}")
    for step in range(1, 4):
        output = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"step {step}: loss {output.result().metrics['loss:sum']:.4f}")
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    prompt = types.ModelInput.from_ints(tokens[:4])
    found = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    print(f"sampled: {found.sequences[0].tokens}")


if __name__ == "__main__":
    main()
