from __future__ import annotations

import gc
import tracemalloc

import pytest

from tinsmith.client.samples.request_texts import MOST_KEPT_SETTINGS, RequestTexts
from tinsmith.types import EncodedTextChunk, ModelInput, SampleRequest, SamplingParams, TensorData
from tinsmith.types.buffers import Numbers
from tinsmith.wire import json_format
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


def test_a_prompt_is_written_once_for_all_samples_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, request = RequestTexts(), a_request(a_prompt())
    written = count_writing(monkeypatch)

    bodies = {b"".join(texts.encode(request)) for _ in range(3)}

    assert bodies == {json_format.encode(request)}
    assert written == [TOKENS, TOKENS]  # once for the three, and once to compare with


def test_another_prompt_has_its_own_text() -> None:
    texts = RequestTexts()

    for first in (1000, 2000, 1000):
        request = a_request(a_prompt(first))
        assert b"".join(texts.encode(request)) == json_format.encode(request)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(
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


def test_a_prompt_that_is_too_long_is_not_kept() -> None:
    texts, request = RequestTexts(most_bytes=1000), a_request(a_prompt())

    assert b"".join(texts.encode(request)) == json_format.encode(request)

    assert texts._kept == {}


def test_tensors_are_written_as_they_are_now() -> None:
    numpy = pytest.importorskip("numpy")
    texts, targets = RequestTexts(), numpy.zeros((TOKENS - 1, 1), dtype="int64")
    request = a_request(a_prompt()).model_copy(
        update={"target_prompt_logprobs": TensorData.from_numpy(targets)}
    )
    texts.encode(request)

    targets[:] = 7

    assert b"".join(texts.encode(request)) == json_format.encode(request)
    assert b"7,7,7" in json_format.encode(request)


def test_each_request_is_written_with_its_own_settings() -> None:
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


def test_a_list_in_the_settings_is_written_as_it_is_now() -> None:
    texts, params = RequestTexts(), SamplingParams(stop=["a"])
    request = a_request(a_prompt()).model_copy(update={"sampling_params": params})
    texts.encode(request)

    assert isinstance(params.stop, list)
    params.stop.append("b")

    assert b"".join(texts.encode(request)) == json_format.encode(request)
    assert b'["a","b"]' in json_format.encode(request)


def test_a_chunk_that_is_added_to_a_prompt_is_written() -> None:
    texts, prompt = RequestTexts(), ModelInput.from_ints([1, 2])
    request = a_request(prompt)
    texts.encode(request)

    prompt.chunks.append(EncodedTextChunk([3]))

    assert b"".join(texts.encode(request)) == json_format.encode(request)
