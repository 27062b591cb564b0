"""Every public name at the top of `tinker` is at the top of `tinsmith` too."""

from __future__ import annotations

import pytest
import tinker

import tinsmith

CASES: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((5.0,), {}),
    ((None,), {}),
    ((5.0,), {"connect": 10.0}),
    ((5.0,), {"pool": None}),
    ((None,), {"connect": 5.0}),
    ((), {"connect": 1.0, "read": 2.0, "write": 3.0, "pool": None}),
    (((1.0, 2.0),), {}),
    (((1.0, 2.0, 3.0),), {}),
    (((1.0, 2.0, 3.0, 4.0),), {}),
]


def test_all_59_names_exist() -> None:
    assert len(tinker.__all__) == 59
    assert [name for name in tinker.__all__ if not hasattr(tinsmith, name)] == ["__title__"]


def test_auth_has_the_same_functions() -> None:
    assert sorted(tinsmith.auth.__all__) == sorted(tinker.auth.__all__)


@pytest.mark.parametrize(("args", "kwargs"), CASES)
def test_a_timeout_is_constructed_like_the_official_one(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    official = tinker.Timeout(*args, **kwargs)  # type: ignore[arg-type]
    ours = tinsmith.Timeout(*args, **kwargs)  # type: ignore[arg-type]

    assert ours.as_dict() == official.as_dict()
    assert repr(ours) == repr(official)
    assert tinsmith.Timeout(ours) == ours
    assert hash(tinsmith.Timeout(ours)) == hash(ours)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((), {"connect": 1.0}), (((1.0,),), {}), (((1.0, 2.0),), {"read": 1.0})],
)
def test_a_partial_timeout_is_rejected(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="timeout"):
        tinsmith.Timeout(*args, **kwargs)  # type: ignore[arg-type]


def test_request_options_have_the_same_fields() -> None:
    assert set(tinsmith.RequestOptions.__annotations__) == set(
        tinker.RequestOptions.__annotations__
    )
