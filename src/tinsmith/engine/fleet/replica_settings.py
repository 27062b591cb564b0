"""The replicas of a fleet as operators write them, and what they become.

On the command line a replica is `key=value` pairs with commas between them, in a settings file a
table with the same keys:

    --replica count=2,duty=train,device=cpu,threads=4
    --replica device=cuda:*

`device=cuda:*` stands for one replica on each GPU of the machine.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tinsmith.engine.embedded.embedded_settings import check_device_name, free_threads
from tinsmith.engine.fleet.replica import Duty, ReplicaSpec
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.errors import ValidationError, shown

EVERY_GPU = "cuda:*"
MOST_REPLICAS = 1024
DUTIES: tuple[Duty, ...] = ("train", "sample", "both")
COUNT_GPUS_S = 120.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one kind."""

    count: int = 1
    name: str | None = None
    """The name; with a number behind it if there are several."""
    duty: Duty = "both"
    device: str | None = None
    """None for the device of the service."""
    threads: int = 0
    """0: replicas divide the free cores."""
    adapter_gib: float = 0.0
    """Memory for models under training; 0 for what is free on its GPU, or no bound on the CPU."""
    models: tuple[str, ...] = ()
    """The base models that it serves; empty for all."""


def read_replica(given: str | Mapping[str, Any]) -> ReplicaSettings:
    """Parse the text or the table of a replica.

    Raises:
        ValidationError: A key is unknown, or a value does not fit.
    """
    fields = _pairs(given) if isinstance(given, str) else dict(given)
    known = ReplicaSettings.__struct_fields__
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValidationError(f"replica: there is no {shown(name)}", remedy=hint)
    try:
        made = msgspec.convert(fields, ReplicaSettings, strict=not isinstance(given, str))
    except msgspec.ValidationError as exc:
        raise ValidationError(f"replica: {exc}") from exc
    _check(made)
    return made


def _pairs(text: str) -> dict[str, Any]:
    """The keys and values of a text; `model` may be given several times."""
    fields: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, is_pair, value = pair.partition("=")
        name, value = name.strip(), value.strip()
        if not is_pair:
            raise ValidationError(
                f"replica: {shown(pair)} has no value",
                remedy="write key=value pairs, such as count=2,duty=both,device=cpu",
            )
        if name in ("model", "models"):
            fields.setdefault("models", []).append(value)
        elif name in fields:
            raise ValidationError(f"replica: {name} is given twice")
        else:
            fields[name] = value
    return fields


def _check(one: ReplicaSettings) -> None:
    if not 1 <= one.count <= MOST_REPLICAS:
        raise ValidationError(f"replica: count is {one.count}: expected 1 to {MOST_REPLICAS}")
    if not 0 <= one.threads <= 4096:
        raise ValidationError(f"replica: threads is {one.threads}: expected 0 to 4096")
    if not 0 <= one.adapter_gib <= 1 << 20:
        raise ValidationError(f"replica: adapter_gib is {one.adapter_gib}: expected 0 or more")
    if one.name is not None and _NAME.fullmatch(one.name) is None:
        raise ValidationError(
            f"replica: {shown(one.name)} is not a name", remedy="use letters, digits, - and _"
        )
    if one.device is not None and one.device != EVERY_GPU:
        check_device_name(one.device)
    if one.device == EVERY_GPU and one.count != 1:
        raise ValidationError(f"replica: with device={EVERY_GPU} the GPUs decide the count")


def as_text(one: ReplicaSettings) -> str:
    """The text of a replica, as on the command line."""
    pairs = [f"count={one.count}", f"duty={one.duty}"]
    pairs += [f"{key}={value}" for key in ("name", "device") if (value := getattr(one, key))]
    pairs += [f"threads={one.threads}"] if one.threads else []
    pairs += [f"adapter_gib={one.adapter_gib!r}"] if one.adapter_gib else []
    return ",".join([*pairs, *(f"model={model}" for model in one.models)])


def count_gpus() -> int:
    """How many GPUs PyTorch sees; asked in a process of its own, since the import takes seconds."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        told = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=COUNT_GPUS_S,
            check=True,
            text=True,
        )
        return int(told.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def replica_specs(
    settings: Sequence[ReplicaSettings],
    engine: EngineSpec,
    *,
    count_devices: Callable[[], int] = count_gpus,
) -> list[ReplicaSpec]:
    """Each replica, with the engine that it runs.

    Args:
        settings: What the operator asked for.
        engine: The engine of a replica that serves all models, on the service's device.
        count_devices: Counts the GPUs.

    Raises:
        ValidationError: There is no GPU, a model is not served, or a name is used twice.
    """
    wanted = [one for group in settings for one in _expanded(group, count_devices)]
    share = _thread_share(engine, len(wanted))
    specs: dict[str, ReplicaSpec] = {}
    for number, one in enumerate(wanted):
        name = one.name or f"replica-{number}"
        if name in specs:
            raise ValidationError(f"two replicas are named {name}")
        own = msgspec.structs.replace(
            engine.settings,
            device=one.device or engine.settings.device,
            threads=one.threads or share,
            adapter_bytes=int(one.adapter_gib * (1 << 30)),
        )
        models = _models(engine.models, one.models)
        spec = msgspec.structs.replace(engine, models=models, settings=own)
        specs[name] = ReplicaSpec(name=name, duty=one.duty, engine=spec)
    _check_served(engine.models, list(specs.values()))
    return list(specs.values())


def _expanded(one: ReplicaSettings, count_devices: Callable[[], int]) -> list[ReplicaSettings]:
    """One settings object per replica."""
    if one.device == EVERY_GPU:
        devices = [f"cuda:{number}" for number in range(count_devices())]
        if not devices:
            raise ValidationError(
                f"replica: device is {EVERY_GPU}, but PyTorch finds no GPU",
                remedy="check `nvidia-smi`, or give device=cpu",
            )
    else:
        devices = [one.device or ""] * one.count
    is_one = len(devices) == 1
    return [
        msgspec.structs.replace(
            one,
            count=1,
            device=device or None,
            name=one.name if is_one or one.name is None else f"{one.name}-{number}",
        )
        for number, device in enumerate(devices)
    ]


def _thread_share(engine: EngineSpec, replicas: int) -> int:
    """Threads of a replica that is given none; chosen once, since a replay needs the same."""
    if engine.settings.threads:
        return engine.settings.threads
    share = max(1, free_threads() // replicas)
    return 1 << (share.bit_length() - 1)


def _models(served: Sequence[ModelSource], wanted: Sequence[str]) -> tuple[ModelSource, ...]:
    """The served models that a replica wants, with their aliases."""
    if not wanted:
        return tuple(served)
    names = {one.name for one in served}
    for name in wanted:
        if name not in names:
            raise ValidationError(
                f"replica: the model {shown(name)} is not served",
                remedy=f"served are {', '.join(sorted(names))}",
            )
    paths = {one.path for one in served if one.name in wanted}
    return tuple(one for one in served if one.path in paths)


def _check_served(models: Sequence[ModelSource], specs: Sequence[ReplicaSpec]) -> None:
    for model in models:
        if not any(model in spec.engine.models for spec in specs):
            raise ValidationError(
                f"no replica serves the model {model.name}",
                remedy="add one that does, or do not give models for a replica",
            )
