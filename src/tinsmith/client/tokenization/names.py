"""Resolve a model's name to its tokenizer: a table, and the rules for applying it.

The id that the service reports takes precedence, unless it is a folder on another machine.
Otherwise the name is looked up: a suffix after `:` is ignored, `org/model/variant` means
`org/model`, and `DEFAULT_TABLE` has the exceptions. A local directory with exactly the given name
takes precedence over all of these.

Users can override our entries, with an argument or with `TINSMITH_TOKENIZERS`, which is a JSON
object or the path of a file with one. An entry is a tokenizer's id, or the fields that differ:

    {"meta-llama/Llama-3*": "/models/llama-3-tokenizer",
     "my-org/my-model": {"id": "my-org/tokenizer", "revision": "v2", "kind": "transformers"}}

Knows nothing of how a tokenizer is loaded.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tinsmith.errors import TokenizerError, ValidationError, shown

TABLE_VARIABLE = "TINSMITH_TOKENIZERS"

Kind: TypeAlias = Literal["tokenizers", "transformers", "tml_tokenizers"]
Entry: TypeAlias = str | Mapping[str, object]
Table: TypeAlias = Mapping[str, Entry]

_RUNS_ITS_OWN_CODE = {"kind": "transformers", "trust_remote_code": True}
_IN_A_PACKAGE = {"kind": "tml_tokenizers"}
"""For tokenizers that are not on the hub, but in a package by their publisher."""

# Names or patterns. Code from the hub runs only for entries with a pinned revision.
DEFAULT_TABLE: Table = {
    "meta-llama/Llama-3*": "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5",
    "moonshotai/Kimi-K2-Thinking": {
        "revision": "612681931a8c906ddb349f8ad0f582cb552189cd",
        **_RUNS_ITS_OWN_CODE,
    },
    "moonshotai/Kimi-K2.5": {
        "revision": "4d01dfe0332d63057c186e0b262165819efb6611",
        **_RUNS_ITS_OWN_CODE,
    },
    "moonshotai/Kimi-K2.6": {
        "revision": "b5aabbfb20227ed42becbf5541dbffd213942c58",
        **_RUNS_ITS_OWN_CODE,
    },
    "moonshotai/Kimi-K3": {
        "revision": "f831ab66814297da540d832a5235f8e904f29d06",
        **_RUNS_ITS_OWN_CODE,
    },
    "TML/*": _IN_A_PACKAGE,
    "thinkingmachines/*": _IN_A_PACKAGE,
}


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer and how it is loaded; also the cache key.

    `id` is a hub id or the absolute path of a directory.
    """

    id: str
    revision: str | None = None
    kind: Kind = "tokenizers"
    trust_remote_code: bool = False


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a table; fields that it does not set are `None`."""

    id: str | None = None
    revision: str | None = None
    kind: Kind | None = None
    trust_remote_code: bool | None = None


def resolve(
    model_name: str | None,
    tokenizer_id: str | None = None,
    *,
    revision: str | None = None,
    kind: Kind | None = None,
    table: Table | None = None,
) -> TokenizerSource:
    """Resolve which tokenizer a model needs.

    Args:
        model_name: The name of a model or tokenizer, or a directory.
        tokenizer_id: The tokenizer that the service reported. It is used instead of the name,
            unless it is a folder that is not on this machine, or a folder and the user has an
            entry for the name.
        revision: Overrides the table's revision.
        kind: Overrides the table's kind.
        table: The caller's entries. They take precedence over those of the environment, and these
            over `DEFAULT_TABLE`.

    Raises:
        TokenizerError: Neither a name nor an id was given.
        ValidationError: A table cannot be read.
    """
    own = {**_environment_table(), **(table or {})}
    if tokenizer_id and model_name and _is_idle(tokenizer_id, model_name, own):
        tokenizer_id = None
    asked = tokenizer_id or model_name
    if not asked:
        raise TokenizerError("the model has no name from which its tokenizer could be found")
    rule = _Rule(id=asked)
    if directory_of(asked) is None:
        rule = _looked_up(asked, own, revision, is_servers_word=bool(tokenizer_id))
    return _source(rule, revision, kind)


def _is_idle(tokenizer_id: str, model_name: str, own: Table) -> bool:
    """Whether to ignore the service's id: a folder that is not here, or that the user overrides."""
    if not Path(tokenizer_id).is_absolute() or _match(own, tokenizer_id):
        return False
    is_known = _match(own, model_name) or _match(own, without_suffix(model_name))
    return directory_of(tokenizer_id) is None or is_known is not None


