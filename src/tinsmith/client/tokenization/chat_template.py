"""Render conversations with a model's chat template.

Templates are code from the model's publisher. They run in jinja2's sandbox, see only copies made of
plain values, and have the names that templates on the hub expect: `raise_exception`,
`strftime_now`, `tojson`, loop controls and the `generation` block.

This module imports jinja2, so it is imported only on first use.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.errors import ValidationError, shown

Message: TypeAlias = Mapping[str, Any]

COMPILED_TEMPLATES = 64
# Marks the end of the message to be continued. The space shows whether the template trims.
_END = "\N{SYMBOL FOR END OF TEXT}tinsmith-end\N{SYMBOL FOR END OF TEXT}"


def choose(template: str | Mapping[str, str] | None, wanted: str | None, *, has_tools: bool) -> str:
    """Choose the template to use.

    Args:
        template: The tokenizer's template, or its templates by name.
        wanted: The name of one of them, or the text of another template.
        has_tools: Prefer the template named `tool_use`, if there is one.

    Raises:
        ValidationError: The tokenizer has no such template.
    """
    if wanted is not None:
        named = template.get(wanted) if isinstance(template, Mapping) else None
        return wanted if named is None else named
    if isinstance(template, str):
        return template
    for name in ("tool_use", "default") if has_tools else ("default",):
        if template and name in template:
            return template[name]
    raise ValidationError(
        "the tokenizer has no chat template",
        remedy="set tokenizer.chat_template, or pass chat_template=",
    )


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Message] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render one conversation as text.

    Args:
        tools: JSON schemas of the tools.
        add_generation_prompt: End with the header of the assistant's reply.
        continue_final_message: Leave the last message open, so that the model continues it. A
            string names the field to continue; `True` means `content`.
        variables: Further variables for the template, such as `bos_token` and `enable_thinking`.

    Raises:
        ValidationError: The template rejects the conversation, or a value is not plain data.
    """
    if continue_final_message and add_generation_prompt:
        raise ValidationError("continue_final_message and add_generation_prompt cannot be combined")
    plain = _plain(messages, "conversation")
    if continue_final_message:
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        _mark_end(plain, field)
    names = {name: _plain(value, name) for name, value in (variables or {}).items()}
    names.update(
        messages=plain,
        tools=_plain(tools, "tools"),
        documents=_plain(documents, "documents"),
        add_generation_prompt=add_generation_prompt,
    )
    try:
        text = compiled(template).render(names)
    except jinja2.TemplateError as exc:
        raise ValidationError(f"chat template: {exc}") from exc
    return _cut_at_end(text) if continue_final_message else text


@functools.lru_cache(maxsize=COMPILED_TEMPLATES)
def compiled(template: str) -> jinja2.Template:
    """The compiled template, cached: compiling takes forty times as long as rendering."""
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """The `generation` block, with which some templates mark the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and sorts keys: the model would see other tokens.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _plain(value: Any, where: str) -> Any:
    """A copy made of plain values: other objects have methods that the sandbox cannot check."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    remedy = "pass tools as JSON schemas" if callable(value) else None
    raise ValidationError(
        f"{where}: {shown(value)} is not a plain value for a chat template", remedy=remedy
    )


def _mark_end(messages: list[Any], field: str) -> None:
    """Append the marker to the text to be continued."""
    last = messages[-1] if messages else {}
    text = last.get(field)
    if isinstance(text, str):
        last[field] = text + _END + " "
        return
    for block in reversed(text if isinstance(text, list) else []):
        if "text" in block:
            block["text"] += _END + " "
            return
    raise ValidationError(f"continue_final_message: the last message has no text in {field!r}")


def _cut_at_end(text: str) -> str:
    before, mark, after = text.rpartition(_END)
    if not mark:
        raise ValidationError("continue_final_message: the template leaves the last message out")
    # Without the space, the template trims, and would have trimmed the text before the marker.
    return before if after.startswith(" ") else before.rstrip()
