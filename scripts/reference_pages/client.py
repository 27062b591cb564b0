"""The reference of the client: classes, methods and environment variables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import tinsmith
from scripts.reference_pages.markdown import (
    MOST_COLUMNS,
    code,
    field_docs,
    paragraphs,
    table,
    wrapped,
)
from tinsmith.client.settings import ClientSettings

CLASSES = (
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "SampleStream",
    "APIFuture",
    "RestClient",
    "AdminClient",
    "RetryBudget",
    "RetryConfig",
)
MADE_BY_OTHERS = frozenset({"TrainingClient", "SamplingClient", "SampleStream", "APIFuture"})
"""Programs get these from a call instead of creating them."""
NOT_FOR_PROGRAMS = frozenset(
    {"open", "create", "holder", "get_telemetry", "budget", "delay_s"}
    | {"settle", "fail", "when_settled", "stop_work_with"}
)
"""Methods that only the rest of the client calls."""
VARIABLES = {
    "TINKER_BASE_URL": "address of the service; `embedded` runs it inside the program",
    "TINKER_API_KEY": "API key",
    "TINKER_CREDENTIAL_CMD": "a command that prints the key, used if no key is set",
    "TINKER_PROJECT_ID": "the project of new sessions",
    "TINKER_TAGS": "tags of new sessions, separated by commas",
    "CLOUDFLARE_ACCESS_CLIENT_ID": "sent as a header, for services behind Cloudflare Access",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET": "the same",
    "TINSMITH_HOME": "folder for data and base models, instead of `~/.tinsmith`",
    "TINSMITH_TOKENIZERS": "which tokenizer belongs to a model; see [tokenizers](../tokenizers.md)",
    "HF_HUB_CACHE": "cache of the Hugging Face hub, where tokenizers are looked for",
    "HUGGINGFACE_HUB_CACHE": "the same, by an older name",
    "HF_HOME": "the folder above it",
    "XDG_CACHE_HOME": "the folder above that one",
}
INTRODUCTION = """\
# Client

For programmers who look up a method: every class that programs use, with its methods.
[The client](../client.md) shows how they are used, and [types](../types.md) describes
their arguments. Import all of them from `tinsmith`.

If a method returns a future, await it in a coroutine and call `result()` on it elsewhere. A
`TrainingClientFuture` is an `APIFuture` of a `TrainingClient` and can be used as that client; the
same holds for a `SamplingClientFuture`. Most methods also have a variant for coroutines, with
`_async` at the end of its name and the same arguments.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.rstrip()]
    for name in CLASSES:
        cls = getattr(tinsmith, name)
        parts += [f"## {name}", *map(wrapped, paragraphs(cls))]
        if name not in MADE_BY_OTHERS:
            parts.append(_block(_signature(name, cls)))
        if name == "ServiceClient":
            parts += ["More keyword arguments:", _keywords(cls)]
        if field_docs(cls):
            parts.append(_fields(cls, field_docs(cls)))
        parts += _methods(cls)
    variables = ((code(name), what) for name, what in VARIABLES.items())
    parts += ["## Environment variables", "Arguments take precedence over variables."]
    parts += [table(("variable", "meaning"), variables)]
    return "\n\n".join(parts) + "\n"


def _keywords(cls: type) -> str:
    """The documented settings that `ServiceClient` takes beside its named parameters."""
    named = inspect.signature(cls).parameters
    docs = field_docs(ClientSettings)
    told = {name: text for name, text in docs.items() if text and name not in named}
    told.pop("credential_command")  # from the environment alone
    return _fields(ClientSettings, told)


def _fields(cls: Any, docs: dict[str, str]) -> str:
    taken = inspect.signature(cls).parameters
    rows = ((code(name), code(repr(taken[name].default)), text) for name, text in docs.items())
    return table(("name", "default", "meaning"), rows)


def _methods(cls: type) -> Iterator[str]:
    members = dict(_members(cls))
    for name, member in members.items():
        if name.endswith("_async") and name.removesuffix("_async") in members:
            continue
        about = " ".join(paragraphs(member)[:1])
        yield f"### {name}"
        if not isinstance(member, property):
            yield _block(_signature(name, getattr(cls, name)))
        twin = f" Also `{name}_async`." if f"{name}_async" in members else ""
        yield wrapped(f"{about}{twin}")


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public members in order of definition, those of the class itself first."""
    seen: set[str] = set(NOT_FOR_PROGRAMS)
    for owner in cls.__mro__:
        if not owner.__module__.startswith("tinsmith."):
            continue
        for name, member in vars(owner).items():
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            is_told = isinstance(plain, property) or inspect.isfunction(plain)
            if is_told and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, plain


def _block(signature: str) -> str:
    """A signature as a block of code, with one parameter per line if it is long."""
    if len(signature) > MOST_COLUMNS:
        head, _, rest = signature.partition("(")
        taken, _, given = rest.rpartition(")")
        # A comma within brackets belongs to a type.
        parts = re.split(r", (?![^\[\(]*[\]\)])", taken)
        signature = f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){given}"
    return f"```py\n{signature}\n```"


def _signature(name: str, called: Any) -> str:
    """How it is called."""
    signature = inspect.signature(called)
    taken = [
        parameter.replace(
            annotation=_Text(parameter.annotation), default=_default(parameter.default)
        )
        for parameter in signature.parameters.values()
        if not parameter.name.startswith("_") and parameter.name not in ("self", "unknown")
    ]
    given = signature.return_annotation
    is_told = given not in (inspect.Signature.empty, None, "None")
    returned = _Text(given) if is_told else inspect.Signature.empty
    return name + str(signature.replace(parameters=taken, return_annotation=returned))


class _Text:
    """An annotation or default that is printed as it is, without quotes."""

    def __init__(self, text: object) -> None:
        self._text = text.__name__ if isinstance(text, type) else str(text)

    def __repr__(self) -> str:
        return self._text


def _default(value: object) -> object:
    """A default in short form: objects are shown by the name of their class."""
    is_plain = value is None or isinstance(value, str | int | float | tuple | type)
    return value if is_plain else _Text(f"{type(value).__name__}()")
