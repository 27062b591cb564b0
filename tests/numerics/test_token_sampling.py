"""Drawing tokens, against the slow and obvious way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinsmith.engine.model import token_sampling
from tinsmith.engine.model.token_sampling import (
    Drawn,
    DrawSettings,
    draw,
    draw_many,
    logsumexp,
    stream_key,
    top_logprobs,
    uniform_numbers,
)

pytestmark = pytest.mark.usefixtures("computed_by")

SETTINGS = [
    DrawSettings(),
    DrawSettings(temperature=0.0),
    DrawSettings(temperature=0.7),
    DrawSettings(temperature=1.6),
    DrawSettings(top_k=5),
    DrawSettings(top_p=0.6),
    DrawSettings(temperature=0.9, top_k=9, top_p=0.8),
    DrawSettings(temperature=1.4, top_p=0.999),
]


def _logits(rows: int, vocabulary: int = 300, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * scale


def _chances(rows: int, stream: str = "s") -> Tensor:
    return uniform_numbers([stream_key("seed", stream)] * rows, range(rows))


def _draws(logits_V: Tensor, settings: DrawSettings, count: int) -> Tensor:
    """Many tokens from one row."""
    rows = logits_V.expand(count, -1)
    return draw(rows, [settings] * count, _chances(count)).tokens


def _allowed(logits_V: Tensor, settings: DrawSettings) -> Tensor:
    """The probability of each token by the definition: temperature, then top-k, then top-p."""
    shares = (logits_V.double() / settings.temperature).softmax(-1)
    order = shares.argsort(descending=True)
    kept = order[: settings.top_k] if settings.top_k > 0 else order
    total = shares[kept].sum()
    before = shares[kept].cumsum(0) - shares[kept]
    kept = kept[before < settings.top_p * total]
    found = torch.zeros_like(shares)
    found[kept] = shares[kept] / shares[kept].sum()
    return found


def test_random_numbers_are_uniform_and_uncorrelated_between_streams() -> None:
    """By the chi-square of a hundred bins, and by correlation."""
    one, other = _chances(100_000, "1"), _chances(100_000, "2")

    for numbers in (one, other):
        counts = torch.histc(numbers.float(), 100, 0, 1)
        assert ((counts - 1000) ** 2 / 1000).sum() < 160  # 99 degrees: 1 in 10,000
        assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 0.015
    assert len(set(one.tolist()) | set(other.tolist())) == 200_000


def test_a_random_number_depends_only_on_its_stream_and_position() -> None:
    """It is the same whatever was asked for before or beside it."""
    keys = [stream_key("7", "0"), stream_key("7", "1"), stream_key("8", "0")]

    together = uniform_numbers(keys * 2, [3, 3, 3, 9, 9, 9])

    alone = [float(uniform_numbers([key], [place])) for place in (3, 9) for key in keys]
    assert together.tolist() == alone
    assert len(set(alone)) == 6


@pytest.mark.parametrize("settings", [s for s in SETTINGS if not s.is_greedy])
def test_token_frequencies_match_the_softmax(settings: DrawSettings) -> None:
    """Chi-square over tokens that are expected five times or more, the others together."""
    logits_V, count = _logits(1, scale=1.5)[0], 20_000
    expected = _allowed(logits_V, settings) * count

    seen = torch.bincount(_draws(logits_V, settings, count), minlength=len(logits_V)).double()

    assert (seen[expected == 0] == 0).all()  # limits are kept
    often = expected >= 5
    bins = [(seen[often], expected[often]), (seen[~often].sum(), expected[~often].sum())]
    squares = sum(float(((s - e) ** 2 / e.clamp(min=1)).sum()) for s, e in bins)
    degrees = int(often.sum())
    assert squares < degrees + 4.5 * (2 * degrees) ** 0.5 + 10


def test_temperature_0_selects_the_likeliest_token() -> None:
    """Whatever the filters; near 0 it does too, and no temperature breaks a draw."""
    logits_RV = _logits(20)
    best = logits_RV.argmax(-1)

    for settings in (DrawSettings(0.0), DrawSettings(0.0, 3, 0.5), DrawSettings(1e-300)):
        assert draw(logits_RV, [settings] * 20, _chances(20)).tokens.equal(best)
    hot = draw(logits_RV, [DrawSettings(1e300)] * 20, _chances(20))
    assert hot.logprobs.isfinite().all()
    assert (hot.tokens != best).sum() > 15


def test_logprobs_are_computed_at_temperature_1() -> None:
    """For every kind of draw; so are the likeliest ones' and those of alternatives."""
    logits_RV = _logits(len(SETTINGS))
    wanted_RV = logits_RV.double().log_softmax(-1)

    drawn = draw(logits_RV, SETTINGS, _chances(len(SETTINGS)))
    best, logprobs_RK = top_logprobs(logits_RV, drawn.logsumexp, 4)
    others_RK, other_logprobs_RK = draw_many(logits_RV, 1.7, torch.rand(len(SETTINGS), 6).double())

    _close(drawn.logprobs, wanted_RV.gather(-1, drawn.tokens[:, None])[:, 0])
    _close(logprobs_RK, wanted_RV.topk(4).values)
    assert best.equal(wanted_RV.topk(4).indices)
    _close(other_logprobs_RK, wanted_RV.gather(-1, others_RK))
    assert logsumexp(logits_RV).equal(drawn.logsumexp)


