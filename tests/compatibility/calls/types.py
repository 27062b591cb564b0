"""How the public methods of top-level types are called. They are local; what they give is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.compatibility.caller import Caller
from tests.compatibility.calls.losses import per_datum_loss
from tests.compatibility.stage import Stage, settled


def _datum_convert_tensors(stage: Stage, call: Caller) -> None:
    made = call(stage.sdk.Datum, {"model_input": stage.prompt, "loss_fn_inputs": {}})

    assert made["model_input"] is stage.prompt


def _datum_with_provenance(stage: Stage, call: Caller) -> None:
    drawn = settled(stage.sampler.sample(stage.prompt, 1, stage.params)).sequences[0]
    span = stage.sdk.PromptProvenanceSpan(sequence_id=drawn.sequence_id, length=3)

    datum = call(stage.datum([5, 6, 7]), [span], [span])

    assert settled(stage.trainer.forward([datum], "cross_entropy")).loss_fn_outputs


def _loss_handle(stage: Stage) -> Any:
    service = stage.new_service()
    return settled(service.create_custom_loss(per_datum_loss, {"logprobs": 1, "weights": 1}))


def _loss_handle_input_names(stage: Stage, call: Caller) -> None:
    assert tuple(call(_loss_handle(stage))) == ("weights",)


def _loss_handle_key(stage: Stage, call: Caller) -> None:
    assert call(_loss_handle(stage))


def _dmel_serialize(stage: Stage, call: Caller) -> None:
    assert isinstance(call(stage.sdk.DmelChunk(dmel=b"\x01"), b"\x01"), str)


def _dmel_validate(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.DmelChunk, b"\x01") == b"\x01"


def _dmel_length(stage: Stage, call: Caller) -> None:
    nine_frames = bytes([0, 2, 9, 80])

    assert call(stage.sdk.DmelChunk(dmel=nine_frames)) == 9


def _text_length(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.EncodedTextChunk(tokens=[1, 2])) == 2


def _append(stage: Stage, call: Caller) -> None:
    longer = call(stage.prompt, stage.sdk.EncodedTextChunk(tokens=[8]))

    assert longer.to_ints() == [5, 6, 7, 8]


def _append_int(stage: Stage, call: Caller) -> None:
    assert call(stage.prompt, 8).to_ints() == [5, 6, 7, 8]


def _empty(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.ModelInput).length == 0


def _from_ints(stage: Stage, call: Caller) -> None:
    made = call(stage.sdk.ModelInput, [5, 6])

    assert len(settled(stage.base_sampler.sample(made, 1, stage.params)).sequences) == 1


def _to_ints(stage: Stage, call: Caller) -> None:
    assert call(stage.prompt) == [5, 6, 7]


def _input_length(stage: Stage, call: Caller) -> None:
    assert call(stage.prompt) == 3


def _from_tinker_path(stage: Stage, call: Caller) -> None:
    parsed = call(stage.sdk.ParsedCheckpointTinkerPath, stage.state)

    assert parsed.training_run_id == stage.run_id
    assert parsed.tinker_path == stage.state


def _tensor(stage: Stage) -> Any:
    return stage.tensor([1.0, 2.0], "float32")


def _tensor_data(stage: Stage, call: Caller) -> None:
    assert list(call(_tensor(stage))) == [1.0, 2.0]


def _from_numpy(stage: Stage, call: Caller) -> None:
    _check_trains(stage, call(stage.sdk.TensorData, np.array([2, 3, 4])))


def _from_torch(stage: Stage, call: Caller) -> None:
    _check_trains(stage, call(stage.sdk.TensorData, torch.tensor([2, 3, 4])))


def _from_torch_sparse(stage: Stage, call: Caller) -> None:
    dense = torch.zeros(3, 8, dtype=torch.int64)
    dense[:, 0] = torch.tensor([2, 3, 4])
    targets = call(stage.sdk.TensorData, dense)
    weights = stage.sdk.TensorData.from_torch_sparse((dense > 0).float())

    _check_trains(stage, targets, weights)


def _check_trains(stage: Stage, targets: Any, weights: Any = None) -> None:
    weights = stage.tensor([1.0] * 3, "float32") if weights is None else weights
    inputs = {"target_tokens": targets, "weights": weights}
    text = stage.types.ModelInput.from_ints([1, 2, 3])
    datum = stage.types.Datum(model_input=text, loss_fn_inputs=inputs)
    assert settled(stage.trainer.forward([datum], "cross_entropy")).loss_fn_outputs


def _to_numpy(stage: Stage, call: Caller) -> None:
    assert call(_tensor(stage)).tolist() == [1.0, 2.0]


def _to_torch(stage: Stage, call: Caller) -> None:
    assert call(_tensor(stage)).tolist() == [1.0, 2.0]


def _tolist(stage: Stage, call: Caller) -> None:
    assert call(_tensor(stage)) == [1.0, 2.0]


CALLS: dict[str, Callable[[Stage, Caller], None]] = {
    "Datum.convert_tensors": _datum_convert_tensors,
    "Datum.with_provenance": _datum_with_provenance,
    "DmelChunk.length": _dmel_length,
    "DmelChunk.serialize_dmel": _dmel_serialize,
    "DmelChunk.validate_dmel": _dmel_validate,
    "EncodedTextChunk.length": _text_length,
    "LossHandle.input_names": _loss_handle_input_names,
    "LossHandle.key": _loss_handle_key,
    "ModelInput.append": _append,
    "ModelInput.append_int": _append_int,
    "ModelInput.empty": _empty,
    "ModelInput.from_ints": _from_ints,
    "ModelInput.length": _input_length,
    "ModelInput.to_ints": _to_ints,
    "ParsedCheckpointTinkerPath.from_tinker_path": _from_tinker_path,
    "TensorData.data": _tensor_data,
    "TensorData.from_numpy": _from_numpy,
    "TensorData.from_torch": _from_torch,
    "TensorData.from_torch_sparse": _from_torch_sparse,
    "TensorData.to_numpy": _to_numpy,
    "TensorData.to_torch": _to_torch,
    "TensorData.tolist": _tolist,
}
