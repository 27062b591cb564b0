"""`tinsmith sample`: text in, text out."""

from __future__ import annotations

import os
import pathlib
import pty
from collections.abc import Iterator

import pytest

from tests.integration.cli.command import TIME_LIMIT_S, Commands
from tests.unit.client.small_tokenizer import write_tokenizer
from tinsmith.client.service import ServiceClient
from tinsmith.client.tokenization.tokenizer import Tokenizer
from tinsmith.testing import ScriptedService, running_service


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    """A folder with a tokenizer."""
    return str(write_tokenizer(tmp_path / "model"))


@pytest.fixture
def model() -> str:
    return "test/model"


@pytest.fixture
def service(model: str, folder: str) -> Iterator[ScriptedService]:
    """A service that streams, whose tokens are those of our small tokenizer."""
    with running_service(
        long_poll_s=0.5,
        vocabulary_size=263,
        tinsmith_stream=True,
        base_models=[f"{model}={folder}", "nobody/nothing"],
    ) as service:
        yield service


@pytest.fixture
def tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.from_pretrained(folder)


def asked_tokens(service: ScriptedService, endpoint: str = "asample") -> list[int]:
    (asked,) = service.requests(endpoint)
    return [token for chunk in asked.request.prompt.chunks for token in chunk.tokens]


def test_a_prompt_is_completed(
    tinsmith: Commands, service: ScriptedService, model: str, tokenizer: Tokenizer
) -> None:
    words = ("sample", "hello world", "--base-model", model, "--max-tokens", "8", "--seed", "3")

    plain = tinsmith.run(*words, "-f", "json")
    assert asked_tokens(service) == tokenizer.encode("hello world")
    shown = tinsmith.run(*words)

    assert plain.status == 0, plain.err
    (sequence,) = plain.json["sequences"]
    assert plain.json["prompt_tokens"] == tokenizer.encode("hello world")
    assert sequence["text"] == tokenizer.decode(sequence["tokens"], skip_special_tokens=True)
    assert len(sequence["logprobs"]) == len(sequence["tokens"]) <= 8
    assert sequence["stop_reason"] in ("length", "stop")
    assert sequence["sequence_id"]
    assert plain.json["prompt_cache_hit_tokens"] == 0
    # Reading in text mode makes line ends of what the model may well have drawn.
    assert shown.out == sequence["text"].replace("\r\n", "\n").replace("\r", "\n") + "\n"


@pytest.mark.parametrize("words", [(), ("-",)])
def test_the_text_may_come_from_stdin(
    tinsmith: Commands,
    service: ScriptedService,
    model: str,
    tokenizer: Tokenizer,
    words: tuple[str, ...],
) -> None:
    ended = tinsmith.run("sample", *words, "--base-model", model, text="hello world")

    assert ended.status == 0, ended.err
    assert asked_tokens(service) == tokenizer.encode("hello world")


def test_options_reach_the_service(
    tinsmith: Commands, service: ScriptedService, model: str
) -> None:
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 11 --stop a --stop b"

    ended = tinsmith.run("sample", "hello", "--base-model", model, "-n", "2", *options.split())

    (asked,) = service.requests("asample")
    params = asked.request.sampling_params
    assert ended.status == 0, ended.err
    assert asked.request.num_samples == 2
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 0.9)
    assert (params.top_k, params.seed, params.stop) == (7, 11, ["a", "b"])
    assert ended.out.startswith("--- 1 of 2\n")
    assert "\n--- 2 of 2\n" in ended.out


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_chat_uses_the_chat_template_of_the_model(
    tinsmith: Commands,
    service: ScriptedService,
    model: str,
    tokenizer: Tokenizer,
    system: str | None,
) -> None:
    words = ["--chat"] if system is None else ["--system", system]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "hello"})

    ended = tinsmith.run("sample", "hello", "--base-model", model, *words)

    assert ended.status == 0, ended.err
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert asked_tokens(service) == expected


@pytest.mark.parametrize("seed", ["1", "5", "6"])
def test_a_stream_gives_the_same_text_as_a_sample(
    tinsmith: Commands, service: ScriptedService, model: str, seed: str
) -> None:
    words = ("sample", "hello", "--base-model", model, "--max-tokens", "90", "--seed", seed)

    streamed = tinsmith.run(*words, "--stream")
    whole = tinsmith.run(*words)

    assert streamed.status == 0, streamed.err
    assert streamed.out == whole.out
    assert len(service.requests("asample_stream")) == 1
    assert len(service.requests("asample")) == 1


