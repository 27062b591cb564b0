"""What the calls need: clients, data, and objects on the server, each created on first use.

Runs inside of the SDK under test and so knows its releases only by what they share.
"""

from __future__ import annotations

import functools
import itertools
import urllib.request
from types import ModuleType
from typing import Any

RESULT_TIMEOUT_S = 40.0
BASE_MODEL = "Qwen/Qwen3-8B"
"""Also the name of a folder with a tokenizer, so that the hub is not needed."""

PROJECT = "project-1"


def settled(value: Any) -> Any:
    """The value, or the result of a future."""
    while hasattr(value, "result") and not hasattr(value, "__iter__"):
        value = value.result(timeout=RESULT_TIMEOUT_S)
    return value


class Stage:
    """One SDK with one service."""

    def __init__(self, sdk: ModuleType, base_url: str, api_key: str, title: str) -> None:
        self.sdk = sdk
        self.base_url = base_url
        self.api_key = api_key
        self.title = title
        self.is_tinsmith = "tinsmith" in sdk.ServiceClient.__module__
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"c{next(self._numbers)}"

    # Clients

    def new_service(self) -> Any:
        return self.sdk.ServiceClient(
            user_metadata={"sdk": self.title},
            base_url=self.base_url,
            api_key=self.api_key,
        )

    @functools.cached_property
    def service(self) -> Any:
        return self.new_service()

    def new_trainer(self) -> Any:
        return self.service.create_lora_training_client(BASE_MODEL, rank=8)

    @functools.cached_property
    def trainer(self) -> Any:
        return self.new_trainer()

    @functools.cached_property
    def sampler(self) -> Any:
        return self.trainer.save_weights_and_get_sampling_client()

    @functools.cached_property
    def base_sampler(self) -> Any:
        return self.service.create_sampling_client(base_model=BASE_MODEL)

    @functools.cached_property
    def rest(self) -> Any:
        return self.service.create_rest_client()

    @functools.cached_property
    def admin(self) -> Any:
        return self.sdk.AdminClient(base_url=self.base_url, api_key=self.api_key)

    # Things on the server

    @property
    def run_id(self) -> str:
        return str(self.trainer.model_id)

    @property
    def session_id(self) -> str:
        return self.run_id.partition(":train:")[0]

    def new_state(self) -> str:
        """The path of a checkpoint that nothing else uses."""
        return str(settled(self.trainer.save_state(self.new_name())).path)

    @functools.cached_property
    def state(self) -> str:
        return self.new_state()

    @functools.cached_property
    def sampler_weights(self) -> str:
        return str(settled(self.trainer.save_weights_for_sampler(self.new_name())).path)

    @functools.cached_property
    def external_weights(self) -> str:
        return str(settled(self.trainer.save_weights_external(self.new_name())).path)

    # Data

    @property
    def types(self) -> Any:
        return self.sdk.types

    @functools.cached_property
    def prompt(self) -> Any:
        return self.types.ModelInput.from_ints([5, 6, 7])

    @property
    def params(self) -> Any:
        return self.types.SamplingParams(max_tokens=4, temperature=0.5, seed=1)

    @functools.cached_property
    def data(self) -> list[Any]:
        return [self.datum([1, 2, 3]), self.datum([4, 5])]

    def datum(self, tokens: list[int]) -> Any:
        count = len(tokens)
        inputs = {
            "target_tokens": self.tensor([token + 1 for token in tokens], "int64"),
            "weights": self.tensor([1.0] * count, "float32"),
        }
        text = self.types.ModelInput.from_ints(tokens)
        return self.types.Datum(model_input=text, loss_fn_inputs=inputs)

    def tensor(self, values: list[Any], dtype: str) -> Any:
        return self.types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def download(url: str) -> bytes:
    """The content at a signed address, fetched without a credential."""
    with urllib.request.urlopen(url, timeout=RESULT_TIMEOUT_S) as reply:
        content: bytes = reply.read()
    return content
