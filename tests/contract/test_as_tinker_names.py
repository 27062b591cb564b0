"""Names and modules of the official package that programs import are there under its name."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
import subprocess
import sys

import pytest
import tinker
import tinker.lib.public_interfaces

import tinsmith
from tests.contract.test_json_types import NAMED

PRIVATE = {
    "tinker._exceptions": ["TinkerError", "RequestFailedError", "BillingError"],
    "tinker._types": ["RequestOptions", "Timeout"],
    "tinker._version": ["__version__"],
    "tinker.auth": [
        "get_tinker_token",
        "raise_if_tinker_not_accessible",
        "tinker_has_credentials",
    ],
    "tinker.lib.api_future_impl": ["APIFuture", "QueueState", "QueueStateObserver"],
    "tinker.lib.experimental": ["ExperimentalWarning"],
    "tinker.lib.internal_client_holder": ["InternalClientHolder"],
    "tinker.lib.public_interfaces": [
        "AdminClient",
        "APIFuture",
        "AwaitableConcurrentFuture",
        "LossHandle",
        "PerDatumLossFn",
        "RestClient",
        "SamplingClient",
        "ServiceClient",
        "TrainingClient",
    ],
    "tinker.lib.public_interfaces.admin_client": ["AdminClient"],
    "tinker.lib.public_interfaces.api_future": ["APIFuture", "AwaitableConcurrentFuture"],
    "tinker.lib.public_interfaces.custom_loss": ["LossHandle", "PerDatumLossFn"],
    "tinker.lib.public_interfaces.rest_client": ["RestClient"],
    "tinker.lib.public_interfaces.sampling_client": ["SamplingClient"],
    "tinker.lib.public_interfaces.service_client": ["ServiceClient"],
    "tinker.lib.public_interfaces.training_client": ["TrainingClient"],
    "tinker.lib.queue_state_logger": ["QueueStateLogger"],
    "tinker.lib.retry_handler": ["RetryConfig"],
    "tinker.lib.retryable_exception": ["RetryableException"],
    "tinker.types.generic_event": ["GenericEvent"],
    "tinker.types.optimizer": ["OptimParamsBase", "OptimizerConfigBase"],
    "tinker.types.shared": ["UntypedAPIFuture"],
    "tinker.types.shared.untyped_api_future": ["UntypedAPIFuture"],
    "tinker.types.tensor_data": ["TensorData"],
    "tinker.types.topk_logprobs": ["TopkLogprobs"],
    "tinker.types.try_again_response": ["TryAgainResponse"],
}

INSIDES = {
    "tinker._base_client",
    "tinker._client",
    "tinker._compat",
    "tinker._constants",
    "tinker._files",
    "tinker._models",
    "tinker._qs",
    "tinker._resource",
    "tinker._response",
    "tinker._streaming",
    "tinker._utils",
    "tinker.proto",
    "tinker.resources",
    "tinker.types._pydantic_types",
    "tinker.types._tensor_container",
    "tinker.types._torch_utils",
}
"""Modules of its HTTP layer, its messages and its models; what is below `tinker.lib` and is not in
`PRIVATE`, and the command line, are further ones."""

PROGRAM = """
import importlib, json, sys
import tinsmith
tinsmith.as_tinker()
absent = []
for module_name, names in json.load(sys.stdin).items():
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        absent.append(module_name)
        continue
    absent += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
print(json.dumps(absent))
"""


def absent_of(wanted: dict[str, list[str]]) -> list[str]:
    """Which of these names are not there on `as_tinker`, in a fresh process."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    absent: list[str] = json.loads(finished.stdout)
    return absent


def test_every_public_name_exists() -> None:
    wanted = {"tinker": list(tinker.__all__), "tinker.types": list(NAMED)}

    assert absent_of(wanted) == []


def test_every_type_module_exists() -> None:
    modules = [
        f"tinker.types.{found.name}"
        for found in pkgutil.iter_modules(tinker.types.__path__)
        if not found.name.startswith("_")
    ]

    assert len(modules) > 80
    assert absent_of({name: [] for name in modules}) == []


@pytest.mark.parametrize("module", PRIVATE)
def test_the_list_of_private_paths_matches_the_official_package(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in PRIVATE[module] if not hasattr(found, name)] == []


def test_private_paths_that_programs_import_exist() -> None:
    assert absent_of(PRIVATE) == []


def test_only_internals_of_the_official_package_are_missing() -> None:
    modules = [
        found.name
        for found in pkgutil.walk_packages(tinker.__path__, "tinker.", onerror=lambda _: None)
        if not found.name.startswith(("tinker.lib", "tinker.cli"))
        and not found.name.endswith(("_test", "conftest"))
    ]

    absent = set(absent_of({name: [] for name in modules}))

    assert len(modules) > 100
    assert absent >= INSIDES
    below = tuple(f"{name}." for name in INSIDES)
    assert {name for name in absent - INSIDES if not name.startswith(below)} == set()


def test_modules_are_also_available_as_attributes() -> None:
    program = (
        "import tinsmith; tinsmith.as_tinker(); import tinker\n"
        "assert tinker.types.tensor_data.TensorData is tinker.TensorData\n"
        "assert tinker.lib.public_interfaces.rest_client.RestClient is tinker.RestClient\n"
        "assert tinker.auth.tinker_has_credentials() in (True, False)\n"
        "assert not hasattr(tinker.types, 'nothing'), 'it is not there'\n"
        "from tinker.types import *\n"
        "assert ModelInput is tinker.ModelInput\n"
    )

    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )

    assert finished.returncode == 0, finished.stderr


def test_raw_response_wrappers_of_the_official_client_do_not_exist() -> None:
    """They belong to its HTTP library, which ours does not have."""
    unlisted = {"APIResponse", "AsyncAPIResponse", "resources"}

    assert unlisted <= set(dir(tinker))
    assert unlisted.isdisjoint(tinker.__all__)
    for name in unlisted:
        with pytest.raises(AttributeError, match=name):
            getattr(tinsmith, name)


@pytest.mark.parametrize("made", ["AdamParams()", "ModelInput.from_ints([1])"])
def test_pickles_of_the_official_package_are_rejected_not_misread(made: str) -> None:
    pickled = pickle.dumps(eval(f"tinker.{made}"))
    program = f"import tinsmith, pickle; tinsmith.as_tinker(); pickle.loads({pickled!r})"

    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )

    assert finished.returncode != 0
    assert "Error" in finished.stderr
