"""The operations that an uploaded loss may use, and the rules for its names.

A loss is sent as data (`CustomLossGraph`) and rebuilt from these tables alone: the receiver checks
it against them, and the engine looks its operations up in them. Functions have the names that
torch's tracer writes; softplus is `torch._C._nn.softplus`.

Excluded on purpose are operations that use random numbers, because a repeated pass must give the
same result; in-place operations; anything that leaves torch, or reads files or devices; and
operations whose output can be much larger than their input (`einsum`, `kron`, `cartesian_prod`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

LOGPROBS = "logprobs"
"""The name of the first input of every loss."""
MAX_INPUTS = 16

INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Both functions of torch and methods of tensors.
_EITHER = _words(
    """
    abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any arccos arcsin arctan
    arctan2 argmax argmin argsort asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
    bitwise_xor bmm ceil chunk clamp clamp_max clamp_min clip clone copysign cos cosh count_nonzero
    cummax cummin cumprod cumsum deg2rad detach diag diagonal diff digamma dist div divide dot eq
    erf erfc erfinv exp exp2 expm1 fix flatten flip fliplr float_power floor floor_divide fmax fmin
    fmod frac gather ge greater greater_equal gt heaviside hypot index_add index_copy index_fill
    index_select isclose isfinite isinf isnan isneginf isposinf kthvalue le lerp less less_equal
    lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and
    logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_scatter masked_select
    matmul max maximum mean median min minimum mm moveaxis movedim mul multiply mv nan_to_num
    nanmean nanmedian nanquantile nansum narrow ne neg negative nonzero norm not_equal numel permute
    positive pow prod quantile rad2deg ravel reciprocal relu remainder renorm reshape roll round
    rsqrt scatter scatter_add scatter_reduce select sgn sigmoid sign signbit sin sinc sinh softmax
    sort split sqrt square squeeze std sub subtract sum swapaxes swapdims t take take_along_dim tan
    tanh tensor_split topk trace transpose tril triu true_divide trunc unbind unflatten unsqueeze
    var where xlogy
    """
)
_FUNCTIONS = _words(
    """
    arange as_tensor broadcast_tensors broadcast_to bucketize cat concat concatenate
    cosine_similarity eye full full_like hstack linspace meshgrid ones ones_like outer
    pairwise_distance prelu repeat_interleave scalar_tensor searchsorted stack std_mean tensor tile
    var_mean vstack zeros zeros_like
    """
)
_MODULES = {
    "torch": _EITHER | _FUNCTIONS,
    "torch.functional": _words("broadcast_tensors meshgrid norm split"),
    "torch.nn.functional": _words(
        """
        _threshold binary_cross_entropy binary_cross_entropy_with_logits celu cosine_embedding_loss
        cosine_similarity cross_entropy elu gaussian_nll_loss glu hardshrink hardsigmoid hardswish
        hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid
        margin_ranking_loss mish mse_loss nll_loss normalize pad poisson_nll_loss relu relu6 selu
        sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softplus softshrink softsign
        tanh tanhshrink threshold
        """
    ),
    "torch._C._nn": _words("gelu log_sigmoid one_hot softplus softshrink"),
    "torch._C._special": _words(
        """
        special_entr special_erf special_erfc special_erfcx special_exp2 special_expit special_expm1
        special_i0 special_i1 special_log1p special_log_ndtr special_log_softmax special_logit
        special_logsumexp special_ndtr special_ndtri special_round special_sinc special_softmax
        special_xlog1py special_xlogy
        """
    ),
    "torch._C._linalg": _words("linalg_norm linalg_vector_norm"),
    "operator": _words(
        """
        abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg or_ pos pow
        sub truediv xor
        """
    ),
    "math": _words(
        """
        acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp exp2
        expm1 fabs floor fmod hypot isclose isfinite isinf isnan lgamma log log10 log1p log2 pow
        radians sin sinh sqrt tan tanh trunc
        """
    ),
}

FUNCTIONS = frozenset(
    f"{module}.{name}" for module, names in _MODULES.items() for name in names
) | {"getattr"}
"""Targets of `call_function`."""

METHODS = _EITHER | _words(
    """
    bfloat16 bool broadcast_to contiguous dim double expand expand_as float half int long ndimension
    nelement new_full new_ones new_tensor new_zeros outer repeat repeat_interleave reshape_as size
    sum_to_size tile to type_as view view_as
    """
)
"""Targets of `call_method`."""

ATTRIBUTES = _words("T device dtype indices mT ndim shape values")
"""Attributes that `getattr` may read from a tensor or a named tuple of tensors."""

DTYPES = _words(
    "bfloat16 bool double float float16 float32 float64 half int int16 int32 int64 int8 long uint8"
)
LAYOUTS = _words("strided")
MEMORY_FORMATS = _words("contiguous_format preserve_format")
DEVICE = re.compile(r"(cpu|cuda|mps)(:[0-9]{1,3})?")
"""The device on which a loss was traced. It runs on that of the model."""


def argument_of(
    plain: Any, made: Mapping[str, Any], constant: Callable[[str | None, str], Any]
) -> Any:
    """Convert an argument of a node from JSON to the value passed to its operation.

    Numbers, None, booleans and text are themselves. Everything else is a dict of one item:
    `{"ref": NODE}`, `{"tuple": […]}`, `{"dict": {…}}`, `{"slice": [start, stop, step]}`,
    `{"ellipsis": true}`, `{"float": "inf"}`, or a torch constant such as `{"dtype": "float32"}`.

    Args:
        plain: The argument as JSON, already checked.
        made: The result of each earlier node.
        constant: Returns the torch constant of a kind (`dtype`, `device`, `layout`,
            `memory_format`; None for plain text) and a name.
    """
    if isinstance(plain, list):
        return [argument_of(one, made, constant) for one in plain]
    if isinstance(plain, str):
        return constant(None, plain)
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "ref":
        return made[content]
    if kind == "tuple":
        return tuple(argument_of(one, made, constant) for one in content)
    if kind == "dict":
        return {name: argument_of(one, made, constant) for name, one in content.items()}
    if kind == "slice":
        return slice(*(argument_of(one, made, constant) for one in content))
    if kind == "ellipsis":
        return ...
    return float(content) if kind == "float" else constant(kind, content)
