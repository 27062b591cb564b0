"""Batches for the programs beside it; imported by them as `tinker` programs do."""

import tinker


def batch(step: int) -> "list[tinker.Datum]":
    """Three sequences of different lengths."""
    data = []
    for row in range(3):
        tokens = [(7 * step + 3 * row + place) % 50 for place in range(4 + row)]
        weights = [0.0] + [1.0] * (len(tokens) - 2)
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens=tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData(
                        data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]
                    ),
                    "weights": tinker.TensorData(
                        data=weights, dtype="float32", shape=[len(weights)]
                    ),
                },
            )
        )
    return data
