"""The loops that researchers write, against a real network behind `tinsmith serve`.

Each is written once, for whatever client it is given: the official `tinker` and ours. The network
is a small random one, so that it is quick; what is learned of it is real.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch

import tinsmith
from tests.e2e.service.served import Served, serving
from tests.numerics.small_models import make_model

# The official client leaves its sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "test/small"
PROMPT = [5, 6, 7, 8]
WANTED = 150
"""A sampled token below this is worth something."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("loops")
    make_model(folder / "model", "Qwen3")
    model = f"{MODEL}={folder / 'model'}"
    # Where there is hardware for it, auto is bfloat16, whose ratios begin near 1 and not at it.
    with serving(folder, "--dtype", "float32", engine="embedded", model=model) as service:
        yield service


@pytest.fixture(scope="module", params=[tinker, tinsmith], ids=["official", "ours"])
def api(request: pytest.FixtureRequest) -> Any:
    """The package that the loop is written for."""
    return request.param


@pytest.fixture(scope="module")
def service(api: Any, served: Served) -> Iterator[Any]:
    with api.ServiceClient(base_url=served.base_url, api_key="tml-loops") as client:
        yield client
    gc.collect()  # here its sockets may end unclosed, and not in whichever test comes later


def _datum(api: Any, tokens: list[int], lead: int = 1) -> Any:
    """Next tokens are learned from `lead` on."""
    weights = [0.0] * (lead - 1) + [1.0] * (len(tokens) - lead)
    return api.Datum(
        model_input=api.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def _train(api: Any, training: Any, data: list[Any], steps: int, rate: float = 1e-2) -> list[float]:
    losses = []
    for _ in range(steps):
        output = training.forward_backward(data, "cross_entropy")
        training.optim_step(api.AdamParams(learning_rate=rate)).result()
        losses.append(output.result().metrics["loss:sum"])
    return losses


def _data(api: Any) -> list[Any]:
    return [_datum(api, [3 + number, *PROMPT, 9, 10, 11 + number]) for number in range(4)]


def test_a_supervised_loop_lowers_the_loss(api: Any, service: Any) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1)

    losses = _train(api, training, _data(api), 8)

    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_an_rl_loop_raises_the_reward(api: Any, service: Any, loss_fn: str) -> None:
    """Sample, reward, train on what was sampled, with the sampler's own log-probabilities."""
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=2)
    rewards = []
    for step in range(6):
        sampler = training.save_weights_and_get_sampling_client()
        params = api.SamplingParams(max_tokens=8, temperature=1.0, seed=step, stop=[])
        found = sampler.sample(api.ModelInput.from_ints(PROMPT), 24, params).result()
        worth = [
            sum(token < WANTED for token in one.tokens) / len(one.tokens) for one in found.sequences
        ]
        mean = sum(worth) / len(worth)
        rewards.append(mean)
        data = [
            _sampled(api, list(one.tokens), list(one.logprobs), value - mean)
            for one, value in zip(found.sequences, worth, strict=True)
        ]
        output = training.forward_backward(data, loss_fn)
        training.optim_step(api.AdamParams(learning_rate=1e-2)).result()
        if step == 0:
            # On the policy itself every ratio is 1: what was sampled is what is trained on.
            logprobs = output.result().loss_fn_outputs[0]["logprobs"].tolist()
            assert logprobs[len(PROMPT) - 1 :] == pytest.approx(
                list(found.sequences[0].logprobs), abs=1e-5
            )

    assert max(rewards[-2:]) > rewards[0] + 0.15, rewards


def _sampled(api: Any, tokens: list[int], logprobs: list[float], advantage: float) -> Any:
    whole, lead = PROMPT + tokens, [0.0] * (len(PROMPT) - 1)
    return api.Datum(
        model_input=api.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": lead + logprobs,
            "advantages": lead + [advantage] * len(tokens),
        },
    )


def test_a_preference_loop_with_a_custom_loss_widens_the_margin(api: Any, service: Any) -> None:
    """As DPO does: the chosen answer's log-probability over the rejected one's, by a sigmoid."""
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    pair = [
        _datum(api, [*PROMPT, 20, 21, 22], len(PROMPT)),
        _datum(api, [*PROMPT, 30, 31, 32], len(PROMPT)),
    ]

    def preference(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        chosen, rejected = (one[-3:].sum() for one in logprobs)
        margin = chosen - rejected
        return -torch.nn.functional.logsigmoid(0.5 * margin), {"margin": margin.item()}

    margins = []
    for _ in range(5):
        output = training.forward_backward_custom(pair, preference).result()
        training.optim_step(api.AdamParams(learning_rate=1e-2)).result()
        margins.append(output.metrics["margin"])

    assert margins[-1] > margins[0] + 1.0, margins


def test_a_run_resumed_with_its_optimizer_state_continues_identically(
    api: Any, service: Any
) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=4)
    _train(api, training, _data(api), 3)
    saved = training.save_state(name="third").result()

    went_on = _train(api, training, _data(api), 3)
    resumed = service.create_training_client_from_state_with_optimizer(saved.path)

    assert _train(api, resumed, _data(api), 3) == went_on


def test_saved_sampler_weights_do_not_change_with_further_training(api: Any, service: Any) -> None:
    """Sampler weights are what they were, whatever is trained after them."""
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=5)
    prompt, params = (
        api.ModelInput.from_ints(PROMPT),
        api.SamplingParams(max_tokens=12, seed=9, stop=[]),
    )
    old = training.save_weights_and_get_sampling_client()
    before = old.sample(prompt, 1, params).result().sequences[0]

    _train(api, training, _data(api), 5, rate=0.05)
    new = training.save_weights_and_get_sampling_client()

    again = old.sample(prompt, 1, params).result().sequences[0]
    assert (list(again.tokens), list(again.logprobs)) == (
        list(before.tokens),
        list(before.logprobs),
    )
    assert list(new.sample(prompt, 1, params).result().sequences[0].tokens) != list(before.tokens)


def test_two_concurrent_tenants_get_the_same_results_as_alone(
    tmp_path: Path, served: Served
) -> None:
    """They share packs and the machine, and not a bit of their numbers."""
    model = served.folder / "model"
    keys = [_key(tmp_path, tenant) for tenant in ("first", "second")]

    def run(url: str, key: str, seed: int) -> list[float]:
        with tinsmith.ServiceClient(base_url=url, api_key=key) as client:
            training = client.create_lora_training_client(MODEL, rank=4, seed=seed)
            return _train(tinsmith, training, _data(tinsmith), 4)

    with serving(tmp_path, engine="embedded", model=f"{MODEL}={model}") as service:
        url = service.base_url
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(run, [url, url], keys, [6, 7]))
        alone = [run(url, key, seed) for key, seed in zip(keys, (6, 7), strict=True)]

    assert together == alone


def _key(folder: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "tinsmith", "key", "create", "--tenant", tenant]
    made = subprocess.run(
        [*command, "--data", str(folder / "data")], check=True, capture_output=True, text=True
    )
    return next(word for word in made.stdout.split() if word.startswith("tml-"))
