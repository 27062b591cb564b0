"""Reads what commands submitted, and turns training commands into works of the engine.

Losses that clients have uploaded are looked up once and cached.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from tinsmith.engine.base import AdapterId, CustomLossSpec, PassWork, StepWork, TrainingWork
from tinsmith.errors import BadRequestError, TinkerError
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, CustomLossEntry, SessionId
from tinsmith.service.scheduler.command_queues import PASSES
from tinsmith.service.scheduler.known_models import KnownModels
from tinsmith.service.scheduler.suspects import Suspects
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.wire.stored import read_stored

MOST_REMEMBERED = 256


class UploadedLosses:
    """Finds the uploaded loss that a command names. For one event loop."""

    def __init__(self, ledger: FencedLedger) -> None:
        self._ledger = ledger
        self._losses: OrderedDict[str, tuple[SessionId, CustomLossSpec]] = OrderedDict()

    async def find(self, command: Command, loss_id: str) -> CustomLossSpec:
        """The loss with this id.

        Raises:
            BadRequestError: The command's session has no such loss.
        """
        if loss_id not in self._losses:
            entry = await self._ledger.entries(CustomLossEntry).get(loss_id)
            if entry is not None:
                self._losses[loss_id] = entry.session_id, _spec(entry)
        found = self._losses.get(loss_id)
        if found is None or found[0] != command.session_id:
            raise BadRequestError(
                f"there is no loss {loss_id!r:.200} in this session",
                remedy="create it with create_custom_loss of the same ServiceClient",
            )
        self._losses.move_to_end(loss_id)
        if len(self._losses) > MOST_REMEMBERED:
            self._losses.popitem(last=False)
        return found[1]


def _spec(entry: CustomLossEntry) -> CustomLossSpec:
    request = CreateCustomLossRequest.model_validate(
        {
            "session_id": entry.session_id,
            "custom_loss_seq_id": 0,
            "name": entry.name,
            "inputs": entry.graph.get("inputs", []),
            "graph": entry.graph.get("graph", {}),
        }
    )
    return CustomLossSpec(loss_id=entry.id, inputs=tuple(request.inputs), graph=request.graph)


LARGE_BYTES = 64 * 1024
"""Larger payloads are decoded on a thread, so that many of them do not block the event loop."""


async def read_request(ledger: FencedLedger, command: Command) -> Any:
    """The request as it was submitted.

    Raises:
        DecodeError: It cannot be decoded.
        LedgerDamagedError: The stored bytes are not those that were written.
    """
    payload = await ledger.payload(command.request_id)
    if len(payload) > LARGE_BYTES:
        return await asyncio.to_thread(read_stored, command.kind, payload)
    return read_stored(command.kind, payload)


def log_fields(command: Command) -> dict[str, str]:
    """The fields of a log line about a command."""
    return {
        "command": command.request_id,
        "kind": command.kind,
        "tenant": command.tenant_id,
        "session": command.session_id,
        "model": command.queue_id,
    }


_log = logging.getLogger(__name__)

ReadWork = TrainingWork | BaseException
"""A command as a work of the engine, or the error that it fails with."""


class WorkReader:
    """Reads training commands, for the training loop and for recovery. For one event loop."""

    def __init__(self, ledger: FencedLedger, models: KnownModels, suspects: Suspects) -> None:
        self._ledger = ledger
        self._models = models
        self._suspects = suspects
        self._losses = UploadedLosses(ledger)

    async def read(self, command: Command) -> ReadWork:
        """Read a command; an error is returned, not raised, because others run without it."""
        try:
            self._suspects.check(command.request_id)
            self._models.ready(command.queue_id)
            return await self._read(command)
        except TinkerError as exc:
            return exc
        except Exception as exc:  # noqa: BLE001 - of this command and of no other
            _log.exception("a command cannot be read", extra=log_fields(command))
            return exc

    async def _read(self, command: Command) -> TrainingWork:
        request = await read_request(self._ledger, command)
        if command.kind not in PASSES:
            return StepWork(
                work_id=command.request_id,
                adapter_id=AdapterId(command.queue_id),
                params=request.optim_params,
            )
        given = request.forward_backward_input
        config = given.loss_fn_config or {}
        loss = None
        if given.loss_fn == "custom":
            loss = await self._losses.find(command, str(config.get("loss_id", "")))
        return PassWork(
            work_id=command.request_id,
            adapter_id=AdapterId(command.queue_id),
            data=tuple(given.data),
            loss_fn=given.loss_fn,
            loss_config=config,
            with_gradients=not request.forward_only,
            custom_loss=loss,
        )
