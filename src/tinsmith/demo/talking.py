"""From text to tokens and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.client.sampling import SamplingClient
from tinsmith.demo.tasks import Example
from tinsmith.types import Datum, ModelInput, SamplingParams

LONGEST_ANSWER = 40


class Talk:
    """How one task is put to the model."""

    def __init__(self, tokenizer: Any, system: str) -> None:
        self._tokenizer = tokenizer
        self._system = system

    def prompt(self, example: Example) -> list[int]:
        """The tokens before the answer."""
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": example.question},
        ]
        found: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return found

    def datum(self, example: Example) -> Datum:
        """The question with its right answer; only the answer's tokens count."""
        prompt = self.prompt(example)
        answer = [*self._tokenizer.encode(example.answer), self._tokenizer.eos_token_id]
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        return Datum(
            ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
        )

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without the end of the turn."""
        said: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return said.strip()

    def answers(self, sampler: SamplingClient, examples: Sequence[Example]) -> list[str]:
        """The likeliest answer to each."""
        params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0)
        prompts = [ModelInput.from_ints(self.prompt(example)) for example in examples]
        found = sampler.sample_many(prompts, params)
        return [self.text(response.sequences[0].tokens) for response in found]
