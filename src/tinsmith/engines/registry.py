"""Makes the engine that settings name, and imports nothing of the others.

A model is given as `NAME` or `NAME=PATH_OR_ID`. Two names of one path are names of one model: the
first is the model, the others are its aliases. What is after a `:` in a name says that it is a
stand-in; clients ignore it when they look for tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tinsmith.engines.base import Engine
from tinsmith.errors import ValidationError, shown

ENGINES = ("fake",)
LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*(:[A-Za-z0-9][\w.-]*)?", re.ASCII)


class ModelSource(msgspec.Struct, frozen=True):
    """A name and where its model comes from."""

    name: str
    path: str
    alias_of: str | None = None
    """The first name with the same path, if this is another one."""

    @property
    def tokenizer_id(self) -> str:
        """What a client loads the tokenizer by."""
        return self.path


def read_models(models: Sequence[str]) -> list[ModelSource]:
    """What each of the settings says.

    Raises:
        ValidationError: A name cannot be used or is given twice.
    """
    found: dict[str, ModelSource] = {}
    first_of_path: dict[str, str] = {}
    for text in models:
        name, is_given, path = text.partition("=")
        name = name.strip()
        path = path.strip() if is_given else name.partition(":")[0]
        _check_model(name, path)
        if name in found:
            raise ValidationError(f"the model's name {name!r} is given twice")
        if path.startswith(("~", "./", "../")):
            # Clients are told it, to load the tokenizer from; they may have another folder.
            path = str(Path(path).expanduser().absolute())
        found[name] = ModelSource(name, path, first_of_path.get(path))
        first_of_path.setdefault(path, name)
    return list(found.values())


def _check_model(name: str, path: str) -> None:
    """Names go into ids, paths and logs; they are held to what those of the hub look like."""
    is_name = len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None
    if not is_name or any(part in (".", "..") for part in name.split("/")):
        raise ValidationError(
            f"{shown(name)} cannot be a model's name",
            remedy="give NAME=PATH_OR_ID, with a name like Qwen/Qwen3-8B or Qwen/Qwen3-8B:tiny",
        )
    if not path or "\0" in path:
        raise ValidationError(f"the model {name} has no path that can be used")


def make_engine(name: str, models: Sequence[str]) -> Engine:
    """An engine that is not open yet.

    Raises:
        ValidationError: There is no such engine, or a model's name cannot be read.
    """
    sources = read_models(models)
    if not sources:
        raise ValidationError("no model is given", remedy="add --model NAME=PATH_OR_ID")
    if name == "fake":
        return _fake(sources)
    raise ValidationError(f"there is no engine {name!r}", remedy=f"known are {', '.join(ENGINES)}")


def _fake(sources: list[ModelSource]) -> Engine:
    try:
        from tinsmith.engines.fake.engine import FakeEngine, fake_model
    except ModuleNotFoundError as exc:
        raise ValidationError(
            "the fake engine needs numpy", remedy="pip install 'tinsmith[numpy]'"
        ) from exc
    return FakeEngine([fake_model(one.name, one.tokenizer_id, one.alias_of) for one in sources])
