from __future__ import annotations

import gc
import platform
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import pytest

from tinsmith.client.samples.request_texts import (
    MOST_KEPT_SETTINGS,
    RequestTexts,
    early_text,
)
from tinsmith.types import (
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinsmith.types.buffers import Numbers
from tinsmith.wire import json_format, packed_format
from tinsmith.wire.protobuf import Parts

TOKENS = 8192


def a_request(prompt: ModelInput) -> SampleRequest:
    return SampleRequest(
        prompt=prompt, sampling_params=SamplingParams(max_tokens=1), sampling_session_id="s"
    )


def a_prompt(first: int = 1000) -> ModelInput:
    return ModelInput.from_ints(range(first, first + TOKENS))


def count_writing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the long arrays that are written from now on."""
    written: list[int] = []
    write = json_format.array_text

    def counted(numbers: Numbers) -> Parts:
        written.append(len(numbers))
        return write(numbers)

    monkeypatch.setattr(json_format, "array_text", counted)
    return written


def test_a_prompt_is_encoded_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, request = RequestTexts(), a_request(a_prompt())
    written = count_writing(monkeypatch)

    bodies = {b"".join(texts.encode(request)) for _ in range(3)}

    assert bodies == {json_format.encode(request)}
    assert written == [TOKENS, TOKENS]  # once for the three, and once to compare with


def test_another_prompt_is_encoded_separately() -> None:
    texts = RequestTexts()

    for first in (1000, 2000, 1000):
        request = a_request(a_prompt(first))
        assert b"".join(texts.encode(request)) == json_format.encode(request)


def test_the_cache_is_bounded_and_evicts_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [a_request(a_prompt(first)) for first in (1000, 2000, 1500)]
    size = 512 + max(len(json_format.encode(prompt)) for prompt in prompts)
    texts = RequestTexts(most_bytes=2 * size)
    for index in (0, 1, 0, 2):
        texts.encode(prompts[index])
    written = count_writing(monkeypatch)

    texts.encode(prompts[0])
    texts.encode(prompts[2])
    assert written == []
    texts.encode(prompts[1])

    assert written == [TOKENS]
    assert texts._kept_bytes <= 2 * size


def test_short_prompts_take_no_more_memory_than_long_ones() -> None:
    texts = RequestTexts(most_bytes=100_000)
    tracemalloc.start()
    try:
        for _ in range(2000):
            texts.encode(a_request(ModelInput.from_ints([1])))
        gc.collect()
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken_bytes < 300_000


def test_a_prompt_that_is_too_long_is_not_cached() -> None:
    texts, request = RequestTexts(most_bytes=1000), a_request(a_prompt())

    assert b"".join(texts.encode(request)) == json_format.encode(request)

    assert texts._kept == {}


def test_an_encoded_prompt_is_cached_no_longer_than_its_prompt_lives() -> None:
    texts = RequestTexts()
    tracemalloc.start()
    try:
        requests = [a_request(a_prompt(first)) for first in range(5)]
        text_bytes = sum(len(b"".join(texts.encode(request))) for request in requests)
        held_bytes, _ = tracemalloc.get_traced_memory()
        del requests
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held_bytes > text_bytes
    assert left_bytes < text_bytes / 5


def test_an_encoded_prompt_is_freed_with_its_prompt_on_any_thread() -> None:
    texts, prompts = RequestTexts(), [a_prompt(first) for first in range(5)]
    for prompt in prompts:
        texts.encode(a_request(prompt))
    del prompt

    dropping = threading.Thread(target=prompts.clear)
    dropping.start()
    dropping.join()

    assert all(kept.text.parts is None for kept in texts._kept.values())
    for first in range(50):  # what comes in the place of those that went
        request = a_request(a_prompt(first))
        assert b"".join(texts.encode(request)) == json_format.encode(request)
    assert texts._kept_bytes == sum(kept.size for kept in texts._kept.values())


def test_an_evicted_encoding_is_freed_immediately_while_its_prompt_lives() -> None:
    request, other = a_request(a_prompt()), a_request(a_prompt(2000))
    texts = RequestTexts(most_bytes=512 + len(json_format.encode(request)))
    gc.disable()
    tracemalloc.start()
    try:
        text_bytes = len(b"".join(texts.encode(request)))
        held_bytes, _ = tracemalloc.get_traced_memory()
        texts.encode(other)
        del texts
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()

    assert held_bytes > text_bytes
    assert left_bytes < text_bytes / 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_prompt_freed_at_the_recursion_limit_leaves_no_stale_encoding() -> None:
    """There Python cannot call what would drop the text, and the next prompt takes its place."""

    def forget_at_the_bottom(held: list[SampleRequest]) -> None:
        try:
            forget_at_the_bottom(held)
        except RecursionError:
            held.clear()

    texts = RequestTexts()
    for first in range(1000, 1050):
        held = [a_request(a_prompt(first))]
        texts.encode(held[0])
        forget_at_the_bottom(held)
        request = a_request(a_prompt(first + 500))

        assert b"".join(texts.encode(request)) == json_format.encode(request)

    assert texts._kept_bytes == sum(kept.size for kept in texts._kept.values())


def test_a_prompt_with_a_chunk_without_weakrefs_is_not_cached() -> None:
    texts, prompt = RequestTexts(), a_prompt()
    plain: Any = {"type": "encoded_text", "tokens": [5]}
    prompt.chunks.append(plain)
    request = a_request(prompt)

    first = b"".join(texts.encode(request))
    plain["tokens"] = [6]
    second = b"".join(texts.encode(request))

    assert (first.count(b"[5]"), second.count(b"[6]")) == (1, 1)
    assert (texts._kept, texts._kept_bytes) == ({}, 0)


BURST = """
import os
from pathlib import Path
from tinsmith.client.samples.request_texts import RequestTexts, early_text
from tinsmith.types import ModelInput, SampleRequest, SamplingParams

texts, ids = RequestTexts(), list(range(1000, 1000 + 32_768))

def burst(count):
    held = []
    for _ in range(count):
        prompt = ModelInput.from_ints(ids)
        params = SamplingParams(max_tokens=1)
        request = SampleRequest(prompt=prompt, sampling_params=params, sampling_session_id="s")
        held.append(request)
        texts.encode(request, early_text(prompt))

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

burst(10)
before = resident_pages()
burst(200)
print((resident_pages() - before) * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc",
    reason="other C libraries give memory back by other rules",
)
def test_memory_of_a_burst_of_prompts_is_freed() -> None:
    """27 MB of prompts; what is kept of their texts would keep nearly all of it resident."""
    run = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)

    assert int(run.stdout) < 9_000_000


