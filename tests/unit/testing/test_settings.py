"""Options: sorted into settings and flags, and refused where they are neither."""

from __future__ import annotations

import msgspec
import pytest

from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.testing import running_service
from tinsmith.testing.settings import split_options


def test_options_go_where_they_belong_and_flags_not_given_are_left_out() -> None:
    options = {
        "long_poll_s": 1.0,
        "proto_compress_fwdbwd": True,
        "sample_cancel_enabled": True,
        "extra_flags": {"tinsmith_many": True},
    }

    settings, flags, dynamic_flags = split_options(options)

    assert settings.long_poll_s == 1.0
    assert flags == {"proto_compress_fwdbwd": True, "tinsmith_many": True}
    assert dynamic_flags == {"sample_cancel_enabled": True}


def test_misspelt_option_names_the_nearest() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'long_poll_s'"):
        running_service(long_pol_s=1.0)


def test_value_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValidationError):
        running_service(long_poll_s="soon")
    with pytest.raises(msgspec.ValidationError):
        running_service(parallel_fwdbwd_chunks="yes")
