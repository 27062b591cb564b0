"""Every loss against its formula, written out plainly and differentiated by autograd."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.client.dispatch import join_metrics
from tinsmith.engine.fake.losses import datum_loss
from tinsmith.engine.model.losses import Loss, TokenLoss, make_loss
from tinsmith.errors import ValidationError
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.tensors import TensorData

Inputs = dict[str, TensorData]
SAMPLED_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]
ALL_LOSSES = ["cross_entropy", *SAMPLED_LOSSES]
CONFIGS: dict[str, dict[str, float | str]] = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "stable_reinforce": {
        "kl_coeff": 0.2,
        "clip_low_threshold": 0.6,
        "clip_high_threshold": 1.7,
    },
}


def inputs(**given: Any) -> Inputs:
    return Datum.received(ModelInput.from_ints([1]), given).loss_fn_inputs


def some_data(seed: int = 0, sizes: tuple[int, ...] = (5, 1, 9)) -> tuple[list[Inputs], Tensor]:
    """Data with every input that a loss reads, and log-probabilities of their targets."""
    chance = torch.Generator().manual_seed(seed)
    data = []
    for size in sizes:
        advantages = torch.randn(size, generator=chance)
        advantages[torch.rand(size, generator=chance) < 0.2] = 0.0
        data.append(
            inputs(
                target_tokens=torch.randint(0, 50, (size,), generator=chance),
                weights=torch.rand(size, generator=chance),
                logprobs=-3 * torch.rand(size, generator=chance),
                advantages=advantages,
            )
        )
    lp = torch.cat([one["logprobs"].to_torch() for one in data])
    lp = lp + 0.5 * torch.randn(len(lp), generator=chance)
    return data, lp


def slopes_of(loss: Loss, lp: Tensor) -> Tensor:
    return torch.cat(
        [loss.datum_gradients(i, lp[span]) for i, span in enumerate(loss.targets.spans)]
    )


# The formulas


def plain_loss(name: str, lp: Tensor, one: Inputs, config: dict[str, Any]) -> Any:
    """The loss of one datum as the documentation has it."""
    if name == "cross_entropy":
        return -(one["weights"].to_torch().double() * lp).sum()
    q, a = one["logprobs"].to_torch().double(), one["advantages"].to_torch().double()
    r = torch.exp(lp - q)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -torch.minimum(r * a, r.clamp(low, high) * a).sum()
    if name == "cispo":
        return -(r.clamp(low, high).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    if name == "stable_reinforce":
        penalty = 0.5 * config["kl_coeff"] * (lp - q) ** 2
        return (-r.clamp(low, high) * a + penalty).sum()
    assert name == "gspo"
    counted = a != 0
    if not counted.any():
        return 0.0 * lp.sum()
    s = torch.exp((lp - q)[counted].mean())
    return -torch.minimum(s * a, s.clamp(low, high) * a).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_the_loss_and_its_gradients_are_those_of_the_formula(name: str, seed: int) -> None:
    data, lp = some_data(seed)
    config = CONFIGS.get(name, {})
    loss = make_loss(name, config, data)
    leaf = lp.double().requires_grad_()
    pieces = [plain_loss(name, leaf[span], one, config) for span, one in spans(loss, data)]
    expected = sum(pieces)
    [expected_slopes] = torch.autograd.grad(expected, leaf)

    found = loss.evaluate(lp)

    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert found.metrics["loss:sum"] == found.loss
    torch.testing.assert_close(slopes_of(loss, lp), expected_slopes.float(), rtol=1e-6, atol=1e-7)


def spans(loss: Loss, data: list[Inputs]) -> list[tuple[slice, Inputs]]:
    return list(zip(loss.targets.spans, data, strict=True))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0), ("gspo", 0.8, 1.2)]
)
def test_thresholds_have_the_documented_defaults(name: str, low: float, high: float) -> None:
    data, lp = some_data()
    said = {"clip_low_threshold": low, "clip_high_threshold": high}

    assert make_loss(name, {}, data).evaluate(lp) == make_loss(name, said, data).evaluate(lp)


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_gradients_are_differences_of_the_loss(name: str) -> None:
    """By nudging each log-probability; cispo is left out, whose ratio is not differentiated."""
    data, lp = some_data(7)
    loss = make_loss(name, CONFIGS.get(name, {}), data)
    if name == "cispo":
        expected = -make_ratio(data, lp).clamp(0.5, 1.5) * joined(data, "advantages")
        torch.testing.assert_close(slopes_of(loss, lp), expected)
        return
    nudge = 1e-5
    found = slopes_of(loss, lp)
    for cell in range(len(lp)):
        step = torch.zeros(len(lp), dtype=torch.float64)
        step[cell] = nudge
        up, down = loss.evaluate(lp.double() + step), loss.evaluate(lp.double() - step)
        assert float(found[cell]) == pytest.approx((up.loss - down.loss) / (2 * nudge), abs=1e-5)


def make_ratio(data: list[Inputs], lp: Tensor) -> Tensor:
    return torch.exp(lp - joined(data, "logprobs"))


def joined(data: list[Inputs], name: str) -> Tensor:
    return torch.cat([one[name].to_torch() for one in data])


# Sequences


def test_gspo_equals_gspo_token_if_the_advantages_of_a_sequence_are_equal() -> None:
    """GSPO-token: the ratio is not differentiated, and each token pulls by itself."""
    q, lp = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.7, -0.6])
    one = inputs(target_tokens=[1, 2, 3], logprobs=q, advantages=[0.7] * 3)
    leaf = lp.double().requires_grad_()
    s = torch.exp((leaf - q).mean()).detach() * torch.exp(leaf - leaf.detach())
    expected = -torch.minimum(s * 0.7, s.clamp(0.8, 1.2) * 0.7).sum()
    [gradients] = torch.autograd.grad(expected, leaf)

    loss = make_loss("gspo", {}, [one])

    assert loss.evaluate(lp).loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(loss.datum_gradients(0, lp), gradients.float())


def test_the_mask_selects_the_tokens_of_the_sequence_ratio() -> None:
    q, lp = torch.tensor([-9.0, -2.0, -0.5]), torch.tensor([-0.1, -1.9, -0.6])
    given: dict[str, Any] = {"target_tokens": [1, 2, 3], "logprobs": q, "advantages": [1.0] * 3}
    one = inputs(**given, sequence_ratio_mask=[0.0, 1.0, 1.0])

    loss = make_loss("gspo", {}, [one])

    assert loss.evaluate(lp).loss == pytest.approx(-3 * math.exp((0.1 - 0.1) / 2), rel=1e-6)
    assert loss.datum_gradients(0, lp)[0] == 0
    assert loss.evaluate(lp).loss != make_loss("gspo", {}, [inputs(**given)]).evaluate(lp).loss


@pytest.mark.parametrize("unit", [0.01, 7.0])
def test_the_mask_weights_the_mean(unit: float) -> None:
    """In whatever unit they are given: also where they add up to less than 1."""
    q, lp = torch.tensor([-1.1, -2.0, -0.5]), torch.tensor([-1.0, -1.9, -0.6])
    given: dict[str, Any] = {"target_tokens": [1, 2, 3], "logprobs": q, "advantages": [1.0] * 3}
    one = make_loss("gspo", {}, [inputs(**given, sequence_ratio_mask=[1.0, 2.0, 1.0])])

    mask = [unit, 2 * unit, unit]
    loss = make_loss("gspo", {}, [inputs(**given, sequence_ratio_mask=mask)])

    assert loss.evaluate(lp).loss == pytest.approx(one.evaluate(lp).loss, rel=1e-6)
    torch.testing.assert_close(loss.datum_gradients(0, lp), one.datum_gradients(0, lp))


def test_a_mask_may_be_given_for_only_some_data() -> None:
    data, lp = some_data()
    data[0] = {**data[0], "sequence_ratio_mask": TensorData([1.0] * 5, "float32")}

    together = make_loss("gspo", {}, data)
    alone = make_loss("gspo", {}, data[1:])

    assert torch.equal(slopes_of(together, lp)[5:], slopes_of(alone, lp[5:]))


def test_gspo_gives_gradients_a_datum_at_a_time() -> None:
    data, _ = some_data()

    assert not isinstance(make_loss("gspo", {}, data), TokenLoss)


# Inputs


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo", "stable_reinforce"])
def test_thresholds_may_be_given_for_each_token(name: str) -> None:
    data, lp = some_data()
    spread = [
        {
            **one,
            "clip_low_threshold": TensorData([0.9] * len(one["weights"].data), "float32"),
            "clip_high_threshold": TensorData([1.05] * len(one["weights"].data), "float32"),
        }
        for one in data
    ]
    low, high = (float(torch.tensor(bound)) for bound in (0.9, 1.05))  # as float32 has them

    by_token = make_loss(name, {"clip_low_threshold": 0.1}, spread)
    by_config = make_loss(name, {"clip_low_threshold": low, "clip_high_threshold": high}, data)

    assert by_token.evaluate(lp) == by_config.evaluate(lp)
    assert by_token.evaluate(lp) != make_loss(name, {}, data).evaluate(lp)


def test_targets_with_several_columns_and_sparse_ones_are_the_same_cells() -> None:
    rows = {"sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [0, 0, 1]}
    sparse = {
        "target_tokens": TensorData([2, 3, 4], "int64", [2, 2], **rows),
        "weights": TensorData([1.0, 1.0, 2.0], "float32", [2, 2], **rows),
    }
    dense = inputs(target_tokens=[[2, 0], [3, 4]], weights=[[1.0, 0.0], [1.0, 2.0]])
    lp = torch.tensor([-1.0, -9.0, -2.0, -3.0])

    first, second = (
        make_loss("cross_entropy", {}, [sparse]),
        make_loss("cross_entropy", {}, [dense]),
    )

    assert first.targets.tokens[0].tolist() == [[2, 0], [3, 4]]
    assert first.evaluate(lp) == second.evaluate(lp)
    assert first.evaluate(lp).loss == 1.0 + 2.0 + 6.0
    assert first.datum_gradients(0, lp.reshape(2, 2)).tolist() == [[-1.0, 0.0], [-1.0, -2.0]]


GOOD = inputs(
    target_tokens=[1, 2], weights=[1.0, 1.0], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0]
)


@pytest.mark.parametrize(
    ("name", "bad", "config", "match"),
    [
        ("no_such", GOOD, {}, "no_such"),
        ("ppo", {**GOOD, "target_tokens": None}, {}, "target_tokens"),
        ("cross_entropy", {**GOOD, "weights": None}, {}, "weights"),
        ("ppo", {**GOOD, "advantages": None}, {}, "advantages"),
        ("dro", {**GOOD, "logprobs": None}, {}, "logprobs"),
        ("ppo", {**GOOD, "logprobs": TensorData([1.0], "float32")}, {}, "logprobs"),
        ("gspo", {**GOOD, "sequence_ratio_mask": TensorData([1.0], "float32")}, {}, "ratio_mask"),
        ("ppo", {**GOOD, "clip_low_threshold": TensorData([1.0], "float32")}, {}, "clip_low"),
        ("ppo", {**GOOD, "advantages": TensorData([1.0, math.nan], "float32")}, {}, "advantages"),
        ("cispo", {**GOOD, "logprobs": TensorData([1.0, math.inf], "float32")}, {}, "logprobs"),
        ("ppo", {**GOOD, "target_tokens": TensorData([1.0, 2], "float32")}, {}, "int64"),
        ("ppo", {**GOOD, "target_tokens": TensorData([1, 2], "int64", [2, 1, 1])}, {}, "shape"),
        ("ppo", GOOD, {"clip_low_threshold": "low"}, "clip_low_threshold"),
        ("dro", GOOD, {"beta": math.nan}, "beta"),
    ],
)
def test_the_error_names_an_invalid_loss_input(
    name: str, bad: dict[str, Any], config: dict[str, Any], match: str
) -> None:
    second = {key: tensor for key, tensor in bad.items() if tensor is not None}

    with pytest.raises(ValidationError, match=match) as raised:
        make_loss(name, config, [GOOD, second])

    assert config or name == "no_such" or "datum 1" in str(raised.value)


def test_targets_must_have_one_entry_per_position() -> None:
    make_loss("ppo", {}, [GOOD], lengths=[2])

    with pytest.raises(ValidationError, match="3 input tokens"):
        make_loss("ppo", {}, [GOOD], lengths=[3])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}),
        ("ppo", {"clip_high_threshold": 0.2}),
        ("gspo", {"clip_high_threshold": 0.0004}),
    ],
)
def test_clip_thresholds_that_exclude_every_ratio_are_rejected(
    name: str, config: dict[str, float]
) -> None:
    """Such as those of who takes them for distances from 1."""
    with pytest.raises(ValidationError, match=r"clip_low_threshold is .* bound the ratio itself"):
        make_loss(name, config, [GOOD])


def test_empty_data_is_rejected() -> None:
    with pytest.raises(ValidationError, match="no data"):
        make_loss("gspo", {}, [])


# Numbers that are not finite


@pytest.mark.parametrize("name", ALL_LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_not_finite_fail_the_work_item(name: str, bad: float) -> None:
    data, lp = some_data()
    lp[3] = bad
    loss = make_loss(name, {}, data)

    with pytest.raises(ValidationError, match="log-probabilities are not finite"):
        loss.evaluate(lp)

    assert slopes_of(loss, lp).isfinite().all(), "others in the pack would be spoilt"


def test_gradients_beyond_float32_fail_the_work() -> None:
    one = inputs(target_tokens=[1], logprobs=[-500.0], advantages=[1e30])
    loss = make_loss("importance_sampling", {}, [one])

    with pytest.raises(ValidationError, match="gradient"):
        loss.evaluate(torch.tensor([-1.0]))

    assert loss.datum_gradients(0, torch.tensor([-1.0])).tolist() == [0.0]


@pytest.mark.parametrize("name", SAMPLED_LOSSES)
def test_a_huge_ratio_with_zero_advantage_does_not_affect_the_rest(name: str) -> None:
    one = inputs(target_tokens=[1, 2], logprobs=[-5000.0, -1.0], advantages=[0.0, 1.0])

    found = make_loss(name, {"beta": 0.0}, [one]).evaluate(torch.tensor([-1.0, -1.0]))

    assert found.loss == pytest.approx(1.0 if name in ("cispo", "dro") else -1.0)


# The other engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_the_fake_engine_computes_the_same_loss(name: str, seed: int) -> None:
    """So that a program that was tried on it meets the same formulas."""
    data, lp = some_data(seed)
    for config in ({}, CONFIGS.get(name, {})):
        loss = make_loss(name, config, data)
        theirs = [
            datum_loss(
                name,
                lp[span].double().numpy(),
                Datum.received(ModelInput.from_ints([1]), one),
                config,
            )
            for span, one in spans(loss, data)
        ]

        assert loss.evaluate(lp).loss == pytest.approx(sum(one for one, _ in theirs), rel=1e-9)
        gradients = torch.cat([torch.from_numpy(of_datum) for _, of_datum in theirs])
        torch.testing.assert_close(slopes_of(loss, lp), gradients.float())


# Slices and chunks


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 40), max_size=6), data=st.data())
@settings(max_examples=40)
def test_gradients_do_not_depend_on_how_cells_are_sliced(
    seed: int, cuts: list[int], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([one for one in ALL_LOSSES if one != "gspo"]))
    batch, lp = some_data(seed, sizes=(17, 3, 21))
    loss = make_loss(name, CONFIGS.get(name, {}), batch)
    assert isinstance(loss, TokenLoss)
    whole = loss.gradients(slice(None), lp)
    edges = [0, *sorted(cuts), len(lp)]

    sliced = [
        loss.gradients(slice(start, end), lp[start:end]) for start, end in itertools.pairwise(edges)
    ]

    assert torch.equal(torch.cat(sliced), whole)
    shuffled = torch.randperm(len(lp), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(loss.gradients(shuffled, lp[shuffled]), whole[shuffled])


@given(seed=st.integers(0, 1000), first=st.integers(1, 3), name=st.sampled_from(ALL_LOSSES))
@settings(max_examples=40)
def test_metrics_of_chunks_join_to_those_of_the_whole_batch(
    seed: int, first: int, name: str
) -> None:
    sizes = (6, 2, 11, 4)
    data, lp = some_data(seed, sizes)
    edge = sum(sizes[:first])

    whole = make_loss(name, {}, data).evaluate(lp).metrics
    chunks = [
        make_loss(name, {}, data[:first]).evaluate(lp[:edge]).metrics,
        make_loss(name, {}, data[first:]).evaluate(lp[edge:]).metrics,
    ]

    assert join_metrics(chunks, [first, 4 - first]) == pytest.approx(whole, rel=1e-9)
    assert all(key.count(":") == 1 for key in whole)


def test_metrics_measure_the_divergence_from_the_sampling_policy() -> None:
    one = inputs(target_tokens=[1, 2, 3], logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 1.0, -1.0])
    lp = torch.tensor([-7.0, -1.0 + math.log(2.0), -2.0 + math.log(0.5)])

    metrics = make_loss("ppo", {}, [one]).evaluate(lp).metrics

    assert metrics == pytest.approx(
        {
            "loss:sum": -1.2 + 0.8,
            "tinsmith/tokens:sum": 3,
            "tinsmith/weighted_tokens:sum": 2,
            "tinsmith/nll:sum": 3.0,
            "tinsmith/ratio:mean": 1.25,
            "tinsmith/ratio:max": 2.0,
            "tinsmith/ratio:min": 0.5,
            "tinsmith/kl:mean": 0.0,
            "tinsmith/clip_fraction:mean": 1.0,
        },
        abs=1e-6,
    )


def test_data_without_advantages_have_metrics_too() -> None:
    one = inputs(target_tokens=[1], logprobs=[-1.0], advantages=[0.0])

    for name in SAMPLED_LOSSES:
        metrics = make_loss(name, {}, [one]).evaluate(torch.tensor([-1.0])).metrics

        assert metrics["tinsmith/weighted_tokens:sum"] == 0
        assert (
            metrics["tinsmith/ratio:mean"]
            == metrics["tinsmith/ratio:max"]
            == metrics["tinsmith/ratio:min"]
            == 1.0
        )


def test_the_total_does_not_depend_on_the_number_of_threads() -> None:
    size = 200_000
    one = inputs(target_tokens=torch.zeros(size, dtype=torch.int64), weights=torch.rand(size))
    lp = -torch.rand(size)
    loss = make_loss("cross_entropy", {}, [one])
    threads = torch.get_num_threads()
    found = set()

    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(loss.evaluate(lp).metrics["loss:sum"])
    finally:
        torch.set_num_threads(threads)

    assert len(found) == 1
