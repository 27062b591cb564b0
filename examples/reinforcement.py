"""Reinforcement learning on arithmetic: correct answers are rewarded and become more likely.

Each question is answered several times. The advantage of an answer is its reward minus the mean
reward of its group. The model is trained on its own samples and their log-probabilities.

    python examples/reinforcement.py --steps 24
"""

from __future__ import annotations

import argparse
import random
import re

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GROUP = 8
QUESTIONS = 4


def reward(answer: str, wanted: int) -> float:
    """1 if the first number in the answer is correct, and a little for any number."""
    found = re.search(r"\d+", answer)
    if found is None:
        return 0.0
    return 1.0 if int(found[0]) == wanted else 0.1


def datum(
    prompt: list[int], sequence: tinsmith.SampledSequence, advantage: float
) -> tinsmith.Datum:
    """Training data for a sampled answer and its advantage."""
    tokens, lead = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": lead + list(sequence.logprobs or ()),
        "advantages": lead + [advantage] * len(sequence.tokens),
    }
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def main() -> None:
    """Sample, reward and train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    chance = random.Random(0)
    with tinsmith.ServiceClient() as client:
        training = client.create_lora_training_client(MODEL, rank=16, seed=0)
        tokenizer = training.get_tokenizer()
        for step in range(1, steps + 1):
            sampler = training.save_weights_and_get_sampling_client()
            sums = [(chance.randint(1, 9), chance.randint(1, 9)) for _ in range(QUESTIONS)]
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"What is {a} + {b}? Answer with a number."}],
                    add_generation_prompt=True,
                )
                for a, b in sums
            ]
            params = tinsmith.SamplingParams(max_tokens=12, temperature=1.0, seed=step)
            asked = [tinsmith.ModelInput.from_ints(prompt) for prompt in prompts]
            found = sampler.sample_many(asked, params, num_samples=GROUP)
            data, rewards = [], []
            for (a, b), prompt, response in zip(sums, prompts, found, strict=True):
                worth = [
                    reward(tokenizer.decode(list(one.tokens), skip_special_tokens=True), a + b)
                    for one in response.sequences
                ]
                mean = sum(worth) / GROUP
                rewards += worth
                data += [
                    datum(prompt, one, value - mean)
                    for one, value in zip(response.sequences, worth, strict=True)
                ]
            training.forward_backward(data, "importance_sampling").result()
            training.optim_step(tinsmith.AdamParams(learning_rate=2e-4)).result()
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}")
        print(f"saved: {training.save_state('arithmetic').result().path}")


if __name__ == "__main__":
    main()
