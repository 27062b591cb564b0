from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.service.run.service_settings import ServiceSettings, TlsSettings
from tinsmith.service.run.settings_loading import (
    LoadedSettings,
    as_toml,
    check_certificate,
    check_start,
    load_settings,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_flags_override_the_environment_which_overrides_the_file(
    given: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    has_flag, has_variable, has_file = given
    flags = {"port": "1", "limits.rank": "11"} if has_flag else {}
    env = {"TINSMITH_SERVE_PORT": "2", "TINSMITH_SERVE_LIMITS_RANK": "12"} if has_variable else {}
    config = written(tmp_path, "port = 3\n[limits]\nrank = 13\n") if has_file else None

    loaded = load_settings(flags, config=config, environment=env)

    choices: list[tuple[bool, int, int, str]] = [
        (has_flag, 1, 11, "--port"),
        (has_variable, 2, 12, "TINSMITH_SERVE_PORT"),
        (has_file, 3, 13, str(config)),
        (True, 8000, 256, "default"),
    ]
    _, port, rank, source = next(choice for choice in choices if choice[0])
    assert (loaded.settings.port, loaded.settings.limits.rank) == (port, rank)
    assert loaded.sources["port"] == source


def test_each_setting_has_its_own_source(tmp_path: Path) -> None:
    config = written(tmp_path, 'host = "localhost"\n[log]\nlevel = "debug"\n')

    loaded = load_settings(
        {"port": 9}, config=config, environment={"TINSMITH_SERVE_LOG_FORMAT": "json"}
    )

    names = ("host", "port", "log.level", "log.format", "drain_s")
    sources = [str(config), "--port", str(config), "TINSMITH_SERVE_LOG_FORMAT", "default"]
    assert [loaded.sources[name] for name in names] == sources
    assert (loaded.settings.log.level, loaded.settings.log.format) == ("debug", "json")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    config = written(tmp_path, "port = 3")

    loaded = load_settings(environment={"TINSMITH_SERVE_CONFIG": str(config)})

    assert loaded.settings.port == 3


def test_a_list_is_taken_entirely_from_the_highest_source(tmp_path: Path) -> None:
    config = written(tmp_path, 'models = ["a=x", "b=y"]')
    env = {"TINSMITH_SERVE_MODELS": "c=z, d=w,"}

    assert load_settings(config=config, environment={}).settings.models == ("a=x", "b=y")
    assert load_settings(config=config, environment=env).settings.models == ("c=z", "d=w")
    flags = {"models": ["e=v"]}
    assert load_settings(flags, config=config, environment=env).settings.models == ("e=v",)


def test_the_data_folder_defaults_to_tinsmith_home(tmp_path: Path) -> None:
    home = {"TINSMITH_HOME": str(tmp_path)}

    loaded = load_settings(environment=home)
    other = load_settings(environment={**home, "TINSMITH_SERVE_DATA": str(tmp_path / "b")})

    assert (loaded.settings.data, loaded.sources["data"]) == (tmp_path, "TINSMITH_HOME")
    assert loaded.settings.checkpoints == str(tmp_path / "checkpoints")
    assert other.settings.data == tmp_path / "b"


def test_an_empty_variable_counts_as_not_set() -> None:
    loaded = load_settings(environment={"TINSMITH_SERVE_PORT": "", "TINSMITH_SERVE_CONFIG": ""})

    assert (loaded.settings.port, loaded.sources["port"]) == (8000, "default")


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("0", False), ("False", False), ("1", True)]
)
def test_text_values_are_parsed_by_type(text: str, expected: bool) -> None:
    env = {"TINSMITH_SERVE_METRICS": text, "TINSMITH_SERVE_DRAIN_S": "1e1"}

    settings = load_settings(environment=env).settings

    assert settings.metrics is expected
    assert settings.drain_s == 10.0


