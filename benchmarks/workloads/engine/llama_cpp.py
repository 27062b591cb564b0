"""llama.cpp, by its Python package: one thread, its server in this process."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.workloads.engine.data import prompts
from benchmarks.workloads.engine.measure import Turn
from benchmarks.workloads.engine.models import gguf_file, size_of


def sampling(count: str, prompt: str = "128", new: str = "64") -> Callable[[], dict[str, float]]:
    """SmolLM2 with its weights in 4 bits, so many samples at once."""
    import xllamacpp

    torch.set_num_threads(1)
    size, slots = size_of("135m"), int(count)
    settings = xllamacpp.CommonParams()
    settings.model.path = str(gguf_file())
    settings.n_parallel = slots
    settings.n_ctx = slots * (int(prompt) + int(new) + 16)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    turns = itertools.count(1)

    def ask(ids: list[int]) -> Any:
        question = {"prompt": ids, "n_predict": int(new), "ignore_eos": True, "temperature": 1.0}
        question |= {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        body = json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        url = server.listening_address + "/completion"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return json.load(answer)

    def run(count: int) -> dict[str, float]:
        asked = prompts(count, int(prompt), size.vocabulary, next(turns))
        turn = Turn()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(ask, asked))
        turn.first_tokens([one["timings"]["prompt_ms"] / 1000 for one in answers])
        tokens = sum(one["timings"]["predicted_n"] for one in answers)
        return turn.figures(tokens, size.sampling_flops(count * int(prompt), tokens))

    run(1)
    return lambda: run(slots)
