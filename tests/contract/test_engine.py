"""The promises of `engines/base.py`, held against every engine."""

from __future__ import annotations

import asyncio

from tinsmith.engines.registry import make_engine


def test_an_engine_tells_its_models_with_their_aliases() -> None:
    """Every name that a client may ask for, and which are the same model."""

    async def run() -> None:
        async with make_engine("fake", ["a=path", "b=path", "c:tiny"]) as engine:
            models = {model.name: model for model in engine.base_models()}

        assert [models[name].alias_of for name in ("a", "b", "c:tiny")] == [None, "a", None]
        assert models["c:tiny"].tokenizer_id == "c"

    asyncio.run(run())
