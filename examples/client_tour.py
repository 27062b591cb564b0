"""A tour of the client: it trains, samples and streams in spite of injected faults.

The service is `tinsmith.testing`, which computes a formula instead of a neural network, so nothing
is learned. The client, the bytes, the sockets and the faults are real.
"""

from __future__ import annotations

import argparse

import tinsmith
from tinsmith.testing import ScriptedService, running_service

MODEL = "Qwen/Qwen3-8B"
PROMPT = tinsmith.ModelInput.from_ints([5, 6, 7])
PARAMS = tinsmith.SamplingParams(max_tokens=12, seed=1)


def main() -> None:
    """Run the tour."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        "The client against the test service (a formula, no neural network: nothing is learned)\n"
    )
    extensions = {
        "tinsmith_stream": True,
        "tinsmith_batch_items": 64,
        "tinsmith_inline_bytes": 4096,
    }
    with (
        running_service(long_poll_s=1.0, **extensions) as service,
        tinsmith.ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client(MODEL, rank=8)
        train(training, service)
        sampler = training.save_weights_and_get_sampling_client()
        sample(sampler, service)
        stream(sampler, service)
    ended = len(service.requests("finish_session"))
    print(f"Leaving the block ended the session, with {ended} request.")


def train(training: tinsmith.TrainingClient, service: ScriptedService) -> None:
    """Train three steps; the response to the second is lost after the work was done."""
    datum = tinsmith.Datum(PROMPT, {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]})
    service.faults.add(on="forward_backward", nth=2, lose_reply=True)
    print("1. Three training steps; the response to the second is lost")
    for number in range(1, 4):
        output = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        print(f"   step {number}: loss {output.result().loss:.4f}")
    numbers = [received.request.seq_id for received in service.requests("forward_backward")]
    print(f"   sequence numbers received: {numbers}: sent twice, run once\n")


def sample(sampler: tinsmith.SamplingClient, service: ScriptedService) -> None:
    """Sample many prompts; one gets a 429, which pauses all of them for a moment."""
    prompts = [tinsmith.ModelInput.from_ints([5, 6, number]) for number in range(500)]
    service.faults.add(on="asample", nth=100, status=429, headers={"retry-after-ms": "200"})
    responses = sampler.sample_many(prompts, PARAMS, progress=True)
    tokens = sum(len(sequence.tokens) for found in responses for sequence in found.sequences)
    requests = len(service.requests("asample_many")) + len(service.requests("asample"))
    print("2. 500 prompts; one request gets a 429")
    print(f"   {len(responses)} responses with {tokens:,} tokens, in order")
    print(f"   sent in {requests} requests, since the service accepts batches\n")


def stream(sampler: tinsmith.SamplingClient, service: ScriptedService) -> None:
    """Stream tokens over a connection that breaks midway."""
    service.faults.cut_stream(after_tokens=5)
    print("3. A stream of tokens; the connection breaks after five")
    events = sampler.sample_stream(PROMPT, 1, PARAMS)
    tokens = [token for event in events for token in event.tokens]
    response = events.result()
    connections = len(service.requests("asample_stream"))
    print(f"   {tokens}")
    print(
        f"   over {connections} connections; equal to the whole response: "
        f"{tokens == response.sequences[0].tokens}\n"
    )


if __name__ == "__main__":
    main()