def test_tensors_are_encoded_with_their_current_values() -> None:
    numpy = pytest.importorskip("numpy")
    texts, targets = RequestTexts(), numpy.zeros((TOKENS - 1, 1), dtype="int64")
    request = a_request(a_prompt()).model_copy(
        update={"target_prompt_logprobs": TensorData.from_numpy(targets)}
    )
    texts.encode(request)

    targets[:] = 7

    assert b"".join(texts.encode(request)) == json_format.encode(request)
    assert b"7,7,7" in json_format.encode(request)


def test_each_request_is_encoded_with_its_own_settings() -> None:
    texts, prompt = RequestTexts(), a_prompt()
    many = [
        a_request(prompt).model_copy(
            update={"num_samples": count, "sampling_params": SamplingParams(seed=seed, stop=stop)}
        )
        for count in (1, 2)
        for seed in (None, 0, 1)
        for stop in (None, "\n", '"prompt":{"chunks":[]}')
    ]

    for request in (*many, *many):
        assert b"".join(texts.encode(request)) == json_format.encode(request)

    assert len(texts._settings) <= MOST_KEPT_SETTINGS < len(many)


@pytest.mark.parametrize("chunks", [1, 2])
def test_packed_requests_are_the_same_with_cached_and_uncached_settings(chunks: int) -> None:
    texts, prompt = RequestTexts(), ModelInput([*a_prompt().chunks, EncodedTextChunk([1])][:chunks])
    one = a_request(prompt)
    other = one.model_copy(update={"sampling_params": SamplingParams(stop=["a"])})

    for request in (one, other, one, other):
        packed, whole = texts.pack(request), packed_format.encode(request)
        assert b"".join(packed.body()) == b"".join(whole.body())

    assert packed.arrays[0] is prompt.chunks[0].numbers.memory  # type: ignore[union-attr]


