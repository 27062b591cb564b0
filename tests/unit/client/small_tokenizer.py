"""A tokenizer of a few hundred tokens, written to a directory as the hub's are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

BOS, EOS = "<bos>", "<eos>"
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
<{{ message['role'] }}>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": {"__type": "AddedToken", "content": EOS, "special": True, "lstrip": False},
    "model_max_length": 64,
    "chat_template": CHAT_TEMPLATE,
}


def backend() -> Backend:
    """Bytes, a few pairs of them, and a BOS before each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    made = Backend(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS)])
    number = made.token_to_id(BOS)
    assert number is not None
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    return made


def write_tokenizer(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Write the tokenizer's files; `config` is instead of `CONFIG`."""
    directory.mkdir(parents=True, exist_ok=True)
    backend().save(str(directory / "tokenizer.json"))
    text = json.dumps(CONFIG if config is None else config)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return directory
