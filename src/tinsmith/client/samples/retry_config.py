"""The retry settings of one sampling client, with the official SDK's names."""

from __future__ import annotations

import dataclasses

from tinsmith.client.retry import RetryBudget
from tinsmith.errors import ValidationError


@dataclasses.dataclass(frozen=True)
class RetryConfig:
    """The argument of `create_sampling_client(retry_config=…)`. All times are in seconds.

    Without one, samples use the `RetryBudget` of their `ServiceClient`, and the service limits how
    many may be in flight. `SamplingClient.retry_budget` shows the budget in use.
    """

    max_connections: int | None = 1000
    """How many samples may be in flight, from submission to result; None for no limit. Others wait
    in order."""
    progress_timeout: float = 7200.0
    """How long a sample is retried. If none of the samples in flight returns for so long, all of
    them fail with `APIConnectionError`."""
    retry_delay_base: float = 0.5
    """The delay before the first retry, doubled for each further one."""
    retry_delay_max: float = 10.0
    """The longest such delay."""
    jitter_factor: float = 0.25
    """The fraction by which a delay is varied, up or down."""
    enable_retry_logic: bool = True
    """Whether failed samples are retried at all. After a 429 a sample is sent again in any case,
    until all samples have been refused for `progress_timeout`."""
    enable_stuck_detection: bool = True
    """Whether samples fail when none has returned for `progress_timeout`."""
    retryable_exceptions: tuple[type[Exception], ...] = ()
    """Further errors after which a sample is drawn again, at most three times: for example
    `RequestFailedError`. Lost connections, timeouts, 408, 409, 5xx and expired results are always
    retried."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise ValidationError(f"max_connections must be positive, not {self.max_connections}")
        if not self.progress_timeout > 0:  # NaN is not
            raise ValidationError(f"progress_timeout must be positive, not {self.progress_timeout}")
        self.budget(RetryBudget())  # checks the delays

    def budget(self, usual: RetryBudget) -> RetryBudget:
        """The budget of a sample's retries; other values are taken from `usual`."""
        total_s = self.progress_timeout if self.enable_retry_logic else 0.0
        return RetryBudget(
            total_s=total_s,
            first_contact_s=min(usual.first_contact_s, total_s),
            billing_s=usual.billing_s if self.enable_retry_logic else 0.0,
            delay_base_s=self.retry_delay_base,
            delay_max_s=self.retry_delay_max,
            jitter=self.jitter_factor,
            retry_after_max_s=usual.retry_after_max_s,
        )
