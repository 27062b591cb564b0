"""The base models that a service offers, as all servers of one database know them.

The scheduler publishes the models of its engine in the ledger. Servers without an engine read them
there, so that they need no model files; they look again every few seconds, since another scheduler
may have taken over with other models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from tinsmith.engine.base import BaseModel
from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ServedModels, TenantId
from tinsmith.service.run.service_settings import Limits

ID = "served"
LOOK_S = 0.5
NO_SCHEDULER = (
    "no scheduler has been seen on this database yet; start one with "
    "`tinsmith serve --role scheduler`"
)


async def publish_models(ledger: Ledger, models: Iterable[BaseModel], epoch: int | None) -> None:
    """Tell all servers of a ledger which models its scheduler has.

    Raises:
        LeaseLostError: There is a newer scheduler.
    """
    if ledger.is_shared:
        plain = [msgspec.to_builtins(model) for model in models]
        await ledger.entries(ServedModels, epoch=epoch).put(
            ServedModels(id=ID, tenant_id=TenantId(""), created_at=ledger.now(), models=plain)
        )


class PublishedModels(Mapping[str, BaseModel]):
    """Base models by name, aliases among them, each within the limits of this server."""

    def __init__(self, ledger: Ledger, limits: Limits, models: Iterable[BaseModel] = ()) -> None:
        self._ledger = ledger
        self._limits = limits
        self._models: dict[str, BaseModel] = {}
        self._set(models)

    @classmethod
    async def wait(
        cls, ledger: Ledger, limits: Limits, tell: Callable[[str], None]
    ) -> PublishedModels:
        """The published models, once a scheduler has published any."""
        models = cls(ledger, limits)
        while not await models.look():
            tell(NO_SCHEDULER)
            await asyncio.sleep(LOOK_S)
        return models

    async def look(self) -> bool:
        """Read what is published now; returns whether there is anything."""
        try:
            found = await self._ledger.entries(ServedModels).get(ID)
        except LedgerUnavailableError:
            return bool(self._models)
        if found is not None:
            self._set(msgspec.convert(found.models, list[BaseModel], strict=False))
        return bool(self._models)

    def _set(self, models: Iterable[BaseModel]) -> None:
        self._models = {model.name: _held_to(self._limits, model) for model in models}

    def __getitem__(self, name: str) -> BaseModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


def _held_to(limits: Limits, model: BaseModel) -> BaseModel:
    """The model as the API offers it: what the engine can do, within the limits."""
    return msgspec.structs.replace(
        model,
        max_context=min(model.max_context, limits.prompt_tokens),
        max_rank=min(model.max_rank, limits.rank),
    )
