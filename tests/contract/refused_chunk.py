"""A call of two chunks, the second of which is refused, and a call after it.

    python refused_chunk.py URL KEY
    python -m tinsmith.as_tinker refused_chunk.py URL KEY

Prints one JSON object with how each call ended. Run by `test_wire_equality.py`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker

STUCK_AFTER_S = 5.0


def datum(**inputs: Any) -> tinker.Datum:
    given: dict[str, Any] = {"target_tokens": [2], **inputs}
    return tinker.Datum(tinker.ModelInput.from_ints([1]), given)


def outcome(future: Any) -> str:
    try:
        future.result(timeout=STUCK_AFTER_S)
    except Exception as exc:  # noqa: BLE001 - what it is, is what the test asks
        return type(exc).__name__
    return "done"


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    bad = training.forward_backward([datum(weights=[1.0]), datum()], "cross_entropy")
    after = training.optim_step(tinker.AdamParams())
    print(json.dumps({"bad": outcome(bad), "after": outcome(after)}), flush=True)
    os._exit(0)  # the official SDK would wait for its calls


if __name__ == "__main__":
    main(*sys.argv[1:])
