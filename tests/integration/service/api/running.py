"""A server on a real socket over a ledger in memory, with a loop that settles what is asked.

The loop stands for the scheduler: it answers every command at once, with numbers of no meaning.
Kinds in `held` are left alone until `release`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import httpx

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engine.base import BaseModel
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.app import App, ExchangeReport
from tinsmith.service.api.context import ApiContext
from tinsmith.service.api.keys import digest_of
from tinsmith.service.http.bodies import BodyLimits
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.http.server import HttpServer
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.board import SchedulerReport
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import ApiKey, Command, Settlement, Tenant, TenantId
from tinsmith.testing.running import ServiceThread
from tinsmith.types import futures as f
from tinsmith.types import sampling as s
from tinsmith.types import tensors
from tinsmith.types import training as t
from tinsmith.wire.stored import read_stored, stored_failure, stored_result

T = TypeVar("T")

MODEL = "Qwen/Qwen3-8B"
TINY = BaseModel(
    name=MODEL, vocabulary=1000, max_context=512, eos_tokens=(2,), tokenizer_id="./tok", max_rank=64
)
KEYS = {"alice": "tml-alice-key", "bob": "tml-bob-key"}
CLAIMER = "test"


def split_settings(**settings: Any) -> tuple[ApiSettings, BodyLimits]:
    """Settings of the API, and limits on the bodies that it is sent."""
    of_api = {name: settings[name] for name in settings if name in ApiSettings.__struct_fields__}
    of_bodies = {name: settings[name] for name in settings if name in BodyLimits.__struct_fields__}
    assert set(settings) == {*of_api, *of_bodies}
    return ApiSettings(**of_api), BodyLimits(**of_bodies)


class RunningServer:
    """To be used as a context manager; the server has a thread and a loop of its own."""

    def __init__(
        self, *, with_keys: bool = False, model: BaseModel = TINY, **settings: Any
    ) -> None:
        self._model = model
        self.settings, self.body_limits = split_settings(**{"long_poll_s": 0.5, **settings})
        self.held: set[str] = set()
        self.failures: dict[str, f.RequestFailedResponse] = {}
        self.reports: list[ExchangeReport] = []
        self.settled = 0
        self._with_keys = with_keys
        self._thread = ServiceThread(self._open, self._close)
        self._changed = threading.Condition()
        self.ledger: Ledger
        self.app: App
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    @property
    def base_url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def http(self, tenant: str = "alice", **options: Any) -> httpx.Client:
        """A plain client with a tenant's key."""
        headers = {"X-API-Key": KEYS[tenant]}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=30, **options)

    def release(self) -> None:
        """Let go of what is held."""
        self.held.clear()
        self.run(self._settle_held())

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something is so, looking whenever an exchange or a settlement is over."""
        with self._changed:
            assert self._changed.wait_for(is_so, timeout_s), "it never became so"

    def wait_polls(self, count: int) -> None:
        """Wait until so many polls are held."""

        async def held() -> None:
            async with asyncio.timeout(60):
                while len(self.app.context.long_polls) < count:  # noqa: ASYNC110 - of another loop
                    await asyncio.sleep(0.005)

        self.run(held())

    # On the server's own loop

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ledger = await self._open_ledger()
        self.ledger.board.publish_report(SchedulerReport(is_ready=True))
        if self._with_keys:
            for tenant, key in KEYS.items():
                await _add_key(self.ledger, tenant, key)
        context = ApiContext(
            self.ledger,
            {
                MODEL: self._model,
                "alias": TINY.__class__(
                    name="alias", vocabulary=1000, max_context=512, alias_of=MODEL
                ),
            },
            store=self._open_store(),
            settings=self.settings,
            secret=b"s" * 32,
        )
        self.app = App(context, self._observe)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.edge = HttpEdge(self.app.answer, self.body_limits)
        self._server = HttpServer(self.edge)
        await self._server.open(listener)
        self._settling = asyncio.create_task(self._settle())

    async def _open_ledger(self) -> Ledger:
        return MemoryLedger()

    def _open_store(self) -> CheckpointStore | None:
        return None

    async def _close(self) -> None:
        self.app.context.long_polls.close()
        await self._server.close(2.0)
        self._settling.cancel()
        await asyncio.gather(self._settling, return_exceptions=True)
        await self.ledger.close()

    def _observe(self, report: ExchangeReport) -> None:
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()

    async def _settle(self) -> None:
        self._kept: list[Command] = []
        while True:
            await self.ledger.wait_for_commands(CLAIMER, timeout_s=5)
            await self.ledger.take_cancelled(CLAIMER)
            for command in await self.ledger.claim(CLAIMER, limit=100):
                if command.kind in self.held:
                    self._kept.append(command)
                else:
                    await self._settle_one(command)

    async def _settle_held(self) -> None:
        kept, self._kept = self._kept, []
        for command in kept:
            await self._settle_one(command)

    async def _settle_one(self, command: Command) -> None:
        failure = self.failures.get(command.kind)
        if failure is None:
            payload = await self.ledger.payload(command.request_id)
            result = answer(command, payload)
        else:
            result = stored_failure(failure)
        settlement = Settlement(
            request_id=command.request_id, payload=result, is_failed=failure is not None
        )
        await self.ledger.settle([settlement])
        with self._changed:
            self.settled += 1
            self._changed.notify_all()


def answer(command: Command, payload: bytes) -> bytes:
    """Some result for a command."""
    kind = command.kind
    if kind == "release_model":
        return b"J{}"
    request = read_stored(kind, payload)
    value: Any
    if kind in ("forward_backward", "forward"):
        outputs = [
            {"logprobs": tensors.TensorData([-1.0] * datum.model_input.length, "float32")}
            for datum in request.forward_backward_input.data
        ]
        value = t.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.0})
    elif kind == "asample":
        sequences = [
            s.SampledSequence("stop", tokens=[n, 7], logprobs=[-0.5, -0.25])
            for n in range(request.num_samples)
        ]
        value = s.SampleResponse(sequences)
    elif kind == "optim_step":
        value = t.OptimStepResponse(metrics={"grad_norm": 1.0})
    elif kind == "create_model":
        value = t.CreateModelResponse(model_id=command.queue_id)
    elif kind == "load_weights":
        value = t.LoadWeightsResponse(path=request.path, model_id=command.queue_id)
    elif kind == "create_custom_loss":
        value = t.CreateCustomLossResponse(loss_id=command.request_id)
    elif kind == "save_weights":
        value = t.SaveWeightsResponse(path=f"tinker://{command.queue_id}/weights/{request.path}")
    elif kind == "unload_model":
        value = t.UnloadModelResponse(model_id=command.queue_id)
    else:
        value = t.SaveWeightsForSamplerResponseInternal(path=f"tinker://{command.queue_id}/x/y")
    return stored_result(kind, value)


async def _add_key(ledger: Ledger, tenant: str, key: str) -> None:
    tenant_id = TenantId(tenant)
    now = ledger.now()
    await ledger.entries(Tenant).add(
        Tenant(id=tenant, tenant_id=tenant_id, created_at=now, name=tenant)
    )
    await ledger.entries(ApiKey).add(
        ApiKey(id=digest_of(key), tenant_id=tenant_id, created_at=now, name="test", shown=key[:8])
    )