def test_an_unknown_name_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UnknownFieldError, match=r"'prot'.*did you mean port\?"):
        load_settings(config=written(tmp_path, "prot = 1"), environment={})
    with pytest.raises(UnknownFieldError, match=r"'limits\.ranks'.*did you mean limits\.rank\?"):
        load_settings(config=written(tmp_path, "[limits]\nranks = 1"), environment={})
    with pytest.raises(UnknownFieldError, match=r"'limit\.rank'|'limit'"):
        load_settings(config=written(tmp_path, "[limit]\nrank = 1"), environment={})
    with pytest.raises(UnknownFieldError, match="did you mean TINSMITH_SERVE_PORT"):
        load_settings(environment={"TINSMITH_SERVE_PROT": "1"})
    with pytest.raises(UnknownFieldError, match="did you mean limits"):
        load_settings({"limits.rnak": 1}, environment={})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "many"}, "--port: Expected `int`"),
        ({"port": "-1"}, "--port: "),
        ({"long_poll_s": "inf"}, "--long-poll-s"),
        ({"drain_s": "nan"}, "--drain-s"),
        ({"limits.rank": "1.5"}, "--limits-rank"),
        ({"metrics": "perhaps"}, "--metrics"),
        ({"engine": "steam"}, "expected embedded or fake"),
        ({"log.level": "loud"}, "debug or info"),
        ({"otel_endpoint": "collector:4318"}, "otel_endpoint"),
        ({"data": "a\0b"}, "--data"),
        ({"data": ""}, "--data"),
        ({"models": ["\ud800=x"]}, "a valid model name"),
    ],
)
def test_the_error_for_a_bad_value_names_its_source(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        load_settings(flags, environment={})

    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "port",
        "port = ",
        "\0",
        'port = "8000"',
        "limits = 3",
        "port = [1]",
        "[port]\nx = 1",
        "a." * 5000,
    ],
)
def test_the_error_names_a_bad_settings_file(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)

    with pytest.raises(ValidationError, match=r"serve\.toml"):
        load_settings(config=path, environment={})


def test_the_error_names_an_unreadable_settings_file(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'host = "\xe9"')
    (tmp_path / "large.toml").write_bytes(b"#" * (1024 * 1024 + 1))

    for name in ("none.toml", "latin.toml", "large.toml", ""):
        with pytest.raises(ValidationError, match=str(tmp_path / name)):
            load_settings(config=tmp_path / name, environment={})


def test_the_printed_settings_file_gives_the_same_settings(tmp_path: Path) -> None:
    first = load_settings(
        {"models": ["a=/x y", 'b="q"\x7f'], "unix_socket": "/run/ä"}, environment={}
    )

    again = load_settings(config=written(tmp_path, as_toml(first)), environment={})

    assert again.settings == first.settings


def test_the_printed_settings_name_their_sources_and_mask_passwords() -> None:
    env = {"TINSMITH_SERVE_DATABASE": "postgresql://me:hunter2@db/x"}

    text = as_toml(load_settings({"port": "1"}, environment=env))

    assert "port = 1  # --port\n" in text
    assert 'database = "postgresql://me:***@db/x"  # TINSMITH_SERVE_DATABASE\n' in text
    assert "hunter2" not in text
    assert "# unix_socket is not set\n" in text


def test_settings_and_their_sources_never_show_a_password() -> None:
    loaded = load_settings({"database": "postgresql://me:hunter2@db/x"}, environment={})

    assert isinstance(loaded, LoadedSettings)
    assert "hunter2" not in repr(loaded)


def test_startup_requires_a_model_and_all_named_files(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()

    check_start(ServiceSettings(models=("a=org/id", f"b={there}")))
    with pytest.raises(ValidationError, match="does not exist"):
        check_start(ServiceSettings(models=(f"a={tmp_path}/gone",)))
    tls = TlsSettings(cert=there, key=tmp_path / "gone")
    with pytest.raises(ValidationError, match=r"tls\.key"):
        check_start(ServiceSettings(tls=tls))
    with pytest.raises(ValidationError, match="no model is given"):
        check_start(ServiceSettings(engine="fake"))
    check_start(ServiceSettings())  # the embedded engine has a model to begin with


def test_a_certificate_is_verified_before_startup(tmp_path: Path) -> None:
    authority = trustme.CA()
    made, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    cert, key, wrong, locked = (tmp_path / name for name in ("cert", "key", "wrong", "locked"))
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    other.private_key_pem.write_to_path(wrong)
    loaded = load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        loaded.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a password")
        )
    )

    check_certificate(TlsSettings())
    check_certificate(TlsSettings(cert=cert, key=key))
    for unusable in (wrong, locked, cert):
        with pytest.raises(ValidationError, match="cannot be used with its key"):
            check_certificate(TlsSettings(cert=cert, key=unusable))
