"""Everything about a submission that is wrong by itself.

Each refusal is a 400 that names the field, what it holds and what it may hold. What only shows when
a command runs is not looked for here.
"""

from __future__ import annotations

from typing import Any

from tinsmith.engines.base import BaseModel
from tinsmith.errors import BadRequestError, shown
from tinsmith.ledger.records import LARGEST_NUMBER, is_storable
from tinsmith.server.call import Call
from tinsmith.types.training import LoraConfig

LONGEST_TEXT = 1000
MOST_METADATA = 64 * 1024
LARGEST_CREATED = 2**31 - 1
"""The highest number that a session may give to a model, a sampler or a loss."""


def refuse(field: str, value: object, bound: str) -> BadRequestError:
    """The error for a field that holds what it may not."""
    return BadRequestError(f"{field} is {shown(value)}; {bound}")


def check_texts(*fields: tuple[str, str | None]) -> None:
    """Names and notes: short, and such that every database can keep them."""
    for name, value in fields:
        if value is None:
            continue
        if len(value) > LONGEST_TEXT:
            raise BadRequestError(f"{name} has {len(value)} characters; it may have {LONGEST_TEXT}")
        if not is_storable(value):
            raise refuse(name, value, "it may not hold NUL or halves of characters")


def check_metadata(name: str, metadata: dict[str, Any] | None) -> None:
    """Metadata is kept, so it is bounded."""
    if metadata is None:
        return
    size = len(repr(metadata))
    if size > MOST_METADATA:
        raise BadRequestError(f"{name} takes about {size} bytes; it may take {MOST_METADATA}")
    if not is_storable(repr(metadata)):
        raise BadRequestError(f"{name} may not hold NUL or halves of characters")


def check_number(field: str, value: int, most: int = LARGEST_NUMBER) -> None:
    """A number that a client counts with."""
    if not 0 <= value <= most:
        raise refuse(field, value, f"it may be 0 to {most}")


def base_model(call: Call, name: str, field: str = "base_model") -> BaseModel:
    """The base model of this name."""
    found = call.parts.base_models.get(name)
    if found is None:
        known = ", ".join(sorted(call.parts.base_models)[:20])
        raise refuse(field, name, f"this service has {known or 'no models'}")
    return found


def check_lora(model: BaseModel, lora: LoraConfig) -> None:
    """The shape of an adapter."""
    if not 1 <= lora.rank <= model.max_rank:
        raise refuse("lora_config.rank", lora.rank, f"it may be 1 to {model.max_rank}")
    if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
        raise BadRequestError(
            "lora_config trains nothing; one of train_unembed, train_mlp and train_attn must be set"
        )
    if lora.seed is not None and not -(2**63) <= lora.seed < 2**64:
        raise refuse("lora_config.seed", lora.seed, "it must fit into 64 bits")
