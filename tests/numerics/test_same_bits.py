"""What a work gives does not depend on what is beside it, in each type that can be computed in.

The model is small but for its inner layer: products with more than 1,024 inputs, and attention with
one key head, are where libraries choose by the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.numerics.sample_works import lora, prompt_of, run, work
from tests.numerics.small_models import make_model
from tests.numerics.training_works import a_pass, an_adapter, data_of, gradients_of, train
from tinsmith.engine.base import AdapterId, WeightsId
from tinsmith.engine.embedded.batched_sampler import BatchedSampler
from tinsmith.engine.embedded.model_loading import choose_dtypes
from tinsmith.engine.embedded.prefix_cache import CHUNK_TOKENS
from tinsmith.engine.model import kv_cache
from tinsmith.engine.model.kernels import library
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.types import SampleResponse

pytestmark = pytest.mark.usefixtures("threads")

COMPUTED = [*((heads, "kernels") for heads in "124"), ("1", "PyTorch"), ("4", "PyTorch")]
"""By how many key heads, and by what: there are no kernels where nobody could compile them."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if choose_dtypes(request.param, "cpu").computed != getattr(torch, request.param):
        pytest.skip("without hardware for bfloat16 nothing is computed in it")
    found: torch.dtype = getattr(torch, request.param)
    return found


@pytest.fixture(scope="module", params=COMPUTED, ids="-".join)
def model(
    request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Transformer]:
    folder = tmp_path_factory.mktemp("wide")
    key_heads, computed_by = request.param
    make_model(
        folder,
        hidden_size=256,
        intermediate_size=1536,
        head_dim=64,
        num_key_value_heads=int(key_heads),
    )
    with pytest.MonkeyPatch.context() as patch:
        if computed_by == "PyTorch":
            patch.setattr(library, "kernels", lambda: None)
        yield load_base_model(folder, dtype=dtype)


def _bits(response: SampleResponse) -> list[tuple[bytes, bytes]]:
    return [
        (one.tokens_np.tobytes(), one.logprobs_np.tobytes())
        for one in response.sequences
        if one.logprobs_np is not None
    ]


def test_samples_are_bit_identical_alone_and_batched(model: Transformer) -> None:
    """Lone tokens and many, with an adapter and without, one sequence and several."""
    works = [
        work(f"{length}-{weights}-{count}", prompt_of(length, length), weights, num_samples=count)
        for length in (1, 21, CHUNK_TOKENS + 20)
        for weights in (None, "w")
        for count in (1, 3)
    ]

    def sampler() -> BatchedSampler:
        made = BatchedSampler(model)
        made.add_weights(WeightsId("w"), lora(model, 1))
        return made

    together = run(sampler(), *works)

    for one in works:
        alone = run(sampler(), one)[one.work_id]
        assert _bits(together[one.work_id]) == _bits(alone), one.work_id


@pytest.mark.parametrize("length", [1, 5, 17, 100])
def test_passes_of_one_length_are_bit_identical_alone_and_batched(
    model: Transformer, length: int
) -> None:
    """Attention takes such sequences in one call, whoever they are of."""
    names = [AdapterId("a"), AdapterId("b")]
    works = [a_pass(data_of(length, seed=n), name, work_id=name) for n, name in enumerate(names)]
    together, alone = ([an_adapter(model, name) for name in names] for _ in range(2))

    results = train(model, works, *together)

    for n, one in enumerate(alone):
        assert train(model, [works[n]], one) == [results[n]]
        assert torch.equal(gradients_of(together[n]), gradients_of(one)), names[n]


def test_passes_of_many_adapters_are_bit_identical_alone_and_batched(model: Transformer) -> None:
    """Those that are alike are multiplied as one where they lie beside each other."""
    narrow = {"train_mlp": False}
    kinds: list[tuple[int, int, dict[str, bool]]] = [
        *[(8, 20, {})] * 3,
        *[(8, 20, narrow), (8, 20, {}), (8, 20, narrow)],
        *[(4, 20, {})] * 2,
        *[(8, 33, {})] * 2,
    ]
    names = [AdapterId(str(n)) for n in range(len(kinds))]
    works = [
        a_pass(data_of(length, seed=n), name, work_id=name)
        for n, (name, (_, length, _)) in enumerate(zip(names, kinds, strict=True))
    ]
    together, alone = (
        [
            an_adapter(model, name, rank=rank, seed=n, **layers)
            for n, (name, (rank, _, layers)) in enumerate(zip(names, kinds, strict=True))
        ]
        for _ in range(2)
    )

    results = train(model, works, *together)

    for n, one in enumerate(alone):
        assert train(model, [works[n]], one) == [results[n]]
        assert torch.equal(gradients_of(together[n]), gradients_of(one)), names[n]


@pytest.mark.parametrize("seen", [17, 130, 700])
def test_attention_to_a_shared_buffer_does_not_depend_on_how_many_share_it(
    dtype: torch.dtype, seen: int
) -> None:
    """With one key head, which leaves the kernel nothing else that threads could share."""
    chance = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 1, seen, 64, generator=chance).to(dtype) for _ in range(2))
    q_LHD = torch.randn(40, 4, 64, generator=chance).to(dtype)
    lone = [kv_cache._full_attention(q_LHD[n : n + 1], k, v, 0.125)[0] for n in range(40)]

    for rows in (2, 5, 9, 24, 40):
        found, _ = kv_cache._full_attention(q_LHD[:rows], k, v, 0.125)

        assert torch.equal(found, torch.cat(lone[:rows], 2)), rows
