from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.registry import ModelSource
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.service.ledger.records import Retention
from tinsmith.service.run.service_settings import Limits, ServiceSettings, TlsSettings, masked
from tinsmith.service.run.settings_loading import check_start

PASSWORD = "hunter2"


def test_database_and_checkpoints_default_to_the_data_folder(tmp_path: Path) -> None:
    settings = ServiceSettings(data=tmp_path / "a b")

    assert settings.database == f"sqlite://{tmp_path}/a%20b/ledger"
    assert settings.checkpoints == str(tmp_path / "a b" / "checkpoints")


def test_values_are_validated_on_construction() -> None:
    with pytest.raises(ValidationError, match="port"):
        ServiceSettings(port=70000)
    with pytest.raises(ValidationError, match="rank"):
        Limits(rank=0)
    with pytest.raises(ValidationError, match=r"retention\.result_s"):
        ServiceSettings(retention=Retention(result_s=float("nan")))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ServiceSettings().port = 1  # type: ignore[misc]


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ValidationError, match=r"tls\.key is missing"):
        TlsSettings(cert=Path("/cert.pem"))
    with pytest.raises(ValidationError, match=r"tls\.cert is missing"):
        TlsSettings(key=Path("/key.pem"))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"postgresql://me:{PASSWORD}@db/x", "postgresql://me:***@db/x"),
        (f"postgresql://me@db/x?password={PASSWORD}", "postgresql://me@db/x?password=***"),
        (f"postgresql://me:a@b:{PASSWORD}@db/x", "postgresql://me:***@db/x"),
        (f"https://{PASSWORD}@collector/v1", "https://***@collector/v1"),
        (f"https://collector/v1#{PASSWORD}", "https://collector/v1#***"),
        (f"s3://bucket/x?{PASSWORD}", "s3://bucket/x?***"),
        (f"https://[{PASSWORD}/x", "***"),
        (f"postgresql:me:{PASSWORD}@db/x", "postgresql:***"),
        (f"postgresql:///me:{PASSWORD}@db/x", "postgresql://***"),
        ("sqlite:///a/b", "sqlite:///a/b"),
        ("/var/lib/tinsmith", "/var/lib/tinsmith"),
        ("memory:", "memory:"),
    ],
)
def test_a_displayed_url_has_no_password(address: str, shown: str) -> None:
    assert masked(address) == shown
    assert PASSWORD not in shown


def test_no_representation_of_the_settings_shows_a_password() -> None:
    address = f"postgresql://me:{PASSWORD}@db/x"
    settings = ServiceSettings(database=address, otel_endpoint=f"https://x:{PASSWORD}@y/")

    shown = [repr(settings), str(settings), f"{settings}", repr(settings.__rich_repr__())]

    assert not [text for text in shown if PASSWORD in text]
    assert settings.database == address
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize("address", [f"host=db password={PASSWORD}", f"mysql://me:{PASSWORD}@db"])
def test_the_error_for_an_invalid_database_url_does_not_show_it(address: str) -> None:
    with pytest.raises(ValidationError, match="not a supported scheme") as caught:
        ServiceSettings(database=address)

    assert PASSWORD not in str(caught.value)


def test_models_have_names_aliases_and_suffixes() -> None:
    settings = ServiceSettings(
        models=("Qwen/Qwen3-8B:tiny=/m/tiny", "Qwen/Qwen3-8B = /m/tiny", "org/other")
    )

    assert settings.served_models == [
        ModelSource("Qwen/Qwen3-8B:tiny", "/m/tiny"),
        ModelSource("Qwen/Qwen3-8B", "/m/tiny", alias_of="Qwen/Qwen3-8B:tiny"),
        ModelSource("org/other", "org/other"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=path",
        "../up=x",
        "a/../b=x",
        "a/./b=x",
        "/abs=x",
        "a//b=x",
        "a b=x",
        "a\nb=x",
        "\x1b[31m=x",
        "a::b=x",
        "a:=x",
        "näme=x",
        "a=x\0y",
        "n" * 201 + "=x",
    ],
)
def test_a_hostile_model_name_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError, match="model") as caught:
        ServiceSettings(models=(text,))

    assert str(caught.value).isprintable()


def test_a_name_may_belong_to_only_one_model() -> None:
    with pytest.raises(ValidationError, match="given twice"):
        ServiceSettings(models=("a=x", "a=y"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ServiceSettings(), True),
        (ServiceSettings(host="localhost"), True),
        (ServiceSettings(host="::1"), True),
        (ServiceSettings(host="127.8.0.1"), True),
        (ServiceSettings(host="0.0.0.0", unix_socket=Path("/run/x")), True),
        (ServiceSettings(host="0.0.0.0"), False),
        (ServiceSettings(host="::"), False),
        (ServiceSettings(host="127.evil.example"), False),
        (ServiceSettings(host="127.0.0.1.evil.example"), False),
        (ServiceSettings(host="localhost.evil.example"), False),
    ],
)
def test_loopback_addresses_are_recognized(settings: ServiceSettings, expected: bool) -> None:
    assert settings.is_loopback is expected


@pytest.mark.parametrize("host", ["", "a b", "a/b", "http://x", "a\n", "[::1]", "x" * 254])
def test_an_invalid_host_is_rejected(host: str) -> None:
    with pytest.raises(ValidationError, match="host"):
        ServiceSettings(host=host)


def test_unknown_fields_raise_our_validation_error() -> None:
    assert issubclass(UnknownFieldError, ValidationError)


def test_the_tokenizer_of_a_model_folder_is_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients load its tokenizer from there, and may have been started elsewhere."""
    monkeypatch.chdir(tmp_path)

    [model] = ServiceSettings(models=("a=./tiny",)).served_models

    assert model.tokenizer_id == str(tmp_path / "tiny")


@pytest.mark.parametrize("role", ["api", "scheduler"])
@pytest.mark.parametrize(
    ("database", "checkpoints", "why"),
    [
        ("", "s3://bucket", "needs a database that all servers share, and sqlite: is one"),
        ("memory:", "s3://bucket", "needs a database that all servers share"),
        ("postgresql://db/x", "", "is a folder of this machine"),
        ("postgresql://db/x", "/mnt/shared", "is a folder of this machine"),
    ],
)
def test_a_role_needs_what_all_servers_share(
    role: Any, database: str, checkpoints: str, why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        ServiceSettings(role=role, database=database, checkpoints=checkpoints)


@pytest.mark.parametrize("checkpoints", ["s3://bucket/folder", "file:///mnt/shared"])
def test_a_role_takes_a_shared_store(checkpoints: str) -> None:
    settings = ServiceSettings(role="api", database="postgresql://db/x", checkpoints=checkpoints)

    check_start(settings)  # without a model: the scheduler has them
