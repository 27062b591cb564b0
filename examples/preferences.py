"""Learning from preferences (DPO), with a custom loss that runs in this program.

The loss gets the log-probabilities of both answers as torch tensors, and its gradients are sent to
the service. It requires torch, which the extra `server` installs.

    python examples/preferences.py --steps 6
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BETA = 0.1
PAIRS = [
    ("How do I greet a friend?", "Hi there!", "Greetings, esteemed acquaintance."),
    ("How do I say goodbye?", "Bye!", "I hereby take my leave of you."),
]


def main() -> None:
    """Train the model to prefer the first answer of each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    with tinsmith.ServiceClient() as client:
        training = client.create_lora_training_client(MODEL, rank=16, seed=0)
        tokenizer = training.get_tokenizer()

        def datum(question: str, answer: str) -> tinsmith.Datum:
            lead = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )
            said = tokenizer.encode(answer)
            tokens, weights = lead + said, [0.0] * (len(lead) - 1) + [1.0] * len(said)
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)

        # Chosen and rejected answers alternate.
        data = [datum(question, answer) for question, *pair in PAIRS for answer in pair]
        before = training.forward(data, "cross_entropy").result()
        reference = [answer_logprob(one, logprobs) for one, logprobs in with_logprobs(data, before)]

        def preference(
            data: Sequence[tinsmith.Datum], logprobs: Sequence[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            found = [answer_logprob(one, lp) for one, lp in zip(data, logprobs, strict=True)]
            gains = torch.stack([value - old for value, old in zip(found, reference, strict=True)])
            margins = gains[0::2] - gains[1::2]
            losses = -F.logsigmoid(BETA * margins)
            metrics = {"margin": margins.mean().item(), "of_a_pair": losses.mean().item()}
            return losses.sum(), metrics

        for step in range(1, steps + 1):
            output = training.forward_backward_custom(data, preference).result()
            training.optim_step(tinsmith.AdamParams(learning_rate=5e-4)).result()
            margin, loss = output.metrics["margin"], output.metrics["of_a_pair"]
            print(f"step {step}: loss per pair {loss:.4f}, margin {margin:.3f}")
        print(f"saved: {training.save_state('preferences').result().path}")


def with_logprobs(
    data: Sequence[tinsmith.Datum], output: tinsmith.ForwardBackwardOutput
) -> list[tuple[tinsmith.Datum, torch.Tensor]]:
    """The data with the log-probabilities of a forward pass."""
    found = [one["logprobs"].to_torch() for one in output.loss_fn_outputs]
    return list(zip(data, found, strict=True))


def answer_logprob(datum: tinsmith.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """The log-probability of the answer, without the prompt."""
    return (logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()


if __name__ == "__main__":
    main()
