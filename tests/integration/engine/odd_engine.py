"""An engine that misbehaves on request, to be run in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tinsmith.engine.base import (
    AdapterSpec,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.errors import BadRequestError

_log = logging.getLogger("tinsmith.odd")

BASE = "test/base"


class ForeignError(Exception):
    """One that only the process knows which raised it; and that takes no message alone."""

    def __init__(self, *, told: str) -> None:
        super().__init__(told)


class OddEngine(FakeEngine):
    """Does what an adapter's id says instead of making the adapter."""

    name = "odd"

    def __init__(self, *, fails_to_open: bool = False, step_s: float = 0.0) -> None:
        super().__init__([fake_model(BASE)], FakeSettings(step_s=step_s, tokens_per_step=1))
        self._fails_to_open = fails_to_open

    async def open(self) -> None:
        """Fail, if asked to."""
        print("what a library prints goes to nobody's stdout")
        if self._fails_to_open:
            raise BadRequestError("the model is not to be had", remedy="choose another")
        await super().open()

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Do the odd thing."""
        what = spec.adapter_id
        if what == "hang":
            await asyncio.sleep(3600)
        elif what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "leave":
            os._exit(7)
        elif what == "leave a child":
            child = subprocess.Popen(["sleep", "3600"])  # noqa: ASYNC220 - it only begins
            print("left", child.pid, file=sys.stderr)
            os._exit(7)
        elif what == "user error":
            raise BadRequestError("this is no good", remedy="do it otherwise")
        elif what == "fault":
            raise ForeignError(told="something broke")
        elif what == "log":
            await asyncio.to_thread(_log.warning, "from a %s", "thread", extra={"model": "m"})
            try:
                raise ValueError("of the child")
            except ValueError:
                _log.exception("with a trace")
            _log.debug("nobody wants this")
        else:
            await super().create_adapter(spec)

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Return something that cannot be sent, or write something that is no message."""
        [work] = batch
        if work.work_id == "unreadable":
            for descriptor in range(3, 64):  # whichever is the socket
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"\x05" + b"\0" * 7 + b"\xff" * 5)
            await asyncio.sleep(3600)
        return [TrainingOutcome(work_id=work.work_id, result=lambda: None)]  # type: ignore[arg-type]

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: object) -> None:
        """Nothing; the sample that wants them is refused."""

    def admit(self, sample: SampleWork) -> None:
        """Refuse samples from weights."""
        if sample.weights_id is not None:
            raise BadRequestError("there are no such weights")
        super().admit(sample)


def odd_spec(**options: bool | float) -> EngineSpec:
    """An odd engine, for a process of its own."""
    return EngineSpec(engine=f"{__name__}:OddEngine", options={**options})
