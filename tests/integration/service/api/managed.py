"""A server with a ledger and a store that hold what tests of the management routes need."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.api.running import KEYS, MODEL, RunningServer
from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.model_config import write_config
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    SamplerEntry,
    SessionEntry,
    SessionId,
    TenantId,
)
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.types.training import LoraConfig

_NUMBERS = bytes(range(256)) * 5000
_TENSOR = {"dtype": "U8", "shape": [len(_NUMBERS)], "data_offsets": [0, len(_NUMBERS)]}


def _safetensors(name: str) -> bytes:
    header = json.dumps({name: _TENSOR}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + _NUMBERS


OUTPUT_LAYER = "base_model.model.lm_head.lora_A.weight"
FILES = {
    "adapter_config.json": b'{"r": 8, "lora_alpha": 32}',
    "adapter_model.safetensors": _safetensors(OUTPUT_LAYER),
}
SIZE_BYTES = sum(map(len, FILES.values()))


class ManagedServer(RunningServer):
    """Keeps two tenants, `alice` and `bob`."""

    def __init__(self, folder: Path, ledger: str, **settings: Any) -> None:
        super().__init__(with_keys=True, **settings)
        self._address = f"sqlite://{folder}/ledger" if ledger == "sqlite" else "memory:"
        self.store = FolderStore(folder / "store")

    async def _open_ledger(self) -> Ledger:
        return await open_ledger(self._address)

    def _open_store(self) -> CheckpointStore:
        return self.store

    # What tests put there

    def add_session(self, session_id: str = "s1", tenant: str = "alice", **fields: Any) -> str:
        """A session."""
        return self.run(self._add_session(session_id, tenant, fields))

    async def _add_session(self, session_id: str, tenant: str, fields: dict[str, Any]) -> str:
        now = self.ledger.now()
        given = {"project_id": "default", "heartbeat_at": now, "created_at": now, **fields}
        await self.ledger.entries(SessionEntry).add(
            SessionEntry(id=session_id, tenant_id=TenantId(tenant), **given)
        )
        return session_id

    def add_run(
        self, session_id: str = "s1", number: int = 0, tenant: str = "alice", **fields: Any
    ) -> str:
        """A training run of a session."""
        run_id = f"{session_id}:train:{number}"
        model = ModelEntry(
            id=run_id,
            tenant_id=TenantId(tenant),
            created_at=self.ledger.now(),
            session_id=SessionId(session_id),
            base_model=MODEL,
            config=write_config(LoraConfig(rank=8, train_unembed=False), None),
            **fields,
        )
        self.run(self.ledger.entries(ModelEntry).add(model))
        return run_id

    def add_sampler(self, session_id: str = "s1", number: int = 0, tenant: str = "alice") -> str:
        """A sampler of a session."""
        sampler = SamplerEntry(
            id=f"{session_id}:sample:{number}",
            tenant_id=TenantId(tenant),
            created_at=self.ledger.now(),
            session_id=SessionId(session_id),
            base_model=MODEL,
        )
        self.run(self.ledger.entries(SamplerEntry).add(sampler))
        return sampler.id

    def save(
        self,
        run_id: str,
        name: str,
        kind: str = "weights",
        tenant: str = "alice",
        files: dict[str, bytes] | None = None,
        **fields: Any,
    ) -> str:
        """A checkpoint, with its files; returns its path."""
        path = CheckpointPath(run_id, kind, name)
        self.write(path, FILES if files is None else files)
        entry = CheckpointEntry(
            id=str(path),
            tenant_id=TenantId(tenant),
            created_at=self.ledger.now(),
            run_id=run_id,
            checkpoint_id=path.checkpoint_id,
            size_bytes=self.store.size(path),
            **fields,
        )
        self.run(self.ledger.entries(CheckpointEntry).add(entry))
        return str(path)

    def write(self, path: CheckpointPath, files: dict[str, bytes], origin: str = "") -> None:
        """Files alone."""
        with self.store.begin(path, origin=origin) as staging:
            for name, content in files.items():
                (staging.folder / name).write_bytes(content)
            staging.commit(overwrite=True)


@pytest.fixture(params=["memory", "sqlite"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManagedServer]:
    """A running server of each kind of ledger that needs no other process."""
    with ManagedServer(tmp_path, request.param) as running:
        yield running


def key_of(tenant: str) -> str:
    """A tenant's key."""
    return KEYS[tenant]
