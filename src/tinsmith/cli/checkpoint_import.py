"""`tinsmith checkpoint import`: an adapter that `peft` saved, as a checkpoint of a service of ours.

Works on the service's own store and database, whether or not it runs, as `tinsmith key` does. The
checkpoint is in a run of its own, which holds nothing else and cannot be trained itself: training
goes on from the checkpoint, in a new run.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
from pathlib import Path

import msgspec

from tinsmith.checkpoints.format import Adapter, write_adapter
from tinsmith.checkpoints.imported import read_foreign
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import LONGEST_NAME, CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.cli.failures import UsageError
from tinsmith.cli.output import Properties, show
from tinsmith.cli.serve import loaded_settings
from tinsmith.errors import ValidationError
from tinsmith.ledger import audit
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.model_config import write_config
from tinsmith.ledger.records import CheckpointEntry, Model, SessionId, Tenant, TenantId
from tinsmith.ledger.recovery import names_files
from tinsmith.ledger.registry import open_ledger_beside
from tinsmith.observe.sizes import size_text
from tinsmith.serve.settings import ServiceSettings
from tinsmith.server import keys

RUNS = "import"
"""How ids of runs begin that hold one imported checkpoint."""


def run(arguments: argparse.Namespace) -> None:
    """Read an adapter, keep it, and say what it is called.

    Raises:
        UsageError: A name cannot be used, or there is no such tenant.
        CheckpointFormatError: It is no adapter that can be trained on.
    """
    settings = loaded_settings(arguments).settings
    source = Path(arguments.folder)
    adapter = read_foreign(source, base_model=arguments.base_model)
    adapter = _by_served_name(adapter, settings)
    _check_served(adapter, settings)
    name = arguments.name or _name_from(source)
    try:
        path = CheckpointPath(f"{RUNS}-{secrets.token_hex(8)}", "weights", name)
        manifest = asyncio.run(_keep(settings, TenantId(arguments.tenant), path, adapter))
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc
    _show(arguments, path, adapter, manifest)


def _by_served_name(adapter: Adapter, settings: ServiceSettings) -> Adapter:
    """The adapter, with the service's own name for a base model that it has from a path or id."""
    names = {model.path: model.name for model in reversed(settings.served_models)}
    name = names.get(adapter.base_model, adapter.base_model)
    return msgspec.structs.replace(adapter, base_model=name)


def _check_served(adapter: Adapter, settings: ServiceSettings) -> None:
    """Refuse a base model that the service does not have, as far as the settings tell."""
    names = [model.name for model in settings.served_models]
    if settings.models and adapter.base_model not in names:
        raise UsageError(
            f"the adapter is one of {adapter.base_model!r:.200}, which is not served",
            remedy=f"--base-model says which it is: {', '.join(names)}",
        )


def _name_from(source: Path) -> str:
    """The folder's name, without what a checkpoint's name may not have."""
    plain = re.sub(r"[^\w.-]+", "-", source.absolute().name, flags=re.ASCII)
    return plain.strip(".-")[:LONGEST_NAME].rstrip(".") or "imported"


async def _keep(
    settings: ServiceSettings, tenant_id: TenantId, path: CheckpointPath, adapter: Adapter
) -> Manifest:
    async with await open_ledger_beside(settings.database) as ledger:
        await _check_tenant(ledger, tenant_id)
        is_used = await names_files(ledger)
        manifest = await asyncio.to_thread(_write, settings, path, adapter, is_used=is_used)
        # Named when it is on the disk; a crash before that leaves files, which the service sweeps.
        await _name(ledger, tenant_id, path, adapter, manifest)
        return manifest


async def _check_tenant(ledger: Ledger, tenant_id: TenantId) -> None:
    if tenant_id == keys.DEFAULT_TENANT:
        await keys.default_tenant(ledger)
    elif await ledger.entries(Tenant).get(tenant_id) is None:
        raise ValidationError(
            f"there is no tenant {tenant_id!r:.80}",
            remedy="`tinsmith key create --tenant` makes one",
        )


def _write(
    settings: ServiceSettings, path: CheckpointPath, adapter: Adapter, *, is_used: bool
) -> Manifest:
    work = settings.data / "work"
    with (
        open_store(settings.checkpoints, work=work, must_exist=is_used) as store,
        store.begin(path, origin=path.run_id) as staging,
    ):
        write_adapter(staging.folder, adapter)
        return staging.commit()


async def _name(
    ledger: Ledger,
    tenant_id: TenantId,
    path: CheckpointPath,
    adapter: Adapter,
    manifest: Manifest,
) -> None:
    now = ledger.now()
    config = write_config(adapter.lora_config(), None)
    await ledger.entries(Model).add(
        Model(
            id=path.run_id,
            tenant_id=tenant_id,
            created_at=now,
            session_id=SessionId(""),
            base_model=adapter.base_model,
            config=config,
            released_at=now,  # no engine has it
        )
    )
    await ledger.entries(CheckpointEntry).add(
        CheckpointEntry(
            id=str(path),
            tenant_id=tenant_id,
            created_at=now,
            run_id=path.run_id,
            checkpoint_id=path.checkpoint_id,
            size_bytes=manifest.size_bytes,
            details={
                "version": manifest.version,
                "base_model": adapter.base_model,
                "has_optimizer": False,
                **config,
            },
        )
    )
    await audit.note(
        ledger,
        tenant_id,
        audit.CHECKPOINT_IMPORTED,
        run_id=path.run_id,
        tinker_path=str(path),
        change=audit.change_id("import", str(path)),
    )


def _show(
    arguments: argparse.Namespace, path: CheckpointPath, adapter: Adapter, manifest: Manifest
) -> None:
    plain = {
        "checkpoint_path": str(path),
        "base_model": adapter.base_model,
        "lora_rank": adapter.rank,
        "size_bytes": manifest.size_bytes,
        "tenant": arguments.tenant,
    }
    pairs = [
        ("Checkpoint Path", str(path)),
        ("Base Model", adapter.base_model),
        ("LoRA Rank", str(adapter.rank)),
        ("Layers", str(len(adapter.layers))),
        ("Size", size_text(manifest.size_bytes)),
    ]
    show(arguments.format, plain, Properties("Checkpoint imported", pairs))