def test_a_stream_shows_tokens_before_the_last_one_is_sampled(
    tinsmith: Commands, service: ScriptedService, model: str
) -> None:
    hold = service.faults.hold_stream(after_tokens=10)
    words = ("sample", "hello", "--base-model", model, "--max-tokens", "40", "--stop", "no such")
    # The first byte may be a part of a character.
    process = tinsmith.start(*words, "--stream", "--seed", "5", errors="replace")
    assert process.stdout is not None

    first = os.read(process.stdout.fileno(), 1)
    hold.release()
    rest, err = process.communicate(timeout=TIME_LIMIT_S)

    assert process.returncode == 0, err
    assert first
    assert rest


def test_without_streaming_the_text_is_printed_at_the_end(
    tmp_path: pathlib.Path, model: str, folder: str
) -> None:
    with running_service(vocabulary_size=263, base_models=[f"{model}={folder}"]) as service:
        tinsmith = Commands(service, tmp_path)

        ended = tinsmith.run("sample", "hello", "--base-model", model, "--stream")

    assert ended.status == 0, ended.err
    assert ended.out.strip()


def test_a_checkpoint_can_be_sampled_from(
    tinsmith: Commands, service: ScriptedService, model: str
) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        training = client.create_lora_training_client(model, rank=4)
        path = training.save_weights_for_sampler("drawn").result().path
        ended = tinsmith.run("sample", "hello", "--model-path", path)

    assert ended.status == 0, ended.err
    created = service.requests("create_sampling_session")
    assert [asked.request.model_path for asked in created] == [path]


def test_the_session_is_finished(tinsmith: Commands, service: ScriptedService, model: str) -> None:
    tinsmith.run("sample", "hello", "--base-model", model)

    reasons = [type(asked.request.reason).__name__ for asked in service.requests("finish_session")]
    assert reasons == ["ClientSessionFinishSuccess"]


def test_ctrl_c_finishes_the_session_as_interrupted(
    tinsmith: Commands, service: ScriptedService, model: str
) -> None:
    hold = service.faults.hold_commands(on="asample")
    process = tinsmith.start("sample", "hello", "--base-model", model)
    hold.wait_held(1)

    ended = tinsmith.interrupted(process)

    assert (ended.status, ended.out) == (130, "")
    reasons = [type(asked.request.reason).__name__ for asked in service.requests("finish_session")]
    assert reasons == ["ClientSessionFinishInterrupted"]


def test_a_prompt_that_is_not_valid_text_is_rejected(
    tinsmith: Commands, service: ScriptedService
) -> None:
    ended = tinsmith.run(*("sample", "--base-model", "m"), text="caf\xe9", encoding="latin-1")

    assert ended.status == 2
    assert "not valid UTF-8" in ended.err
    assert service.requests() == []


def test_unencodable_characters_are_escaped_on_an_ascii_terminal(
    tinsmith: Commands, model: str
) -> None:
    words = ("sample", "hello", "--base-model", model, "--max-tokens", "40", "--seed", "5")

    ended = tinsmith.run(*words, environment={"PYTHONIOENCODING": "ascii"})

    assert ended.status == 0, ended.err
    assert "\\ufffd" in ended.out


def test_invalid_option_values_are_reported(tinsmith: Commands, model: str) -> None:
    ended = tinsmith.run("sample", "hello", "--base-model", model, "--temperature", "nan")

    assert ended.status == 1
    assert "temperature" in ended.err
    assert "Traceback" not in ended.err


def test_the_error_names_a_model_without_a_tokenizer(
    tinsmith: Commands, tmp_path: pathlib.Path
) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    ended = tinsmith.run(
        "sample", "hello", "--base-model", "nobody/nothing", "-f", "json", environment=offline
    )

    assert ended.status == 1
    assert ended.error["type"] == "TokenizerError"
    assert "nobody/nothing" in ended.error["message"]


def test_sampled_text_cannot_inject_terminal_escapes(
    tinsmith: Commands, service: ScriptedService, model: str, tokenizer: Tokenizer
) -> None:
    escape = tokenizer.encode("\x1b", add_special_tokens=False)[0]
    leader, follower = pty.openpty()
    process = tinsmith.start(
        *("sample", "hello", "--base-model", model, "--max-tokens", "200", "--seed", "1"),
        *("--stop", "no such text"),
        stdout=follower,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 10_000):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    process.communicate(timeout=TIME_LIMIT_S)
    os.close(leader)

    assert process.returncode == 0
    assert escape < service.settings.vocabulary_size
    assert b"\x1b" not in shown
