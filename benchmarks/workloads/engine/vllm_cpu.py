"""vLLM on this CPU, in an environment of its own: one compute thread, eager."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

from benchmarks.workloads.engine.data import prompts
from benchmarks.workloads.engine.measure import Turn, settle
from benchmarks.workloads.engine.models import FOLDER, adapter_folder, size_of


def sampling(
    model: str,
    count: str,
    prompt: str = "128",
    new: str = "64",
    lora: str = "",
    dtype: str = "float32",
) -> Callable[[], dict[str, float]]:
    """So many samples at once. The adapter is the one that `ours.py` keeps beside the model."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    torch.set_num_threads(1)
    size = size_of(model)
    llm = LLM(
        str((FOLDER / model).resolve()),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=int(prompt) + int(new) + 16,
        enable_lora=bool(lora),
        max_lora_rank=32,
        disable_log_stats=True,
    )
    adapter = LoRARequest("one", 1, str(adapter_folder(model))) if lora else None
    turns = itertools.count(1)

    def run(count: int, new: int) -> dict[str, float]:
        asked = prompts(count, int(prompt), size.vocabulary, next(turns))
        params = SamplingParams(
            temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        turn = Turn(getattr(torch, dtype))
        made = llm.generate(
            [{"prompt_token_ids": one} for one in asked],
            params,
            use_tqdm=False,
            lora_request=adapter,
        )
        tokens = sum(len(one.outputs[0].token_ids) for one in made)
        return turn.figures(tokens, size.sampling_flops(count * int(prompt), tokens))

    run(1, 4)
    settle()
    return lambda: run(int(count), int(new))
