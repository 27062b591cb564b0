"""Lines that are wrong are refused before anything is sent: there is no service here."""

from __future__ import annotations

import pytest

from tinsmith.cli.main import main
from tinsmith.cli.parser import checkpoint_path
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath

PATH = "tinker://r/weights/a"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that cannot be reached: to try would end with 1."""
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--type", "sampler"],
        [PATH, "--run-id", "r"],
        [PATH, "--before", "2026-01-01"],
        ["tinker://r/weights"],
        [PATH, "tinker://r/colour/a"],
        ["--run-id", "r", "--type", "colour"],
    ],
)
def test_an_ambiguous_selection_deletes_nothing(words: list[str]) -> None:
    assert main(["checkpoint", "delete", "-y", *words]) == 2


@pytest.mark.parametrize("choice", [[], ["--ttl", "7200", "--remove"], ["--ttl", "0"]])
def test_set_ttl_requires_exactly_one_option(choice: list[str]) -> None:
    assert main(["checkpoint", "set-ttl", PATH, *choice]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["hello"],
        ["hello", "--base-model", "m", "--model-path", "tinker://r/sampler_weights/a"],
        ["hello", "--model-path", "m"],
        ["hello", "--base-model", "m", "-n", "0"],
        ["hello", "--base-model", "m", "-n", "2", "--stream"],
        ["", "--base-model", "m"],
    ],
)
def test_a_sample_needs_a_prompt_and_exactly_one_model_source(words: list[str]) -> None:
    assert main(["sample", *words]) == 2


@pytest.mark.parametrize("verb", ["info", "publish", "unpublish", "download", "push-hf"])
@pytest.mark.parametrize("path", ["weights/a", "tinker://r", "tinker://r/colour/a", f"{PATH}/b"])
def test_a_checkpoint_is_named_by_its_full_path(verb: str, path: str) -> None:
    assert main(["checkpoint", verb, path]) == 2


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_accepted_paths_match_the_path_type(kind: str) -> None:
    path = f"tinker://r/{kind}/a"

    assert checkpoint_path(path) == ParsedCheckpointTinkerPath.from_tinker_path(path).tinker_path


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("serve --prot 80", "--port"),
        ("run list --formt=json", "--format"),
        ("chekpoint list", "checkpoint"),
        ("run lst", "list"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "serve --prot 80",
        "serve --port",
        "run list --nothing",
        "run lst",
        "checkpoint info x",
        "fly",
    ],
)
def test_a_usage_error_is_one_line_that_points_to_the_help(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage with all flags of `serve` was 25 lines, with the mistake below them."""
    assert main(line.split()) == 2

    told, hint = capsys.readouterr().err.splitlines()
    assert told.startswith("tinsmith: ")
    noun = "" if line == "fly" else " " + line.split(maxsplit=1)[0]
    assert hint.startswith(f"  run `tinsmith{noun}")
    assert hint.endswith(" --help` for usage")
