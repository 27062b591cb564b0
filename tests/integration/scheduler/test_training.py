"""Commands of models, from the ledger through the fake engine and back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.scheduler.bench import bench
from tinsmith.types.training import CreateModelResponse

LINE = "session-1:train:0"


def test_a_model_is_made_trained_and_stepped(tmp_path: Path) -> None:
    """The road of a training run: every command settles with its result, and the loss falls."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            made = await b.result(await b.create(LINE))
            first = await b.result(await b.forward_backward(LINE, 1))
            stepped = await b.result(await b.step(LINE, 2))
            second = await b.result(await b.forward_backward(LINE, 3, forward_only=True))

        assert made == CreateModelResponse(model_id=LINE)
        assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
        assert stepped.metrics["step"] == 1

    asyncio.run(run())
