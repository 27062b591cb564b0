"""A training pass in two halves: its bytes, made where the data is, and its way to a result.

`pass_bodies` may run on any thread; `run_pass` runs on the background loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tinsmith.client import chunking
from tinsmith.client.dispatch import Place
from tinsmith.client.submission import Submitter, frozen_body
from tinsmith.errors import ValidationError
from tinsmith.types.buffers import Numbers
from tinsmith.types.inputs import Datum
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput, LossFnType
from tinsmith.wire.protobuf import Parts


def pass_bodies(
    submitter: Submitter,
    data: Sequence[Datum],
    loss_fn: LossFnType,
    loss_fn_config: Mapping[str, float | str] | None = None,
    *,
    forward_only: bool = False,
) -> list[Parts]:
    """The requests of one pass over checked data, cut as the server wants them, without numbers.

    Raises:
        ValidationError: There is no data.
    """
    flags = submitter.session.flags
    chunks = chunking.split(
        data,
        max_datums=flags.fwdbwd_max_chunk_len,
        max_bytes=flags.fwdbwd_max_chunk_bytes_count,
    )
    if not chunks:
        raise ValidationError("data is empty", remedy="pass at least one Datum")
    return [
        frozen_body(
            ForwardBackwardRequest(
                ForwardBackwardInput(chunk, loss_fn, loss_fn_config),
                submitter.model_id,
                forward_only=forward_only,
            )
        )
        for chunk in chunks
    ]


def checked_data(data: Sequence[Datum], loss_fn: LossFnType) -> list[Datum]:
    """The data as a list.

    Raises:
        TypeError: The data are no datums, or the loss is no name.
        ValidationError: An input of a named loss differs in length from the targets.
    """
    if not isinstance(loss_fn, str):
        raise TypeError(
            f"loss_fn is {type(loss_fn).__name__}, and not the name of a loss, as 'cross_entropy' "
            "is; a function of your own goes to forward_backward_custom"
        )
    if not isinstance(data, Iterable):
        raise TypeError(f"data is a list of Datum, not {type(data).__name__}")
    datums = list(data)
    for index, datum in enumerate(datums):
        if not hasattr(datum, "model_input"):
            raise TypeError(f"data[{index}] is {type(datum).__name__}, and not a Datum")
        if loss_fn != "custom":
            try:
                datum.check_rows()
            except ValidationError as exc:
                raise ValidationError(f"data[{index}]: {exc.args[0]}", remedy=exc.remedy) from None
    return datums


def token_counter(data: Sequence[Datum]) -> Callable[[], float]:
    """Counts the tokens of data that a loss is taken of; see `loss_per_token`.

    Copies the few numbers that it needs, so that it neither keeps the data nor sees later changes,
    and adds them up when it is called.
    """
    weights: list[Numbers] = []
    advantages: list[Numbers] = []
    others = 0
    for datum in data:
        inputs = datum.loss_fn_inputs
        if "weights" in inputs:
            weights.append(_copied(inputs["weights"].numbers))
        elif "advantages" in inputs:
            advantages.append(_copied(inputs["advantages"].numbers))
        elif "target_tokens" in inputs:
            others += len(inputs["target_tokens"].numbers)

    def count() -> float:
        total = math.fsum(abs(weight) for numbers in weights for weight in numbers.view())
        counted = sum(bool(number) for numbers in advantages for number in numbers.view())
        return total + counted + others

    return count


def _copied(numbers: Numbers) -> Numbers:
    return Numbers(bytes(numbers.memory), numbers.kind)  # of bytes it is no copy


async def run_pass(
    submitter: Submitter,
    place: Place,
    bodies: Sequence[Parts],
    kind: str,
    count_tokens: Callable[[], float] | None = None,
) -> ForwardBackwardOutput:
    """Send a pass in its turn, and wait for its whole result."""
    acknowledged = await submitter.submit_chunks(place, bodies)
    outputs = await asyncio.gather(*(submitter.result(ack, kind) for ack in acknowledged))
    joined = chunking.join(outputs)
    return joined if count_tokens is None else joined._with_tokens(count_tokens)
