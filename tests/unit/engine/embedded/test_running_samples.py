"""Where sampled sequences end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.client.small_tokenizer import backend, write_tokenizer
from tinsmith.engine.embedded.running_samples import MOST_UNREAD, StopTextMatcher, stop_rule
from tinsmith.errors import ValidationError
from tinsmith.types.sampling import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _bytes(data: bytes) -> list[int]:
    """One token for each byte."""
    tokenizer, table = backend(), _byte_table()
    found = [tokenizer.token_to_id(table[byte]) for byte in data]
    return [one for one in found if one is not None]


def _byte_table() -> dict[int, str]:
    """How byte-level tokenizers write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    return table | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _read_until(
    folder: Path, stop: str | list[str | int], tokens: list[int], prompt: list[int]
) -> int:
    """How many tokens a sequence has when it ends; -1 if it does not."""
    rule = stop_rule(SamplingParams(stop=stop), (), folder)
    text = rule.follow(prompt)
    assert text is not None
    for count, token in enumerate(tokens, 1):
        if text.ends_with(token):
            return count
    return -1


def test_eos_tokens_apply_beside_other_stops_and_an_empty_list_disables_them() -> None:
    """Absent and empty differ, and nothing needs a tokenizer."""
    absent = stop_rule(SamplingParams(), (2, 5), None)
    empty = stop_rule(SamplingParams(stop=[]), (2, 5), None)
    given = stop_rule(SamplingParams(stop=[7]), (2, 5), None)

    assert [rule.token_ids for rule in (absent, empty, given)] == [{2, 5}, set(), {2, 5, 7}]
    assert absent.follow([1]) is empty.follow([1]) is given.follow([1]) is None


def test_stop_strings_without_a_tokenizer_are_rejected(tmp_path: Path) -> None:
    """The error says what to do instead."""
    for folder in (None, tmp_path):
        with pytest.raises(ValidationError, match="token ids"):
            stop_rule(SamplingParams(stop="x"), (), folder)


def test_a_stop_string_may_span_tokens(folder: Path) -> None:
    """The token that completes it is the last one."""
    tokens = _bytes(b"abcde")

    assert _read_until(folder, "bcd", tokens, []) == 4
    assert _read_until(folder, ["zz", "e", "cd"], tokens, []) == 4
    assert _read_until(folder, "bd", tokens, []) == -1


def test_a_stop_string_may_lie_within_a_token(folder: Path) -> None:
    """The token is not cut."""
    hello = backend().token_to_id("hello")
    assert hello is not None

    assert _read_until(folder, "ell", [*_bytes(b"a"), hello], []) == 2
    assert _read_until(folder, "ahe", [*_bytes(b"a"), hello], []) == 2


def test_a_character_split_over_several_tokens_counts_once_it_is_complete(folder: Path) -> None:
    """A stop may hold them, follow them and begin within the same token as their end."""
    tokens = _bytes("né€🙂!".encode())

    assert _read_until(folder, "é", tokens, []) == 3
    assert _read_until(folder, "€🙂", tokens, []) == 10
    assert _read_until(folder, "🙂!", tokens, []) == 11


def test_a_stop_string_may_not_begin_in_the_prompt_but_a_character_may(
    folder: Path,
) -> None:
    """A stop text is looked for in what was sampled."""
    euro = _bytes("€".encode())

    assert _read_until(folder, "€", euro[2:], _bytes(b"ab") + euro[:2]) == 1
    assert _read_until(folder, "abc", _bytes(b"cabc"), _bytes(b"ab")) == 4


def test_invalid_utf8_bytes_do_not_hide_a_stop_string(folder: Path) -> None:
    """And what is kept to read on stays small."""
    garbage = _bytes(b"\x80" * 500)
    tokens = [*garbage, *_bytes("€x".encode())]

    assert _read_until(folder, "€x", tokens, []) == 504
    assert _read_until(folder, "x", [*garbage, *_bytes(b"\xe2x")], []) == 502
    text = StopTextMatcher(backend(), ("zzz",), [])
    assert not any(map(text.ends_with, tokens))
    assert len(text._tokens) <= 2 * MOST_UNREAD


def test_a_special_token_matches_as_a_stop_string(folder: Path) -> None:
    """Templates end their turns with them."""
    eos = backend().token_to_id("<eos>")
    assert eos is not None

    assert _read_until(folder, "<eos>", [*_bytes(b"ab"), eos], []) == 3
    assert _read_until(folder, "<eos>", _bytes(b"a<eos>b"), []) == 6


def test_incremental_decoding_finds_the_same_stops_as_the_whole_text(folder: Path) -> None:
    """For every stop of a mixed text, the end is the first token with which the text holds it."""
    tokenizer = backend()
    tokens = tokenizer.encode("hello wörld 🙂 hello", add_special_tokens=False).ids
    whole = tokenizer.decode(tokens)
    stops = {whole[a:b] for a in range(len(whole)) for b in range(a + 1, min(a + 6, len(whole)))}

    for stop in stops:
        first = next(n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
        assert _read_until(folder, stop, tokens, []) == first, stop
