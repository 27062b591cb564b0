"""From start-up to a trained step, over a real socket: our client and the official SDK."""

from __future__ import annotations

import json
from pathlib import Path

from tests.contract.official_process import said_by
from tests.integration.service.api.running import KEYS, MODEL, RunningServer
from tinsmith.client.service import ServiceClient
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.sampling import SamplingParams
from tinsmith.types.training import AdamParams

FLOW = Path(__file__).with_name("official_flow.py")


def test_our_client_trains_a_step() -> None:
    """Session, model, pass and step, each through the ledger."""
    datum = Datum(
        ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    with (
        RunningServer() as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as client,
    ):
        training = client.create_lora_training_client(MODEL, rank=4)
        passed = training.forward_backward([datum], "cross_entropy")
        stepped = training.optim_step(AdamParams())

        assert passed.result().metrics["loss:sum"] == 1.0
        assert stepped.result().metrics == {"grad_norm": 1.0}


def test_the_official_client_trains_a_step() -> None:
    """The same with the unmodified SDK."""
    with RunningServer(with_keys=True) as server:
        said = said_by(str(FLOW), server.base_url, KEYS["alice"])

    assert json.loads(said) == {
        "loss": 1.0,
        "step": {"grad_norm": 1.0},
        "info": "./tok",
        "models": [MODEL, "alias"],
        "tokens": [[[0, 7], [1, 7]]] * 21,
        "base_model": MODEL,
        "saved": "one",
    }


def test_our_client_samples_in_batches_and_streams() -> None:
    """All extensions at once: many in a request, results in the poll, tokens as they come."""
    prompt = ModelInput.from_ints([1, 2, 3])
    params = SamplingParams(max_tokens=4)
    with (
        RunningServer() as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        futures = [sampler.sample(prompt, 2, params) for _ in range(100)]
        tokens = [[seq.tokens for seq in future.result().sequences] for future in futures]
        streamed = sampler.sample_stream(prompt, 1, params)
        drawn = [token for piece in streamed for token in piece.tokens]

    # Told when an exchange has ended, which is after its last token is here.
    used = {report.endpoint for report in server.reports}
    assert tokens == [[[0, 7], [1, 7]]] * 100
    assert drawn == [0, 7]
    assert {"asample_many", "retrieve_results", "asample_stream"} <= used
