"""Run by the unmodified official SDK, in a process of its own: custom losses, both ways.

    python -m tests.contract.official_custom_loss <base url> <api key>

Prints one JSON object with the metrics of each call. Run by `test_custom_loss.py`, which makes the
same calls with ours.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
import torch

BASE_MODEL = "small/model"
CASES = ("lists", "matrix", "sparse")
TOKENS = [1, 2, 3]
UPLOADED_INPUTS: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 0.0, 2.0]}
UPLOADED_RANKS: dict[str, Any] = {"logprobs": 1, "weights": 1}


def whole_batch(data: Any, logprobs: Any) -> Any:
    scale = torch.arange(len(data)) + 1.0
    loss = sum((s * lp.exp()).sum() for s, lp in zip(scale, logprobs, strict=True))
    return loss, {"mine": float(len(data))}


def cross_entropy(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/mean-lp/a.b_c:mean": logprobs.mean()}


def inputs(case: str) -> list[dict[str, Any]]:
    if case == "lists":
        return [{"target_tokens": [2, 3, 4]}, {"target_tokens": [2, 3, 4], "weights": [1.0, 0, 2]}]
    targets = torch.zeros(3, 8, dtype=torch.int64)
    targets[:, 0] = torch.tensor([5, 6, 7])
    if case == "matrix":
        return [{"target_tokens": targets + 1}]
    # Not without weights: the official SDK cannot make zeros in the shape of sparse targets.
    return [{"target_tokens": targets, "weights": targets / 8}]


def a_datum(given: dict[str, Any]) -> tinker.Datum:
    tokens = tinker.ModelInput.from_ints(TOKENS)
    return tinker.Datum(model_input=tokens, loss_fn_inputs=given)


def main(base_url: str, api_key: str) -> None:
    metrics: dict[str, Any] = {}
    with tinker.ServiceClient(base_url=base_url, api_key=api_key) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        for case in CASES:
            data = [a_datum(given) for given in inputs(case)]
            metrics[case] = training.forward_backward_custom(data, whole_batch).result().metrics
        handle = client.create_custom_loss(cross_entropy, UPLOADED_RANKS).result()
        data = [a_datum(UPLOADED_INPUTS)]
        metrics["uploaded"] = training.forward_backward_custom(data, handle).result().metrics
        metrics["built in"] = training.forward(data, "cross_entropy").result().metrics
    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
