"""A folder in which programs written for Tinker run with no hub and no network.

    Qwen/Qwen3-8B, …       a small stand-in under each name that programs use, with its tokenizer
    openai/gsm8k, …        small made-up datasets where `datasets.load_dataset` finds a folder
    tinsmith.toml          the settings of a service that serves the stand-ins
    README.md              what to do

Libraries take a name for a folder if there is one of that name below the current one: so programs
are run in this folder. The names are links; each family's model is there once, in `models/`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith.errors import ValidationError
from tinsmith.model_files.chats import DEEPSEEK, GLM, GPT_OSS, KIMI, LLAMA, QWEN
from tinsmith.model_files.made_up_datasets import DATASETS, write_dataset
from tinsmith.model_files.stand_in import make_stand_in

FAMILIES = {
    "qwen-tiny": QWEN,
    "llama-tiny": LLAMA,
    "deepseek-tiny": DEEPSEEK,
    "gpt-oss-tiny": GPT_OSS,
    "kimi-tiny": KIMI,
    "glm-tiny": GLM,
}
"""The stand-ins, and how each marks a conversation."""
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
"""Names that programs use, and the stand-in behind each."""
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
"""Those that programs also use with an ending that asks for a longer context."""


def make_workshop(folder: Path) -> None:
    """Write the workshop into a folder, which is made; it must hold nothing.

    Raises:
        ValidationError: There is something in the folder.
        OSError: A file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValidationError(
            f"{folder} is not empty", remedy="name a folder that is, or a new one"
        )
    for family, chat in FAMILIES.items():
        home = folder / "models" / family
        home.mkdir(parents=True)
        make_stand_in(home, chat)
    for name, family in NAMES.items():
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path("..") / "models" / family, target_is_directory=True)
    for name, made_up in DATASETS.items():
        write_dataset(folder / name, made_up)
    (folder / "tinsmith.toml").write_text(_settings(folder.absolute()), encoding="utf-8")
    (folder / "README.md").write_text(_PAGE, encoding="utf-8")


def served_names(folder: Path) -> list[str]:
    """The models of the workshop's service, as settings give them; `:tiny` says what they are."""
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
# A workshop without a hub

Everything that programs written for Tinker ask the hub for is in this folder: small random models
under the names of large ones, their tokenizers, and made-up datasets. What is learned here means
nothing; that a program runs does.

Run programs in this folder, where libraries find these names as folders. Start the service:

    tinsmith serve --config tinsmith.toml

and set two variables for the programs:

    export TINKER_BASE_URL=http://127.0.0.1:8000
    export TINKER_API_KEY=tml-workshop

Programs of tinsmith need no service beside them: `TINSMITH_SERVE_CONFIG=tinsmith.toml` instead of
the two runs it in the program itself.

The models are named in `tinsmith.toml`; names that end in `:tiny` are the same models, and say that
they are stand-ins.
"""