def test_a_list_in_the_settings_is_encoded_with_its_current_values() -> None:
    texts, params = RequestTexts(), SamplingParams(stop=["a"])
    request = a_request(a_prompt()).model_copy(update={"sampling_params": params})
    texts.encode(request)

    assert isinstance(params.stop, list)
    params.stop.append("b")

    assert b"".join(texts.encode(request)) == json_format.encode(request)
    assert b'["a","b"]' in json_format.encode(request)


def test_a_chunk_added_to_a_prompt_is_encoded() -> None:
    texts, prompt = RequestTexts(), ModelInput.from_ints([1, 2])
    request = a_request(prompt)
    texts.encode(request)

    prompt.chunks.append(EncodedTextChunk([3]))

    assert b"".join(texts.encode(request)) == json_format.encode(request)


# Prompts that are written when the sample is asked for


def from_list(values: list[Any]) -> ModelInput:
    """A prompt of a list, which is kept: an earlier one was asked for."""
    early_text(ModelInput.from_ints([0]))
    return ModelInput.from_ints(values)


def test_a_prompt_made_from_a_list_is_encoded_from_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = a_request(from_list(list(range(TOKENS))))
    written = count_writing(monkeypatch)

    body = b"".join(RequestTexts().encode(request, early_text(request.prompt)))

    assert written == []
    assert body == json_format.encode(request)


def test_an_early_encoding_serves_other_samples_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, request = RequestTexts(), a_request(from_list(list(range(TOKENS))))
    written = count_writing(monkeypatch)

    first = texts.encode(request, early_text(request.prompt))

    assert texts.encode(request, early_text(request.prompt)) == first
    assert written == []


def test_the_list_may_change_before_and_after_early_encoding() -> None:
    ids = list(range(TOKENS))
    request = a_request(from_list(ids))
    ids[0] = 9
    early = early_text(request.prompt)
    ids[1] = 9

    assert early is not None
    assert b"".join(RequestTexts().encode(request, early)) == json_format.encode(request)
    assert request.prompt.to_ints() == list(range(TOKENS))


def test_a_chunk_added_after_early_encoding_is_encoded() -> None:
    request = a_request(from_list([1, 2]))
    early = early_text(request.prompt)

    request.prompt.chunks.append(EncodedTextChunk([3]))
    assert b"".join(RequestTexts().encode(request, early)) == json_format.encode(request)
    request.prompt.chunks[:] = [EncodedTextChunk([3])]
    assert b"".join(RequestTexts().encode(request, early)) == json_format.encode(request)


@pytest.mark.parametrize("odd", [True, 3.0, -1])
def test_integer_like_token_ids_are_encoded_as_integers(odd: Any) -> None:
    request = a_request(from_list([1, odd]))
    early = early_text(request.prompt)

    assert early is None
    assert b'"tokens":[1,%d]' % int(odd) in b"".join(RequestTexts().encode(request, early))


def test_only_single_chunk_prompts_made_from_lists_are_encoded_early() -> None:
    text, image = EncodedTextChunk([1]), ImageChunk(data=b"x", format="png")

    for chunks in ([], [text, text], [image], [EncodedTextChunk(range(3))]):
        assert early_text(ModelInput(chunks)) is None
