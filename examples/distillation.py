"""Distillation: a student learns the teacher's distribution over its most likely tokens.

The teacher is an adapter that was trained on a sentence. The student is a new adapter. Its targets
are the teacher's 4 most likely tokens at each position, weighted by their probabilities.

    python examples/distillation.py --steps 6
"""

from __future__ import annotations

import argparse
import math

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SENTENCE = "The tinsmith mends the kettle, and the kettle sings again by noon."
K = 4
STEP = tinsmith.AdamParams(learning_rate=1e-3)


def main() -> None:
    """Train a teacher, then distil it into a student."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    with tinsmith.ServiceClient() as client:
        teacher = client.create_lora_training_client(MODEL, rank=8, seed=0)
        tokens = teacher.get_tokenizer().encode(SENTENCE)
        given = tinsmith.ModelInput.from_ints(tokens[:-1])
        plain = tinsmith.Datum(
            given, {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        )
        for _ in range(steps):
            output = teacher.forward_backward([plain], "cross_entropy")
            teacher.optim_step(STEP).result()
        print(f"teacher: loss {output.result().loss:.2f} on the sentence after {steps} steps")

        sampler = teacher.save_weights_and_get_sampling_client()
        rows = topk(sampler, tokens)
        soft = tinsmith.Datum(
            given,
            {
                "target_tokens": tinsmith.TensorData(
                    [token for row in rows for token, _ in row], "int64", [len(rows), K]
                ),
                "weights": tinsmith.TensorData(
                    [math.exp(lp) for row in rows for _, lp in row], "float32", [len(rows), K]
                ),
            },
        )
        student = client.create_lora_training_client(MODEL, rank=8, seed=1)
        before = student.forward([plain], "cross_entropy").result().loss
        for step in range(1, steps + 1):
            output = student.forward_backward([soft], "cross_entropy")
            student.optim_step(STEP).result()
            print(
                f"student, step {step}: cross-entropy with the teacher {output.result().loss:.2f}"
            )
        after = student.forward([plain], "cross_entropy").result().loss
        print(f"student: loss {before:.2f} → {after:.2f} on the sentence")


def topk(sampler: tinsmith.SamplingClient, tokens: list[int]) -> list[list[tuple[int, float]]]:
    """The most likely tokens at each position but the first, with their log-probabilities."""
    found = sampler.sample(
        tinsmith.ModelInput.from_ints(tokens),
        1,
        tinsmith.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=K,
    ).result()
    assert found.topk_prompt_logprobs is not None
    return [list(row) for row in found.topk_prompt_logprobs if row is not None]


if __name__ == "__main__":
    main()
