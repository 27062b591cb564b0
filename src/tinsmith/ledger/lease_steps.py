"""What makes a write conditional on the newest epoch, as steps for any database (`steps.py`)."""

from __future__ import annotations

from typing import TypeVar

from tinsmith.ledger.lease import lease_lost
from tinsmith.ledger.steps import Effects, Operation, Steps

T = TypeVar("T")


def fenced(operation: Operation[T], epoch: int | None) -> Operation[T]:
    """The operation, refused before its first change unless the epoch is the newest."""
    if epoch is None:
        return operation

    def steps(effects: Effects) -> Steps[T]:
        [(newest,)] = yield "lease_epoch", ()
        if newest != epoch:
            raise lease_lost(epoch, newest)
        return (yield from operation(effects))

    return steps


def next_epoch(_: Effects, owner: str) -> Steps[int]:
    """Begin a new epoch, whoever held the last one."""
    [(epoch,)] = yield "next_epoch", (owner,)
    return int(epoch)


def nothing(_: Effects) -> Steps[None]:
    """Change nothing: with `fenced`, a look whether an epoch is the newest."""
    yield from ()
