"""Loads the settings: defaults, then a TOML file, then the environment, then flags.

It remembers where each value came from. An unknown name is refused wherever it occurs, with the
closest known one as a hint.
"""

from __future__ import annotations

import difflib
import os
import ssl
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tinsmith.engine.fleet.replica_settings import as_text, read_replica
from tinsmith.engine.registry import check_device, check_installed
from tinsmith.errors import UnknownFieldError, ValidationError, shown
from tinsmith.service.run.options import (
    BY_NAME,
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    HOME_VARIABLE,
    OPTIONS,
)
from tinsmith.service.run.service_settings import (
    ServiceSettings,
    TlsSettings,
    default_data,
    fitted,
    flat_settings,
)

LARGEST_FILE_BYTES = 1024 * 1024


class LoadedSettings(msgspec.Struct, frozen=True):
    """Settings, and where each of them came from."""

    settings: ServiceSettings
    sources: dict[str, str]
    """By dotted name: `default`, `--port`, `TINSMITH_SERVE_PORT`, or the file."""


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Load the settings; flags override the environment, which overrides the file.

    A list, such as the models, is taken whole from the first of these that has it.

    Args:
        flags: Values by dotted name, as text or of their type; None counts as not given.
        config: The file; else the one in `TINSMITH_SERVE_CONFIG`, else none.
        environment: What stands for the environment; the process's own by default. A variable
            that is empty counts as not set.

    Raises:
        UnknownFieldError: There is no setting of that name.
        ValidationError: A value does not fit; the message says where it was given.
    """
    env = os.environ if environment is None else environment
    values: dict[str, Any] = {"data": default_data(env)}
    sources = dict.fromkeys(BY_NAME, "default")
    if env.get(HOME_VARIABLE):
        sources["data"] = HOME_VARIABLE
    path = config or env.get(CONFIG_VARIABLE) or None
    for found in (
        {} if path is None else _from_file(Path(path).expanduser()),
        _from_environment(env),
        _from_flags(flags or {}),
    ):
        for name, (value, source) in found.items():
            values[name], sources[name] = value, source
    return LoadedSettings(_assembled(values), sources)


def check_start(settings: ServiceSettings) -> None:
    """Check whether a service could start: it has a model, and its files and packages exist.

    Raises:
        ValidationError: Something is missing, or cannot be read.
    """
    check_certificate(settings.tls)
    if settings.role == "api":
        return  # the scheduler has the engine and the models
    if not settings.served_models:
        raise ValidationError("no model is given", remedy="add --model NAME=PATH_OR_ID")
    check_installed(settings.engine)
    if settings.engine == "embedded":
        for device in {settings.device, *(one.device or "auto" for one in settings.fleet)}:
            check_device(device)
    for model in settings.served_models:
        if model.path.startswith(("/", "./", "../")) and not Path(model.path).exists():
            raise ValidationError(f"the folder {model.path} of model {model.name} does not exist")


def check_certificate(tls: TlsSettings) -> None:
    """Check that the certificate, if there is one, can be used with its key.

    Raises:
        ValidationError: It cannot.
    """
    if tls.cert is None or tls.key is None:
        return
    for name, path in (("tls.cert", tls.cert), ("tls.key", tls.key)):
        if not os.access(path, os.R_OK):
            raise ValidationError(f"{name}: {path} cannot be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, where a key wants one: otherwise the terminal is asked for it.
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ssl.SSLError) as exc:
        raise ValidationError(
            f"the certificate {tls.cert} cannot be used with its key: {exc}",
            remedy="pass PEM files of the certificate with its chain, and of its unencrypted key",
        ) from exc


# Showing


def as_toml(loaded: LoadedSettings) -> str:
    """The settings as a file, with where each came from beside it, and passwords masked."""
    lines: list[str] = []
    section = ""
    flat = flat_settings(loaded.settings, is_masked=True)
    # A table takes all keys that follow, so what is in none goes first.
    for name in sorted(flat, key=lambda name: "." in name):
        head, _, last = name.rpartition(".")
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        value, source = flat[name], loaded.sources[name]
        lines.append(
            f"# {last} is not set" if value is None else f"{last} = {_toml(value)}  # {source}"
        )
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # JSON text is TOML text, but for one character that only JSON allows.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


# Reading

_Found: TypeAlias = dict[str, tuple[Any, str]]
"""Values by dotted name, each with where it was given."""


def _from_file(path: Path) -> _Found:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise ValidationError(f"{path} has more than {LARGEST_FILE_BYTES} bytes")
        tree = tomllib.loads(content.decode())
    except OSError as exc:
        raise ValidationError(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValidationError(f"{path} is not TOML: {exc}") from exc
    found: _Found = {}
    _read_replica_tables(tree, path)
    for name, value in _leaves(tree):
        _check_known(name, BY_NAME, f"{path}: unknown setting", f"{name}")
        found[name] = (_read(name, value, f"{path}: {name}", is_text=False), str(path))
    return found


def _read_replica_tables(tree: dict[str, Any], path: Path) -> None:
    """Replace the tables `[[replica]]` by the list of texts that they stand for."""
    tables = tree.pop("replica", None)
    if tables is None:
        return
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ValidationError(
            f"{path}: replica is not a list of tables", remedy="begin each with [[replica]]"
        )
    try:
        texts = [as_text(read_replica(one)) for one in tables]
    except ValidationError as exc:
        raise ValidationError(f"{path}: {exc.args[0]}", remedy=exc.remedy) from exc
    tree["replicas"] = [*tree.get("replicas", []), *texts]


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    sections = {name.partition(".")[0] for name in BY_NAME if "." in name}
    for name, value in tree.items():
        if isinstance(value, dict) and not above and name in sections:
            yield from _leaves(value, f"{name}.")
        else:
            yield above + name, value


def _from_environment(environment: Mapping[str, str]) -> _Found:
    names = {option.variable: option.name for option in OPTIONS}
    found: _Found = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE or not text:
            continue
        _check_known(variable, names, "unknown variable", variable)
        name = names[variable]
        option = BY_NAME[name]
        value: Any = text
        if option.is_list:
            value = [part.strip() for part in text.split(option.separator) if part.strip()]
        found[name] = (_read(name, value, variable, is_text=True), variable)
    return found


def _from_flags(flags: Mapping[str, Any]) -> _Found:
    found: _Found = {}
    for name, value in flags.items():
        _check_known(name, BY_NAME, "unknown setting", name)
        if value is not None:
            flag = BY_NAME[name].flag
            found[name] = (_read(name, value, flag, is_text=True), flag)
    return found


def _check_known(name: str, known: Iterable[str], message: str, told: str) -> None:
    known = list(known)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "run `tinsmith serve --help` to see all settings"
    raise UnknownFieldError(f"{message} {shown(told)}", remedy=hint)


def _read(name: str, value: Any, where: str, *, is_text: bool) -> Any:
    section, _, last = name.rpartition(".")
    owner = _types(ServiceSettings)[section] if section else ServiceSettings
    try:
        return fitted(value, _types(owner)[last], where, is_text=is_text)
    except ValidationError as exc:
        if choices := BY_NAME[name].choices:
            exc.remedy = f"expected {' or '.join(choices)}"
        raise


def _types(owner: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(owner)}


def _assembled(values: Mapping[str, Any]) -> ServiceSettings:
    """The object from values by dotted name, which have their types."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        parts.setdefault(section, {})[last] = value
    top = parts.pop("", {})
    types = _types(ServiceSettings)
    return ServiceSettings(**top, **{name: types[name](**part) for name, part in parts.items()})