def directory_of(name: str) -> Path | None:
    """The directory with this name, if it exists and contains a tokenizer."""
    directory = Path(name).expanduser()
    files = ("tokenizer.json", "tokenizer_config.json")
    return directory.resolve() if any((directory / file).is_file() for file in files) else None


def without_suffix(name: str) -> str:
    """The name up to its first colon: `Qwen/Qwen3-8B:tiny` is a `Qwen/Qwen3-8B`."""
    return name.partition(":")[0]


def _looked_up(asked: str, own: Table, revision: str | None, *, is_servers_word: bool) -> _Rule:
    name = without_suffix(asked)
    chosen = _match(own, asked) or _match(own, name) or _Rule()
    target = chosen.id or name
    if chosen.id is None and directory_of(name) is None:
        renamed = None if is_servers_word else _match(DEFAULT_TABLE, name)
        target = _without_variant((renamed and renamed.id) or name)
    pinned = _match(DEFAULT_TABLE, target) or _Rule()
    is_other = (revision or chosen.revision) not in (None, pinned.revision)
    if pinned.trust_remote_code and (is_other or directory_of(target) is not None):
        pinned = _Rule()  # other revisions and folders run code only if the user allows it
    # The service's id or a user's entry decides; from our own entry only the pins are used.
    return _filled(msgspec.structs.replace(chosen, id=target), pinned)


def _filled(rule: _Rule, defaults: _Rule) -> _Rule:
    given = {
        name: value for name, value in msgspec.structs.asdict(rule).items() if value is not None
    }
    return msgspec.structs.replace(defaults, **given)


def _without_variant(name: str) -> str:
    if name.startswith(("/", ".", "~")):
        return name
    return "/".join(name.split("/")[:2])


def _source(rule: _Rule, revision: str | None, kind: Kind | None) -> TokenizerSource:
    assert rule.id is not None
    directory = directory_of(rule.id)
    return TokenizerSource(
        id=str(directory) if directory else rule.id,
        revision=None if directory else revision or rule.revision,
        kind=kind or rule.kind or "tokenizers",
        trust_remote_code=bool(rule.trust_remote_code),
    )


def _match(table: Table, name: str) -> _Rule | None:
    """The entry with exactly this name, else the first whose pattern matches."""
    if name in table:
        return _rule(name, table[name])
    for pattern, entry in table.items():
        if fnmatch.fnmatchcase(name, pattern):
            return _rule(pattern, entry)
    return None


def _rule(pattern: str, entry: Entry) -> _Rule:
    if isinstance(entry, str):
        return _Rule(id=entry)
    if not isinstance(entry, Mapping):
        raise ValidationError(
            f"tokenizer table, {pattern!r}: {shown(entry)} is neither an id nor an object"
        )
    try:
        return msgspec.convert(dict(entry), _Rule)
    except msgspec.ValidationError as exc:
        raise ValidationError(f"tokenizer table, {pattern!r}: {exc}") from exc


def _environment_table() -> Table:
    text = os.environ.get(TABLE_VARIABLE, "").strip()
    if not text:
        return {}
    try:
        if not text.startswith("{"):
            text = Path(text).expanduser().read_text(encoding="utf-8")
        table = json.loads(text)
    except (OSError, ValueError) as exc:
        raise ValidationError(f"{TABLE_VARIABLE} cannot be read: {exc}") from exc
    if not isinstance(table, dict):
        raise ValidationError(f"{TABLE_VARIABLE} does not contain a JSON object")
    return table
