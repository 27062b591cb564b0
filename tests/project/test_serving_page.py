"""What is said of the settings and figures of a service is what the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinsmith.observe.metrics import FIGURES
from tinsmith.serve.loading import check_start, load_settings
from tinsmith.serve.options import BY_NAME, OPTIONS
from tinsmith.serve.settings import ServiceSettings, flat_settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def declared_names(owner: type[msgspec.Struct] = ServiceSettings, above: str = "") -> set[str]:
    """The dotted names of all fields, sections opened."""
    names: set[str] = set()
    for field in msgspec.structs.fields(owner):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            names |= declared_names(field.type, f"{above}{field.name}.")
        else:
            names.add(above + field.name)
    return names


def test_every_setting_is_an_option_and_every_option_a_setting() -> None:
    assert set(BY_NAME) == declared_names()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_default_that_is_told_is_the_default(option: Any) -> None:
    default = flat_settings(load_settings(environment={}).settings, is_masked=False)[option.name]

    if option.name in ("data", "database", "checkpoints"):
        assert option.default.startswith(("TINSMITH_HOME", "the folder"))  # told in words
    elif default is None:
        assert option.default == "not set"
    else:
        assert option.default == msgspec.json.encode(default).decode()


def test_flags_and_variables_are_unlike_each_other() -> None:
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)


def test_the_file_that_is_shown_can_be_used(tmp_path: Path) -> None:
    [shown] = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.toml").write_text(shown, encoding="utf-8")

    settings = load_settings(config=tmp_path / "serve.toml", environment={}).settings

    assert settings.limits.in_flight == 4096
    check_start(settings)


def test_every_figure_of_the_scheduler_is_a_metric() -> None:
    """Those that it counts, by its source, and those that it reads off its parts."""
    folder = ROOT / "src" / "tinsmith" / "scheduler"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    counted = {
        name
        for call in re.findall(r"statistics\.count\((.*?)[,)]", source, re.DOTALL)
        for name in re.findall(r'"(\w+)"', call)
    }
    statistics = source.partition("def statistics(")[2].partition("        }\n")[0]
    read = set(re.findall(r'"(\w+)": ', statistics))

    assert len(counted) > 10
    assert "adapters" in read
    assert counted | read == set(FIGURES)
