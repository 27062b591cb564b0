"""Two adapters trained at the same time by coroutines, each step submitted before the last is done.

Every call is the same as in a program without coroutines, with `await` in place of `.result()`.

    python examples/coroutines.py --steps 6
"""

from __future__ import annotations

import argparse
import asyncio

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SENTENCES = {
    "lower": "the tinsmith mends the kettle with solder.",
    "upper": "THE TINSMITH MENDS THE KETTLE WITH SOLDER.",
}


async def train(client: tinsmith.ServiceClient, name: str, steps: int) -> str:
    """Teach an adapter one sentence; what it then says."""
    training = await client.create_lora_training_client(MODEL, rank=8, seed=0)
    tokenizer = await training.get_tokenizer_async()
    tokens = tokenizer.encode(SENTENCES[name])
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)

    # All calls are submitted here; the service runs them in this order.
    passes, updates = [], []
    for _ in range(steps):
        passes.append(training.forward_backward([datum], "cross_entropy"))
        updates.append(training.optim_step(tinsmith.AdamParams(learning_rate=3e-3)))
    saving = training.save_weights_and_get_sampling_client()

    for step, output in enumerate(passes, start=1):
        print(f"{name}, step {step}: loss per token {(await output).loss_per_token:.3f}")
    await asyncio.gather(*updates)
    sampler = await saving
    prompt = tinsmith.ModelInput.from_ints(tokens[:3])
    params = tinsmith.SamplingParams(max_tokens=len(tokens), temperature=0.0)
    answer = await sampler.sample(prompt, 1, params)
    said: str = tokenizer.decode(list(answer.sequences[0].tokens), skip_special_tokens=True)
    return said


async def main() -> None:
    """Train both adapters, and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    with tinsmith.ServiceClient() as client:
        answers = await asyncio.gather(*[train(client, name, steps) for name in SENTENCES])
    for name, answer in zip(SENTENCES, answers, strict=True):
        print(f"{name} says: {answer!r}")


if __name__ == "__main__":
    asyncio.run(main())
