"""Options: sorted into settings and flags, and refused where they are neither."""

from __future__ import annotations

import msgspec
import pytest

from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.testing import running_service
from tinsmith.testing.scripted_settings import split_options


def test_options_are_split_into_settings_and_flags_and_unset_flags_are_omitted() -> None:
    options = {
        "long_poll_s": 1.0,
        "proto_compress_fwdbwd": True,
        "sample_cancel_enabled": True,
    }

    settings, flags, dynamic_flags = split_options(options)

    assert settings.long_poll_s == 1.0
    assert flags == {"proto_compress_fwdbwd": True, "use_pyqwest_transport": False}
    assert dynamic_flags == {"sample_cancel_enabled": True}


def test_a_misspelt_option_gets_a_suggestion() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'long_poll_s'"):
        running_service(long_pol_s=1.0)


def test_a_value_of_the_wrong_type_is_rejected() -> None:
    with pytest.raises(ValidationError):
        running_service(long_poll_s="soon")
    with pytest.raises(msgspec.ValidationError):
        running_service(parallel_fwdbwd_chunks="yes")
