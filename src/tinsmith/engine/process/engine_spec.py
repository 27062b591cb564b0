"""What an engine is made of, as plain data that can be sent to another process.

A process that runs an engine gets its specification and creates the engine from it; no code and no
object of the sender crosses over. Only the library of the engine that is created is imported.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec

from tinsmith.engine.base import Engine
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings
from tinsmith.engine.fake.fake_settings import FakeSettings


class ModelSource(msgspec.Struct, frozen=True):
    """A model name, and where the model comes from."""

    name: str
    path: str
    alias_of: str | None = None
    """The first name with the same path, if this is an alias."""
    folder: str | None = None
    """The folder of its files, once found."""
    tokenizer: str | None = None
    hub_id: str | None = None
    """Its id on the hub, if known."""

    @property
    def tokenizer_id(self) -> str:
        """What a client loads the tokenizer from."""
        return self.tokenizer or self.path


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is not created yet."""

    engine: str
    """`embedded`, `fake`, or `MODULE:FUNCTION` for another one, which the function makes."""
    models: tuple[ModelSource, ...] = ()
    settings: EmbeddedSettings = EmbeddedSettings()
    fake: FakeSettings = FakeSettings()
    options: dict[str, str | bool | int | float] = {}
    """Keyword arguments of the function, if there is one."""


def create_engine(spec: EngineSpec) -> Engine:
    """Create an engine in this process, not opened yet."""
    if spec.engine == "embedded":
        return _embedded(spec)
    if spec.engine == "fake":
        return _fake(spec)
    module, _, name = spec.engine.partition(":")
    engine = getattr(importlib.import_module(module), name)(**spec.options)
    assert isinstance(engine, Engine)
    return engine


def _embedded(spec: EngineSpec) -> Engine:
    from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine

    models = [
        EmbeddedModel(
            name=one.name,
            folder=Path(one.folder or one.path),
            tokenizer_id=one.tokenizer_id,
            alias_of=one.alias_of,
            source=one.hub_id,
        )
        for one in spec.models
    ]
    return EmbeddedEngine(models, spec.settings)


def _fake(spec: EngineSpec) -> Engine:
    from tinsmith.engine.fake.engine import FakeEngine, fake_model

    models = [fake_model(one.name, one.tokenizer_id, one.alias_of) for one in spec.models]
    return FakeEngine(models, spec.fake)
