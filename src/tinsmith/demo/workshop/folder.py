"""The workshop: a folder in which programs written for Tinker run without a hub or a network.

    Qwen/Qwen3-8B, …       a tiny model with a tokenizer, under each name that programs use
    openai/gsm8k, …        tiny datasets, where `datasets.load_dataset` looks for a folder
    tinsmith.toml          the settings of a service with these models
    README.md              how to use it

Libraries prefer a folder of the given name in the current directory to the hub, so programs are run
in this folder. The names are symbolic links; each family's model is stored once, in `models/`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith.demo.workshop.chat_templates import DEEPSEEK, GLM, GPT_OSS, KIMI, LLAMA, QWEN
from tinsmith.demo.workshop.tiny_datasets import DATASETS, write_dataset
from tinsmith.demo.workshop.tiny_model import write_tiny_model
from tinsmith.errors import ValidationError

FAMILIES = {
    "qwen-tiny": QWEN,
    "llama-tiny": LLAMA,
    "deepseek-tiny": DEEPSEEK,
    "gpt-oss-tiny": GPT_OSS,
    "kimi-tiny": KIMI,
    "glm-tiny": GLM,
}
"""The tiny models and their chat templates."""
NAMES = {
    **dict.fromkeys(
        (
            *("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B"),
            *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-4B-Instruct-2507"),
            *("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
            *("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-27B"),
            *("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B-Base", "Qwen/Qwen3.5-397B-A17B"),
            *("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.8-27B"),
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
            "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
            "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
        ),
        "qwen-tiny",
    ),
    **dict.fromkeys(
        (
            *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
            *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"),
            *("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ),
        "llama-tiny",
    ),
    **dict.fromkeys(
        (
            *("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base"),
            *("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017"),
        ),
        "deepseek-tiny",
    ),
    **dict.fromkeys(("openai/gpt-oss-20b", "openai/gpt-oss-120b"), "gpt-oss-tiny"),
    **dict.fromkeys(
        ("moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
        "kimi-tiny",
    ),
    **dict.fromkeys(("zai-org/GLM-5.3", "zai-org/GLM-5.3-Flash"), "glm-tiny"),
}
"""Names that programs use, and the tiny model behind each."""
LONG_NAMES = {
    **dict.fromkeys(
        (
            *("Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.6-35B-A3B"),
            *("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017"),
            *("zai-org/GLM-5.3", "zai-org/GLM-5.3-Flash"),
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
            "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
            "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
        ),
        ":peft:262144",
    ),
    "moonshotai/Kimi-K2.6": ":peft:131072",
    "openai/gpt-oss-120b": ":peft:131072",
}
"""Names that programs also use with this suffix, which asks for a longer context."""


def make_workshop(folder: Path) -> None:
    """Create the workshop in a folder, which must be empty or not exist.

    Raises:
        ValidationError: The folder is not empty.
        OSError: A file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValidationError(
            f"{folder} is not empty", remedy="choose an empty folder or a new one"
        )
    for family, chat in FAMILIES.items():
        home = folder / "models" / family
        home.mkdir(parents=True)
        write_tiny_model(home, chat)
    for name, family in NAMES.items():
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path("..") / "models" / family, target_is_directory=True)
    for name, dataset in DATASETS.items():
        write_dataset(folder / name, dataset)
    (folder / "tinsmith.toml").write_text(_settings(folder.absolute()), encoding="utf-8")
    (folder / "README.md").write_text(_PAGE, encoding="utf-8")


def served_names(folder: Path) -> list[str]:
    """The `models` setting of the workshop's service: every name, with and without `:tiny`."""
    given = []
    for name, family in NAMES.items():
        path = folder / "models" / family
        given += [f"{name}:tiny={path}", f"{name}={path}"]
        if name in LONG_NAMES:
            given.append(f"{name}{LONG_NAMES[name]}={path}")
    return given


def _settings(folder: Path) -> str:
    models = "".join(
        f"    {json.dumps(text, ensure_ascii=False)},\n" for text in served_names(folder)
    )
    return f"""\
# The service of this workshop: `tinsmith serve --config tinsmith.toml`
engine = "embedded"
dtype = "float32"
threads = 1
data = {json.dumps(str(folder / "data"), ensure_ascii=False)}
models = [
{models}]
"""


_PAGE = """\
# An offline workshop

This folder has everything that programs written for Tinker download from the Hugging Face Hub: tiny
random models under the names of large ones, their tokenizers, and synthetic datasets. Use it to
check that a program runs; the models know nothing, so results are meaningless.

Start the service:

    tinsmith serve --config tinsmith.toml

In another terminal, run programs from this folder, where libraries find the names as folders:

    export TINKER_BASE_URL=http://127.0.0.1:8000
    export TINKER_API_KEY=tml-workshop
    python my_program.py

Programs that import tinsmith can run the service inside their own process instead. Set only
`TINSMITH_SERVE_CONFIG=tinsmith.toml`.

`tinsmith.toml` lists the models. A name that ends in `:tiny` is the same model; use it to make
clear that it is a stand-in.
"""
