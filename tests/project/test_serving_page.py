"""The documented settings and metrics of a service are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinsmith.observe.metrics import FIGURES
from tinsmith.service.run.options import BY_NAME, OPTIONS
from tinsmith.service.run.service_settings import ServiceSettings, flat_settings
from tinsmith.service.run.settings_loading import check_start, load_settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def declared_names(owner: type[msgspec.Struct] = ServiceSettings, above: str = "") -> set[str]:
    """The dotted names of all settings."""
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
def test_the_documented_default_is_the_default(option: Any) -> None:
    default = flat_settings(load_settings(environment={}).settings, is_masked=False)[option.name]

    if option.name in ("data", "database", "checkpoints"):
        assert option.default.endswith(("~/.tinsmith", "in the data folder"))  # in words
    elif default is None:
        assert option.default == "not set"
    else:
        assert option.default == msgspec.json.encode(default).decode()


def test_flags_and_variables_are_unique() -> None:
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)


def test_the_documented_settings_files_are_valid(tmp_path: Path) -> None:
    shown = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.toml").write_text("".join(shown), encoding="utf-8")

    settings = load_settings(config=tmp_path / "serve.toml", environment={}).settings

    assert settings.limits.in_flight == 4096
    assert sum(one.count for one in settings.fleet) == 3
    check_start(settings)


def test_every_scheduler_statistic_is_a_metric() -> None:
    """Both those that it counts and those that it computes from its components."""
    folder = ROOT / "src" / "tinsmith" / "service" / "scheduler"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    counted = {
        name
        for call in re.findall(r"status\.count\((.*?)[,)]", source, re.DOTALL)
        for name in re.findall(r'"(\w+)"', call)
    }
    statistics = source.partition("def statistics(")[2].partition("        }\n")[0]
    read = set(re.findall(r'"(\w+)": ', statistics))

    assert len(counted) > 10
    assert "adapters" in read
    assert counted | read == set(FIGURES)
