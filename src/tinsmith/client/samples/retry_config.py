"""How patient the samples of one client are, in the words of the official SDK."""

from __future__ import annotations

import dataclasses

from tinsmith.client.retry import RetryBudget
from tinsmith.errors import ValidationError


@dataclasses.dataclass(frozen=True)
class RetryConfig:
    """What `create_sampling_client(retry_config=…)` takes. All times are in seconds.

    Without one, samples have the budget of their `ServiceClient` (`RetryBudget`), and as many may
    be in flight as the service says. `SamplingClient.retry_budget` shows what holds.
    """

    max_connections: int | None = 1000
    """How many samples may be in flight, from their submission to their result; None for any
    number. What is beyond it waits, in order."""
    progress_timeout: float = 7200.0
    """How long a sample is tried again; and if for so long none of the samples in flight came back,
    all of them fail with `APIConnectionError`."""
    retry_delay_base: float = 0.5
    """The delay before the second try, doubled for each further one."""
    retry_delay_max: float = 10.0
    """The longest such delay."""
    jitter_factor: float = 0.25
    """By which part of it a delay is varied, up or down."""
    enable_retry_logic: bool = True
    """Whether failed samples are tried again at all. Pauses that the service asks for with 429 are
    kept in any case, and the sample is sent after them, until for `progress_timeout` all were
    refused."""
    enable_stuck_detection: bool = True
    """Whether samples fail when none came back for `progress_timeout`."""
    retryable_exceptions: tuple[type[Exception], ...] = ()
    """Errors after which a sample is drawn anew although they are final, at most three times: for
    example `RequestFailedError`. Lost connections, timeouts, 408, 409, 5xx and expired results are
    tried again without being named here."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise ValidationError(f"max_connections must be above 0, not {self.max_connections}")
        if not self.progress_timeout > 0:  # NaN is not
            raise ValidationError(f"progress_timeout must be above 0, not {self.progress_timeout}")
        self.budget(RetryBudget())  # checks the delays

    def budget(self, usual: RetryBudget) -> RetryBudget:
        """The budget of a sample's second tries; what is not said here is as usual."""
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
