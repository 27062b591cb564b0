"""`tinsmith sample`: generate text.

The prompt is continued as it is, or with `--chat` formatted as a user's message with the model's
chat template.
"""

from __future__ import annotations

import argparse
import sys

from tinsmith.cli.parser import Parser, model_path, positive
from tinsmith.cli.text import harmless

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.client.sampling import SamplingClient
    from tinsmith.types.sampling import SampleResponse

SAMPLE_TIMEOUT_S = 600.0
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for an incomplete UTF-8 character."""


EPILOG = """\
example: tinsmith sample --base-model NAME --chat "What is the capital of France?"
"""


def configure(parser: Parser) -> None:
    """Add the arguments of `tinsmith sample`."""
    parser.set_defaults(run=run)
    parser.epilog = EPILOG
    parser.add_argument(
        "text", nargs="?", default="-", help="prompt; read from stdin if missing or -"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-model", metavar="NAME", help="name of a base model")
    source.add_argument(
        "--model-path", metavar="PATH", type=model_path, help="path of a checkpoint, tinker://…"
    )
    parser.add_argument(
        "--chat", action="store_true", help="format the text with the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=256,
        metavar="N",
        help="maximum length of the answer (default: 256)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 for greedy decoding (default: 1.0)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus sampling (default: 1.0, off)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=-1,
        help="sample from the K likeliest tokens (default: -1, off)",
    )
    parser.add_argument("--seed", type=int, help="random seed")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated"
    )
    parser.add_argument(
        "-n",
        "--num-samples",
        type=positive,
        default=1,
        metavar="N",
        help="number of samples (default: 1)",
    )
    parser.add_argument("--stream", action="store_true", help="print tokens as they are generated")


def run(arguments: argparse.Namespace) -> None:
    """Generate text and print it."""
    from tinsmith.cli.command_errors import UsageError

    if arguments.stream and arguments.num_samples > 1:
        raise UsageError("--stream supports one sample only: drop -n or --stream")
    try:
        text = _stdin() if arguments.text == "-" else arguments.text
        text.encode()
    except UnicodeError as exc:
        raise UsageError("the prompt is not valid UTF-8") from exc
    if not text:
        raise UsageError("the prompt is empty")
    from tinsmith.cli.connect import limit_s, service_client

    with service_client(arguments) as client:
        sampler = client.create_sampling_client(
            model_path=arguments.model_path,
            base_model=arguments.base_model,
            timeout=limit_s(arguments),
        )
        tokenizer = sampler.get_tokenizer()
        prompt = _prompt(tokenizer, text, arguments)
        if arguments.stream and arguments.format == "table":
            _stream(sampler, tokenizer, prompt, arguments)
        else:
            _sample(sampler, tokenizer, prompt, arguments)


def _stdin() -> str:
    if sys.stdin.isatty():
        print("Type the prompt, then press Ctrl-D.", file=sys.stderr)
    return sys.stdin.read()


def _prompt(tokenizer: Any, text: str, arguments: argparse.Namespace) -> list[int]:
    if not arguments.chat and arguments.system is None:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def _request(prompt: list[int], arguments: argparse.Namespace) -> tuple[Any, int, Any]:
    """The arguments of `SamplingClient.sample`."""
    from tinsmith.types.inputs import ModelInput
    from tinsmith.types.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    return ModelInput.from_ints(prompt), arguments.num_samples, params


def _sample(
    sampler: SamplingClient, tokenizer: Any, prompt: list[int], arguments: argparse.Namespace
) -> None:
    from tinsmith.cli.connect import wait
    from tinsmith.cli.output import show

    future = sampler.sample(*_request(prompt, arguments))
    response: SampleResponse = wait(future, arguments, SAMPLE_TIMEOUT_S)
    texts = [_text(tokenizer, list(sequence.tokens)) for sequence in response.sequences]
    if arguments.format == "json":
        show("json", _plain(prompt, response, texts), "")
        return
    many = len(texts) > 1
    heads = [
        f"--- {number} of {len(texts)}\n" if many else "" for number in range(1, len(texts) + 1)
    ]
    print("\n".join(head + _shown(text) for head, text in zip(heads, texts, strict=True)))


def _plain(prompt: list[int], response: SampleResponse, texts: list[str]) -> dict[str, Any]:
    """The response as JSON, with the text of each sequence."""
    import math

    return {
        "prompt_tokens": prompt,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "sequences": [
            {
                "sequence_id": sequence.sequence_id,
                "text": text,
                "stop_reason": sequence.stop_reason,
                "tokens": list(sequence.tokens),
                # JSON has neither infinities nor NaN.
                "logprobs": None
                if sequence.logprobs is None
                else [p if math.isfinite(p) else None for p in sequence.logprobs],
            }
            for sequence, text in zip(response.sequences, texts, strict=True)
        ],
    }


def _stream(
    sampler: SamplingClient, tokenizer: Any, prompt: list[int], arguments: argparse.Namespace
) -> None:
    """Print the text as it grows, holding back incomplete characters.

    The text of a token may depend on the one before it. So tokens are decoded together with those
    printed last, and only what follows their text is new.
    """
    from tinsmith.cli.connect import limit_s

    tokens: list[int] = []
    begin, printed = 0, 0
    timeout_s = limit_s(arguments, SAMPLE_TIMEOUT_S)
    with sampler.sample_stream(*_request(prompt, arguments), timeout=timeout_s) as events:
        for event in events:
            tokens += event.tokens
            new = _new_text(tokenizer, tokens, begin, printed)
            if new and not new.endswith(UNFINISHED):
                print(_shown(new), end="", flush=True)
                begin, printed = printed, len(tokens)
    print(_shown(_new_text(tokenizer, tokens, begin, printed)))


def _new_text(tokenizer: Any, tokens: list[int], begin: int, printed: int) -> str:
    """The text that `tokens[printed:]` add to that of `tokens[begin:printed]`."""
    return _text(tokenizer, tokens[begin:])[len(_text(tokenizer, tokens[begin:printed])) :]


def _text(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def _shown(text: str) -> str:
    """Text for stdout; control characters are escaped on a terminal."""
    return harmless(text) if sys.stdout.isatty() else text
