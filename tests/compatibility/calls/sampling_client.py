"""How each public method of `SamplingClient` is called; the functions have the methods' names."""

from __future__ import annotations

from typing import Any

from tests.compatibility.caller import Caller, takes
from tests.compatibility.calls.queue_state import tell_queue_state
from tests.compatibility.calls.service_client import check_telemetry
from tests.compatibility.calls.training_client import check_sampler, check_tokenizer
from tests.compatibility.stage import BASE_MODEL, Stage


def sample(stage: Stage, call: Caller) -> None:
    check_answer(call(stage.sampler, stage.prompt, 2, stage.params))

    _check_rich(stage, call)


def _check_rich(stage: Stage, call: Caller) -> None:
    """With everything that the release lets be asked for."""
    answer = call(
        stage.sampler,
        stage.prompt,
        1,
        stage.params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=_targets(stage),
        prompt_alt_tokens_k=2,
    )

    assert answer.prompt_logprobs[0] is None and all(p < 0 for p in answer.prompt_logprobs[1:])
    assert len(answer.topk_prompt_logprobs) == 3
    method = call.of(stage.sampler)
    if takes(method, "topk_sample_logprobs"):
        drawn = answer.sequences[0]
        assert len(drawn.topk_logprobs) == len(drawn.tokens)
        assert answer.target_prompt_logprobs.shape == [2, 2]
    if takes(method, "prompt_alt_tokens_k"):
        assert answer.prompt_alt_tokens.tokens.shape == [2, 2]


def _targets(stage: Stage) -> Any:
    """Two tokens whose log-probability is asked for, at each position but the first."""
    tensor: Any = stage.types.TensorData
    return tensor(data=[4, 8, 4, 8], dtype="int64", shape=[2, 2])


def check_answer(answer: Any) -> None:
    assert len(answer.sequences) == 2
    for sequence in answer.sequences:
        assert 1 <= len(sequence.tokens) == len(sequence.logprobs) <= 4
        assert sequence.stop_reason in ("length", "stop")


def compute_logprobs(stage: Stage, call: Caller) -> None:
    logprobs = call(stage.base_sampler, stage.prompt)

    assert len(logprobs) == 3
    assert logprobs[0] is None and all(value < 0 for value in logprobs[1:])
    if takes(call.of(stage.base_sampler), "prompt_logprobs_last_n"):
        last = call(stage.base_sampler, stage.prompt, prompt_logprobs_last_n=1)
        assert last[-1] == logprobs[-1]


def create(stage: Stage, call: Caller) -> None:
    for where in ({"base_model": BASE_MODEL}, {"model_path": stage.sampler_weights}):
        check_sampler(stage, call(stage.sdk.SamplingClient, stage.trainer.holder, **where))


def get_sampler_handle(stage: Stage, call: Caller) -> None:
    handle = call(stage.sampler)

    assert isinstance(handle, str) and stage.api_key not in handle


def from_sampler_handle(stage: Stage, call: Caller) -> None:
    handle = stage.sampler.get_sampler_handle()

    check_sampler(stage, call(stage.sdk.SamplingClient, handle, api_key=stage.api_key))


def get_base_model(stage: Stage, call: Caller) -> None:
    assert call(stage.sampler) == BASE_MODEL
    assert call(stage.base_sampler) == BASE_MODEL


def get_tokenizer(stage: Stage, call: Caller) -> None:
    check_tokenizer(call(stage.sampler))


def get_telemetry(stage: Stage, call: Caller) -> None:
    check_telemetry(stage, call(stage.sampler))


def on_queue_state_change(stage: Stage, call: Caller) -> None:
    tell_queue_state(stage, call, stage.sampler)


# Of our client alone


def sample_many(stage: Stage, call: Caller) -> None:
    for answer in call(stage.sampler, [stage.prompt] * 3, stage.params, 2):
        check_answer(answer)


def sample_as_completed(stage: Stage, call: Caller) -> None:
    answers = dict(call(stage.sampler, [stage.prompt] * 3, stage.params, 2))

    assert sorted(answers) == [0, 1, 2]
    for answer in answers.values():
        check_answer(answer)


def sample_stream(stage: Stage, call: Caller) -> None:
    events = list(call(stage.sampler, stage.prompt, 2, stage.params))

    assert {event.index for event in events} == {0, 1}
    assert 2 <= sum(len(event.tokens) for event in events) <= 8


def open(stage: Stage, call: Caller) -> None:  # noqa: A001 - the method's name
    from tinsmith.client.background import background

    work = call.of(stage.sdk.SamplingClient)(stage.trainer.holder, base_model=BASE_MODEL)
    check_sampler(stage, background().start(work, "open", None).result())


def holder(stage: Stage, call: Caller) -> None:
    assert call(stage.sampler).get_session_id() == stage.session_id


def limiter(stage: Stage, call: Caller) -> None:
    assert call(stage.sampler).pause().state == "open"


def retry_budget(stage: Stage, call: Caller) -> None:
    assert call(stage.sampler).total_s > 0
