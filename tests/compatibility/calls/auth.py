"""How each public function of `auth` is called; they read the environment that the driver has."""

from __future__ import annotations

from tests.compatibility.caller import Caller
from tests.compatibility.stage import Stage


def get_tinker_token(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.auth) == stage.api_key


def tinker_has_credentials(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.auth) is True


def raise_if_tinker_not_accessible(stage: Stage, call: Caller) -> None:
    assert call(stage.sdk.auth) is None
