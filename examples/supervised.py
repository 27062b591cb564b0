"""Supervised fine-tuning: the model learns to answer like a few examples.

No service has to be started: it runs inside this program and downloads SmolLM2-135M-Instruct on
first use. If TINKER_BASE_URL and TINKER_API_KEY are set, the same program uses that service.

    python examples/supervised.py --steps 10
"""

from __future__ import annotations

import argparse

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
EXAMPLES = {
    "Ada is 36 and lives in London.": "Ada | 36 | London",
    "Diego lives in Lima and is 41.": "Diego | 41 | Lima",
    "My sister Mei, who is 29, has moved to Taipei.": "Mei | 29 | Taipei",
    "Omar, who lives in Cairo, turned 63 last week.": "Omar | 63 | Cairo",
    "This is Freya from Bergen. She is 18.": "Freya | 18 | Bergen",
    "At 74, Luc still works in his garden in Lyon.": "Luc | 74 | Lyon",
}
QUESTION = "Tomas is 27 and has a flat in Prague."


def main() -> None:
    """Train, and ask a question before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of training (%(default)s)")
    steps = parser.parse_args().steps
    with tinsmith.ServiceClient() as client:
        training = client.create_lora_training_client(MODEL, rank=16, seed=0)
        tokenizer = training.get_tokenizer()

        def prompt(text: str) -> list[int]:
            messages = [{"role": "user", "content": text}]
            found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            return found

        def datum(text: str, answer: str) -> tinsmith.Datum:
            lead, said = prompt(text), [*tokenizer.encode(answer), tokenizer.eos_token_id]
            tokens = lead + said
            weights = [0.0] * (len(lead) - 1) + [1.0] * len(said)
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)

        def ask(sampler: tinsmith.SamplingClient) -> str:
            params = tinsmith.SamplingParams(max_tokens=16, temperature=0.0)
            asked = tinsmith.ModelInput.from_ints(prompt(QUESTION))
            tokens = sampler.sample(asked, 1, params).result().sequences[0].tokens
            said: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
            return said

        print(f"asked:  {QUESTION}")
        print(f"before: {ask(client.create_sampling_client(base_model=MODEL))}")
        data = [datum(text, answer) for text, answer in EXAMPLES.items()]
        for step in range(1, steps + 1):
            # Both calls return immediately; the service runs them in order.
            output = training.forward_backward(data, "cross_entropy")
            training.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
            print(f"step {step}: loss per token {output.result().loss_per_token:.3f}")
        print(f"after:  {ask(training.save_weights_and_get_sampling_client())}")
        print(f"saved:  {training.save_state('supervised').result().path}")


if __name__ == "__main__":
    main()
