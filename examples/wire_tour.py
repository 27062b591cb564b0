"""A tour of the wire formats: the API's types, and how they are encoded and decoded.

Needs no extras. Nothing is trained or sampled: the result is invented here, encoded as a server
does, and decoded as a client does.
"""

from __future__ import annotations

import argparse

import tinsmith
from tinsmith import errors
from tinsmith.types import ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.wire import content, exchange, failures, proto_samples
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoints import ENDPOINTS


def main() -> None:
    """Run the tour."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"tinsmith {tinsmith.__version__}: types and their bytes\n")
    training_request()
    sample_request()
    sample_result()
    refusals()
    print("Nothing was trained or sampled; examples/supervised.py does that.")


def training_request() -> None:
    """A training step as protobuf, which SDK 0.25 and later send."""
    tokens = list(range(1000, 33_768))
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 0], "weights": [1.0] * len(tokens)},
    )
    request = ForwardBackwardRequest(
        ForwardBackwardInput([datum], "cross_entropy"), "session:train:0", seq_id=1
    )
    sent = exchange.to_http(ENDPOINTS["forward_backward"], request)
    body = b"".join(sent.parts)
    packed = content.compress(sent.parts)
    headers = {"content-type": sent.headers["Content-Type"]}
    received = exchange.read_request(ENDPOINTS["forward_backward"], {}, {}, headers, body)

    print(f"1. A training step of {len(tokens):,} tokens")
    print(f"   {sent.method} {sent.path}  {sent.headers['Content-Type']}")
    print(f"   {len(body):,} bytes; {len(packed):,} with zstd")
    print(f"   decoded request equals the original: {received == request}\n")


def sample_request() -> None:
    """A sample request as JSON; fields that are None are omitted, defaults are not."""
    request = tinsmith.SampleRequest(
        prompt=tinsmith.ModelInput.from_ints([5, 6, 7]).append_int(8),
        sampling_params=tinsmith.SamplingParams(max_tokens=16, stop=["\n"]),
        sampling_session_id="session:sample:0",
        seq_id=0,
    )
    sent = exchange.to_http(ENDPOINTS["asample"], request)

    print("2. A sample request")
    print(f"   {sent.method} {sent.path}  {sent.headers['Content-Type']}")
    print(f"   {b''.join(sent.parts).decode()}\n")


def sample_result() -> None:
    """A result, whose numbers stay in the received body until they are read."""
    made_up = tinsmith.SampledSequence("stop", tokens=[42, 43, 44], logprobs=[-0.1, -2.5, -0.75])
    body = b"".join(proto_samples.encode_sample_response(tinsmith.SampleResponse([made_up])))
    result = proto_samples.decode_sample_response(body).with_sequence_ids(["session:sample:0:0"])
    sequence = result.sequences[0]

    print("3. A sampling result (invented; no model was used)")
    print(f"   {len(body)} bytes -> tokens {sequence.tokens}, logprobs {sequence.logprobs}")
    print(f"   stop reason {sequence.stop_reason!r}, id {sequence.sequence_id!r}\n")


def refusals() -> None:
    """Invalid input is refused immediately, with a message that names it."""
    print("4. Errors")
    try:
        tinsmith.SamplingParams(max_token=16)  # type: ignore[call-arg]
    except errors.ValidationError as error:
        print(f"   a typo:           {error}")
    bomb = content.compress([bytes(50_000_000)])
    try:
        content.decompress(bomb, "zstd", DecodeLimits(memory_bytes=1_000_000))
    except errors.BodyTooLargeError as error:
        print(f"   a {len(bomb):,}-byte bomb: {error}")
    body = b'{"detail": "too many samples"}'
    refusal = failures.error_from_reply(429, {"retry-after-ms": "1500"}, body)
    delay_s = refusal.retry_after_s
    print(f"   an error status:  {type(refusal).__name__}, retry after {delay_s} s\n")


if __name__ == "__main__":
    main()