def _close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("vocabulary", [5, 300, 1024, 4099])
def test_a_row_is_sampled_the_same_alone_and_in_a_batch(vocabulary: int) -> None:
    """Bit for bit, in every place and with rows of all settings beside it."""
    count = 3 * len(SETTINGS)
    logits_RV, rows_chances = _logits(count, vocabulary), _chances(count)
    settings = [SETTINGS[row % len(SETTINGS)] for row in range(count)]

    together = draw(logits_RV, settings, rows_chances)

    for row in range(count):
        alone = draw(logits_RV[row : row + 1].clone(), [settings[row]], rows_chances[row : row + 1])
        _same(alone, together, row)
    order = torch.randperm(count)
    shuffled = draw(logits_RV[order], [settings[row] for row in order], rows_chances[order])
    for place, row in enumerate(order.tolist()):
        _same(Drawn(*(part[place : place + 1] for part in shuffled)), together, row)


def _same(alone: Drawn, together: Drawn, row: int) -> None:
    for one, all_of_them in zip(alone, together, strict=True):
        assert one[0].item() == all_of_them[row].item()


def test_the_slice_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worked on at a time is a matter of speed."""
    logits_RV, rows_chances = _logits(len(SETTINGS)), _chances(len(SETTINGS))
    whole = draw(logits_RV, SETTINGS, rows_chances)
    many = draw_many(logits_RV, 0.8, rows_chances[:, None])

    monkeypatch.setattr(token_sampling, "SLICE_NUMBERS", 3 * 300)

    assert all(map(torch.equal, draw(logits_RV, SETTINGS, rows_chances), whole))
    assert all(map(torch.equal, draw_many(logits_RV, 0.8, rows_chances[:, None]), many))


def test_the_nucleus_does_not_depend_on_the_first_guess_of_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first guess at its size decides nothing."""
    logits_RV, rows_chances = _logits(40, 1000, scale=1.0), _chances(40)
    settings = [DrawSettings(top_p=0.1 + 0.02 * row) for row in range(40)]
    expected = draw(logits_RV, settings, rows_chances).tokens

    monkeypatch.setattr(token_sampling, "NUCLEUS_GUESS", 3)

    assert draw(logits_RV, settings, rows_chances).tokens.equal(expected)


def test_extreme_random_numbers_select_tokens_with_nonzero_probability() -> None:
    """0 and the last number below 1, where most tokens have no share at all."""
    ends = torch.tensor([0.0, 1 - 2.0**-53] * len(SETTINGS), dtype=torch.float64)
    settings = [one for one in SETTINGS for _ in range(2)]
    logits_RV = torch.full((len(settings), 600), -torch.inf)
    logits_RV[:, [3, 255, 256, 511]] = torch.tensor([0.5, 0.1, 0.2, 0.3])

    drawn = draw(logits_RV, settings, ends)

    assert set(drawn.tokens.tolist()) <= {3, 255, 256, 511}
    assert drawn.logprobs.isfinite().all()
    assert drawn.tokens[:2].tolist() == [3, 511]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_nan_reports_it_and_affects_no_other(bad: float) -> None:
    """Its log-probability is NaN and its token some id."""
    count = len(SETTINGS)
    logits_RV = _logits(2 * count)
    good = draw(logits_RV, SETTINGS * 2, _chances(2 * count))

    logits_RV[:count, 7] = bad
    drawn = draw(logits_RV, SETTINGS * 2, _chances(2 * count))

    assert drawn.logprobs[:count].isnan().all()
    assert ((drawn.tokens >= 0) & (drawn.tokens < 300)).all()
    assert drawn.logprobs[count:].equal(good.logprobs[count:])


def test_alternative_token_frequencies_match_the_tempered_softmax() -> None:
    """They are drawn with replacement; greedy ones are all the same."""
    logits_V = _logits(1, 40, scale=1.0)
    many = _chances(20_000)[None]
    expected = _allowed(logits_V[0], DrawSettings(temperature=1.5)) * 20_000

    tokens_RK, _ = draw_many(logits_V, 1.5, many)
    greedy_RK, _ = draw_many(logits_V, 0.0, many)

    seen = torch.bincount(tokens_RK[0], minlength=40)
    assert ((seen - expected) ** 2 / expected).sum() < 39 + 4.5 * 78**0.5
    assert set(greedy_RK[0].tolist()) == {int(logits_V.argmax())}


def test_the_same_seed_gives_the_same_tokens_on_any_machine() -> None:
    """The keys and numbers of streams are pinned: results that were kept depend on them."""
    key = stream_key("7", "0")
    numbers = uniform_numbers([key] * 3, [0, 1, 2**40]).tolist()

    assert key == PINNED_KEY
    assert numbers == PINNED_NUMBERS


PINNED_KEY = 14254637482812893
PINNED_NUMBERS = [0.5379803953500976, 0.922665884017329, 0.7117187267724862]
