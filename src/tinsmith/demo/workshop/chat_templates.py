"""Special tokens and a chat template for each family of models.

The special tokens are those that programs look up in a family's tokenizer. The templates are our
own and minimal: the role, the content, and where the answer begins.
"""

from __future__ import annotations

import msgspec

THINKING = ("<think>", "</think>")
TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class ChatTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models formats a conversation."""

    tokens: tuple[str, ...]
    """The special tokens; their ids follow the 256 bytes."""
    end: str
    pad: str
    begin: str | None = None
    """Prepended to every text, if the family does so."""
    template: str
    """A Jinja template."""


QWEN = ChatTemplate(
    tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *THINKING, *TOOLS),
        *("<|vision_start|>", "<|vision_end|>"),
    ),
    end="<|im_end|>",
    pad="<|endoftext|>",
    template=(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
)
LLAMA = ChatTemplate(
    tokens=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
    ),
    end="<|eot_id|>",
    pad="<|end_of_text|>",
    begin="<|begin_of_text|>",
    template=(
        "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
        "<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
)
DEEPSEEK = ChatTemplate(
    tokens=(
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),  # noqa: RUF001
        *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", *THINKING, "｜DSML｜"),  # noqa: RUF001
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # noqa: RUF001
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),  # noqa: RUF001
    ),
    end="<｜end▁of▁sentence｜>",  # noqa: RUF001
    pad="<｜▁pad▁｜>",  # noqa: RUF001
    begin="<｜begin▁of▁sentence｜>",  # noqa: RUF001
    template=(
        "<｜begin▁of▁sentence｜>{% for message in messages %}"  # noqa: RUF001
        "{% if message['role'] == 'assistant' %}<｜Assistant｜></think>"  # noqa: RUF001
        "{{ message['content'] }}<｜end▁of▁sentence｜>"  # noqa: RUF001
        "{% elif message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"  # noqa: RUF001
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"  # noqa: RUF001
    ),
)
GPT_OSS = ChatTemplate(
    tokens=(
        *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ),
    end="<|return|>",
    pad="<|endoftext|>",
    template=(
        "{% for message in messages %}<|start|>{{ message['role'] }}"
        "{% if message['role'] == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
)
KIMI = ChatTemplate(
    tokens=(
        *("[BOS]", "[EOS]", "[PAD]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"),
        *("<|im_system|>", "<|im_middle|>", *THINKING),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    ),
    end="[EOS]",
    pad="[PAD]",
    template=(
        "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}"
        "<|im_middle|>{{ message['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
)
GLM = ChatTemplate(
    tokens=(
        *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<|observation|>", *THINKING, *TOOLS),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    end="<|user|>",
    pad="<|endoftext|>",
    template=(
        "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    ),
)
