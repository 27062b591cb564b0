"""Numpy and torch are the caller's to bring: without them everything works but what returns them.

Each case runs in an interpreter of its own, where importing them fails.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
for name in ("numpy", "torch", "orjson"):
    sys.modules[name] = None
"""
USE_EVERYTHING = """
import copy, pickle
import tinsmith
from tinsmith import types as t
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.wire import json_format, proto_format as pf, proto_samples as ps

sparse = t.TensorData([1.5], "float32", [1, 3], [0, 1], [2])
datum = t.Datum(
    t.ModelInput.from_ints([1]).append_int(4),
    {"target_tokens": [[2, 3], [4, 5]], "weights": [0.5, 1.0], "advantages": sparse},
)
request = ForwardBackwardRequest(t.ForwardBackwardInput([datum] * 2, "ppo"), "m", 1)
body = b"".join(pf.encode_forward_backward_request(request))
again = pf.decode_forward_backward_request(body)
assert again == request
inputs = again.forward_backward_input.data[0].loss_fn_inputs
assert inputs["target_tokens"].tolist() == [[2, 3], [4, 5]]
assert inputs["advantages"].tolist() == [[0, 0, 1.5]]
assert json_format.decode(json_format.encode(request), ForwardBackwardRequest) == request
assert pickle.loads(pickle.dumps(datum)) == copy.deepcopy(datum) == datum

topk = t.TopkLogprobs([[1, 2]], [[-1.0, -2.0]])
response = t.SampleResponse(
    [t.SampledSequence("stop", tokens=[1], logprobs=[-1.0], topk_logprobs_np=topk)],
    prompt_logprobs=[None, -1.0],
)
response = ps.decode_sample_response(b"".join(ps.encode_sample_response(response)))
assert response.sequences[0].tokens == [1]
assert response.sequences[0].topk_logprobs == [[(1, -1.0), (2, -2.0)]]
assert response.prompt_logprobs == [None, -1.0]

output = t.ForwardBackwardOutput("ArrayRecord", [{"logprobs": t.TensorData([-1.0], "float32")}])
output = pf.decode_forward_backward_output(b"".join(pf.encode_forward_backward_output(output)))
assert output.loss_fn_outputs[0]["logprobs"].data == [-1.0]
repr((request, response, output, datum))
"""
ASK_FOR = """
from tinsmith import types as t
tensor = t.TensorData([1.5], "float32", [1, 3], [0, 1], [2])
dense = t.TensorData([1.5], "float32")
sequence = t.SampledSequence("stop", tokens=[1], logprobs=[-1.0])
topk = t.TopkLogprobs([[1]], [[-1.0]])
try:
    {call}
except ImportError as error:
    print(error)
"""


def run(program: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", *options, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_is_built_encoded_and_decoded_without_numpy_and_torch() -> None:
    run(BLOCK + USE_EVERYTHING)


@pytest.mark.parametrize(
    "call",
    [
        "tensor.to_numpy()",
        "dense.to_numpy()",
        "sequence.tokens_np",
        "sequence.logprobs_np",
        "topk.token_ids",
    ],
)
def test_asking_for_an_array_without_numpy_says_how_to_install_it(call: str) -> None:
    shown = run(BLOCK + ASK_FOR.format(call=call))

    assert 'pip install "tinsmith[numpy]"' in shown


def test_asking_for_a_tensor_without_torch_says_how_to_install_it() -> None:
    shown = run(
        "import sys; sys.modules['torch'] = None\n" + ASK_FOR.format(call="dense.to_torch()")
    )

    assert "pip install torch" in shown


REFUSED_WHEN_OPTIMISED = """
from tinsmith import types as t
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.wire import json_format, proto_format as pf, proto_samples as ps

span = t.PromptProvenanceSpan(sequence_id="a", length=1)
wrong = [
    lambda: t.Datum(t.ModelInput.empty(), {}, [span]),
    lambda: t.Datum(t.ModelInput.from_ints([1, 2])).with_provenance([span], [span]),
    lambda: t.TensorData([1], "int64", [2]),
    lambda: t.TensorData([1], "int64", [1, 1], [0, 1], [5]),
    lambda: t.EncodedTextChunk("text"),
    lambda: t.SamplingParams(max_token=1),
    lambda: t.SampledSequence("eos"),
    lambda: json_format.decode(b"{", t.Cursor),
    lambda: ps.decode_sample_response(b"\\x0a\\x05"),
    lambda: pf.decode_forward_backward_request(b"\\x1a\\x02\\x0a\\x00"),
]
for act in wrong:
    try:
        act()
    except (DecodeError, ValidationError):
        continue
    raise SystemExit(f"{act} was taken")
"""


def test_input_is_validated_when_python_is_optimised_too() -> None:
    """`assert` is gone under -O, so none may guard what comes from outside."""
    run(REFUSED_WHEN_OPTIMISED, "-O")
    run(BLOCK + USE_EVERYTHING, "-O")
