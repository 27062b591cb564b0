"""Keys of the metrics that a service returns from training calls.

The API itself defines `loss:sum`, and `custom/…` for what an uploaded loss returns. Every other key
starts with `tinsmith/`: training loops merge these metrics into records of their own, so a plain
`step` or `learning_rate` from the service would overwrite theirs.

Keys of a forward or backward pass end in `:reduction`, which says how clients join the chunks of a
batch. Keys of an optimizer step need none.
"""

from typing import Final

LOSS: Final = "loss:sum"

TOKENS: Final = "tinsmith/tokens:sum"
WEIGHTED_TOKENS: Final = "tinsmith/weighted_tokens:sum"
NLL: Final = "tinsmith/nll:sum"
RATIO_MEAN: Final = "tinsmith/ratio:mean"
RATIO_MAX: Final = "tinsmith/ratio:max"
RATIO_MIN: Final = "tinsmith/ratio:min"
KL: Final = "tinsmith/kl:mean"
CLIP_FRACTION: Final = "tinsmith/clip_fraction:mean"

GRAD_NORM: Final = "tinsmith/grad_norm"
UPDATE_NORM: Final = "tinsmith/update_norm"
LEARNING_RATE: Final = "tinsmith/learning_rate"
STEP: Final = "tinsmith/step"
