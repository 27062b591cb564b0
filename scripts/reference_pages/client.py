"""The page of the client: its classes with their methods, and the variables that it reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import tinsmith
from scripts.reference_pages.markdown import code, field_docs, paragraphs, table
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
"""Programs are given them by a call."""
NOT_FOR_PROGRAMS = frozenset(
    {"open", "create", "holder", "get_telemetry", "budget", "delay_s"}
    | {"settle", "fail", "when_settled", "stop_work_with"}
)
"""Methods that are public for the rest of the client, or for programs that reach below it."""
VARIABLES = {
    "TINKER_BASE_URL": "where the service is; `embedded` for one in the program itself",
    "TINKER_API_KEY": "the key",
    "TINKER_CREDENTIAL_CMD": "a command that prints the key, where none is set",
    "TINKER_PROJECT_ID": "the project of new sessions",
    "TINKER_TAGS": "tags of new sessions, with commas between them",
    "CLOUDFLARE_ACCESS_CLIENT_ID": "sent as a header, for services behind Cloudflare Access",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET": "the same",
    "TINSMITH_HOME": "the folder of all that is kept here, instead of `~/.tinsmith`",
    "TINSMITH_TOKENIZERS": "which tokenizer a model has; see [tokenizers](../tokenizers.md)",
    "HF_HUB_CACHE": "where the Hugging Face hub keeps its files, to find tokenizers there",
    "HUGGINGFACE_HUB_CACHE": "the same, by an older name",
    "HF_HOME": "the folder above it",
    "XDG_CACHE_HOME": "the folder above that one",
}
INTRODUCTION = """\
# The client, name by name

The classes that programs call, with what each method takes and gives; [the client](../client.md)
says how they are used, and [types](../types.md) what they are given. All can be taken from
`tinsmith`; [the list of names](../public-names.txt) has the rest.

Where a method has a twin that is named with `_async`, the signature is that of the blocking one;
the twin is for coroutines, and does not block the event loop.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.rstrip()]
    for name in CLASSES:
        cls = getattr(tinsmith, name)
        parts += [f"## {name}", *paragraphs(cls)]
        if name not in MADE_BY_OTHERS:
            parts.append(_signature(name, cls))
        if name == "ServiceClient":
            parts += ["Further keywords:", _keywords(cls)]
        if field_docs(cls):
            parts.append(_fields(cls, field_docs(cls)))
        parts += ["\n".join(_methods(cls))] if list(_methods(cls)) else []
    variables = ((code(name), what) for name, what in VARIABLES.items())
    parts += ["## Variables", "An argument counts before a variable."]
    parts += [table(("variable", "what it is"), variables)]
    return "\n\n".join(parts) + "\n"


def _keywords(cls: type) -> str:
    """What else `ServiceClient` takes: the fields of its settings that are told of."""
    named = inspect.signature(cls).parameters
    docs = field_docs(ClientSettings)
    told = {name: text for name, text in docs.items() if text and name not in named}
    told.pop("credential_command")  # from the environment alone
    return _fields(ClientSettings, told)


def _fields(cls: Any, docs: dict[str, str]) -> str:
    taken = inspect.signature(cls).parameters
    rows = ((code(name), code(repr(taken[name].default)), text) for name, text in docs.items())
    return table(("name", "default", "what it is"), rows)


def _methods(cls: type) -> Iterator[str]:
    members = dict(_members(cls))
    for name, member in members.items():
        if name.endswith("_async") and name.removesuffix("_async") in members:
            continue
        about = " ".join(paragraphs(member)[:1])
        if isinstance(member, property):
            yield f"- `{name}`: {about}"
            continue
        twin = f", `{name}_async`" if f"{name}_async" in members else ""
        yield f"- {_signature(name, getattr(cls, name))}{twin}: {about}"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """What its classes define for programs, in the order in which they do, their own first."""
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


def _signature(name: str, called: Any) -> str:
    """How it is called, as code."""
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
    return code(name + str(signature.replace(parameters=taken, return_annotation=returned)))


class _Text:
    """Shown as this text, without quotes."""

    def __init__(self, text: object) -> None:
        self._text = text.__name__ if isinstance(text, type) else str(text)

    def __repr__(self) -> str:
        return self._text


def _default(value: object) -> object:
    """A default, shown in short: an object as its class's name."""
    is_plain = value is None or isinstance(value, str | int | float | tuple | type)
    return value if is_plain else _Text(f"{type(value).__name__}()")
