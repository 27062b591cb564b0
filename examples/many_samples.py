"""Many samples at once: hundreds of prompts in one call, with a progress bar.

python examples/many_samples.py --prompts 64
"""

from __future__ import annotations

import argparse
import time

import tinsmith

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main() -> None:
    """Sample an answer for each of many prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64, help="how many (%(default)s)")
    count = parser.parse_args().prompts
    with tinsmith.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        tokenizer = sampler.get_tokenizer()
        prompts = [
            tinsmith.ModelInput.from_ints(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"Write one line about the number {number}."}],
                    add_generation_prompt=True,
                )
            )
            for number in range(count)
        ]
        params = tinsmith.SamplingParams(max_tokens=16, temperature=0.8, seed=1)
        started = time.monotonic()
        found = sampler.sample_many(prompts, params, progress=True)
        took_s = time.monotonic() - started
        for number in range(min(4, count)):
            tokens = found[number].sequences[0].tokens
            print(f"{number}: {tokenizer.decode(list(tokens), skip_special_tokens=True)!r}")
        tokens_drawn = sum(len(one.sequences[0].tokens) for one in found)
        print(f"{count} prompts, {tokens_drawn} tokens in {took_s:.1f} s")


if __name__ == "__main__":
    main()
