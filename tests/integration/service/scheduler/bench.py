"""A scheduler with its ledger, engine and store, and short ways to submit commands to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.engine.base import AdapterId, AdapterParts, Engine
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.model_config import write_config
from tinsmith.service.ledger.records import (
    ModelEntry,
    QueueId,
    RequestId,
    SamplerEntry,
    SessionEntry,
    SessionId,
    Submission,
    TenantId,
)
from tinsmith.service.ledger.scheduler_lease import Lease
from tinsmith.service.ledger.sqlite import SqliteLedger
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams
from tinsmith.types.requests import (
    CreateModelRequest,
    ForwardBackwardRequest,
    OptimStepRequest,
    SampleRequest,
)
from tinsmith.types.training import ForwardBackwardInput
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.exchange import encode_body
from tinsmith.wire.stored import (
    fingerprint,
    read_failure,
    read_result,
    stored_body,
    stored_request,
)

BASE = "test/base"
WAIT_S = 60.0
kind_of_ledger = "memory"
"""What `bench` opens; the fixture `each_ledger` changes it."""
QUICK = SchedulerSettings(gap_wait_s=0.2, gap_look_s=0.02)


class Bench:
    """A running scheduler."""

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        *,
        settings: SchedulerSettings = QUICK,
        fake: FakeSettings | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.store = FolderStore(folder / "checkpoints")
        self.engine: Engine = FakeEngine([fake_model(BASE), fake_model("test/other")], fake)
        self.scheduler = Scheduler(ledger, self.engine, self.store, settings, lease=lease)

    async def open(self) -> None:
        await self.engine.open()
        await self.scheduler.open()

    async def close(self, drain_s: float = 10.0) -> None:
        await self.scheduler.close(drain_s)
        await self.engine.close()

    async def kill(self) -> None:
        """End it as a crash would: nothing is finished, given back or said."""
        while tasks := [
            task
            for task in asyncio.all_tasks()
            if task is not asyncio.current_task() and _is_schedulers(task)
        ]:  # the end of one may begin another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Submitting

    async def submit(
        self,
        queue_id: str,
        number: int | None,
        kind: str,
        request: Any,
        *,
        tenant: str = "tenant",
        is_ordered: bool = True,
        payload: bytes | None = None,
        clone: int | None = None,
    ) -> RequestId:
        if payload is None:
            payload = stored_request(request)
        appended = await self.ledger.append(
            Submission(
                queue_id=QueueId(queue_id),
                seq_id=number,
                kind=kind,
                tenant_id=TenantId(tenant),
                session_id=SessionId(queue_id.rpartition(":")[0].rpartition(":")[0]),
                fingerprint=fingerprint(kind, request, payload),
                payload=payload,
                is_ordered=is_ordered,
                clone=clone,
            )
        )
        return appended.request_id

    async def create(
        self, queue_id: str, *, tenant: str = "tenant", base: str = BASE, rank: int = 4
    ) -> RequestId:
        lora = LoraConfig(rank=rank, seed=1)
        session = queue_id.rpartition(":")[0].rpartition(":")[0]
        await self.ledger.entries(SessionEntry).add(
            SessionEntry(
                id=session,
                tenant_id=TenantId(tenant),
                created_at=self.ledger.now(),
                project_id="project",
                heartbeat_at=self.ledger.now(),
            )
        )
        await self.ledger.entries(ModelEntry).add(
            ModelEntry(
                id=queue_id,
                tenant_id=TenantId(tenant),
                created_at=self.ledger.now(),
                session_id=SessionId(session),
                base_model=base,
                config=write_config(lora, None),
            )
        )
        request = CreateModelRequest(
            session_id=session, model_seq_id=0, base_model=base, lora_config=lora
        )
        return await self.submit(queue_id, 0, "create_model", request, tenant=tenant)

    async def forward_backward(
        self,
        queue_id: str,
        number: int,
        tokens: Sequence[int] = (1, 2, 3),
        *,
        tenant: str = "tenant",
        forward_only: bool = False,
        weight: float = 1.0,
        loss: Any = "cross_entropy",
        config: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> RequestId:
        given = {"target_tokens": [*tokens[1:], 5], "weights": [weight] * len(tokens), **inputs}
        datum = Datum(ModelInput.from_ints(list(tokens)), given)
        request = ForwardBackwardRequest(
            ForwardBackwardInput([datum], loss, config), queue_id, number, forward_only=forward_only
        )
        body = b"".join(encode_body(request, Format.PROTOBUF))
        payload = stored_body(body, Format.PROTOBUF)
        return await self.submit(
            queue_id, number, "forward_backward", request, tenant=tenant, payload=payload
        )

    async def step(self, queue_id: str, number: int, *, tenant: str = "tenant") -> RequestId:
        request = OptimStepRequest(
            model_id=queue_id, seq_id=number, adam_params=AdamParams(learning_rate=0.05)
        )
        return await self.submit(queue_id, number, "optim_step", request, tenant=tenant)

    async def add_sampler(
        self, sampler: str, *, tenant: str = "tenant", path: str | None = None
    ) -> None:
        await self.ledger.entries(SamplerEntry).add(
            SamplerEntry(
                id=sampler,
                tenant_id=TenantId(tenant),
                created_at=self.ledger.now(),
                session_id=SessionId(sampler.rpartition(":")[0].rpartition(":")[0]),
                base_model=BASE,
                model_path=path,
            )
        )

    async def sample(
        self,
        sampler: str,
        number: int,
        *,
        tenant: str = "tenant",
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 5,
        num_samples: int = 1,
        seed: int | None = None,
        **more: Any,
    ) -> RequestId:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=number,
            prompt=ModelInput.from_ints(list(prompt)),
            num_samples=num_samples,
            sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed, stop=[]),
            **more,
        )
        return await self.submit(
            sampler, number, "asample", request, tenant=tenant, is_ordered=False, clone=0
        )

    # Waiting

    async def result(self, request_id: str, *, timeout_s: float = WAIT_S) -> Any:
        """A command's result, or its failure."""
        command = await self.ledger.wait_settled(request_id, timeout_s=timeout_s)
        assert command.is_settled, f"{request_id} did not end"
        kept = await self.ledger.result(request_id)
        assert kept is not None
        if kept.is_failed:
            return read_failure(kept.payload)
        return read_result(command.kind, kept.payload)

    async def weights(self, queue_id: str, name: str) -> dict[str, bytes]:
        """What an adapter is now: its weights, moments and gradients, as files."""
        folder = self.folder / "weights" / name
        folder.mkdir(parents=True)
        await self.engine.save_adapter(AdapterId(queue_id), folder, AdapterParts.SNAPSHOT)
        return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def _is_schedulers(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return "tinsmith/service/scheduler/" in getattr(code, "co_filename", "")


@contextlib.asynccontextmanager
async def bench(folder: Path, ledger: Ledger | None = None, **options: Any) -> AsyncIterator[Bench]:
    """A scheduler at work, over a ledger of the usual kind unless one is given."""
    own = None
    if ledger is None:
        own = await SqliteLedger.open(folder / "ledger") if kind_of_ledger == "sqlite" else None
        ledger = own or MemoryLedger()
    made = Bench(folder, ledger, **options)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
        if own is not None:
            await own.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Return when something is so."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.002)
