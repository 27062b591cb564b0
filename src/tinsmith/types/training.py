"""Types of training: adapters, optimizers, losses, and the results of each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tinsmith.errors import ValidationError, shown
from tinsmith.observe.training_metrics import TOKENS, WEIGHTED_TOKENS
from tinsmith.types.checkpoints import (
    ParsedCheckpointTinkerPath,
    checkpoint_console_url,
    console_url,
)
from tinsmith.types.inputs import Datum, LossFnOutput
from tinsmith.types.record import (
    ArrayWriter,
    Frozen,
    FrozenModel,
    Record,
    Request,
    own_numbers,
    set_once,
    to_plain,
)

ModelID: TypeAlias = str
RequestID: TypeAlias = str

LossFnType: TypeAlias = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]


class LoraConfig(Request):
    """The rank of a LoRA adapter, its seed, and the layers it trains."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamParams(Request):
    """AdamW settings for one step; weight decay is decoupled, and `grad_clip_norm` 0 means off."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class _Family(FrozenModel):
    """An object whose fields depend on its `type`."""

    __slots__ = ("_extra", "type")

    type: str
    _extra: dict[str, Any]

    def __init__(self, *, type: str, **extra: Any) -> None:  # noqa: A002 - the API's own name
        if not isinstance(type, str):
            raise ValidationError(f"{self.__class__.__name__}.type must be text, not {type!r}")
        for name, value in extra.items():
            if isinstance(value, float) and not math.isfinite(value):
                owner = self.__class__.__name__
                raise ValidationError(f"{owner}.{name} must be finite, not {value}")
        set_once(self, "type", type)
        set_once(self, "_extra", extra)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._extra[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def _fields(self) -> dict[str, Any]:
        return {"type": self.type, **self._extra}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Family):
            return NotImplemented
        return type(self) is type(other) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((type(self), self.type, repr(sorted(self._extra.items()))))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields().items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_family, (type(self), self._fields())

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        fields = to_plain(self._fields(), write_array=write_array)
        return {name: value for name, value in fields.items() if value is not None}


def _rebuild_family(cls: type[_Family], fields: dict[str, Any]) -> _Family:
    # Not by the constructor: that of a user's subclass may take other arguments.
    family = cls.__new__(cls)
    _Family.__init__(family, **fields)
    return family


class OptimizerConfigBase(_Family):
    """The optimizer of a model, chosen when it is created. Subclass it for other optimizers."""

    __slots__ = ()

    @classmethod
    def _from_plain(cls, plain: Any) -> OptimizerConfigBase:
        fields = _fields_with_type(plain)
        family = {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig}.get(fields["type"])
        if family is None:
            return OptimizerConfigBase(**fields)
        known = {name: fields[name] for name in ("version",) if name in fields}
        return family(**known) if family is DimuonOptimizerConfig else AdamOptimizerConfig()


class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW, the default."""

    __slots__ = ()

    def __init__(self, *, type: Literal["adamw"] = "adamw") -> None:  # noqa: A002
        _check_literal("AdamOptimizerConfig.type", type, "adamw")
        super().__init__(type=type)


class DimuonOptimizerConfig(OptimizerConfigBase):
    """The Dimuon optimizer."""

    __slots__ = ()

    version: int

    def __init__(
        self,
        *,
        type: Literal["dimuon"] = "dimuon",  # noqa: A002
        version: Literal[1] = 1,
    ) -> None:
        _check_literal("DimuonOptimizerConfig.type", type, "dimuon")
        _check_literal("DimuonOptimizerConfig.version", version, 1)
        super().__init__(type=type, version=version)


OptimizerConfig: TypeAlias = OptimizerConfigBase


class OptimParamsBase(_Family):
    """Settings for one step of an optimizer other than Adam. Subclass it for other optimizers."""

    __slots__ = ()

    @classmethod
    def _from_plain(cls, plain: Any) -> OptimParamsBase:
        fields = _fields_with_type(plain)
        if fields["type"] != "dimuon":
            return OptimParamsBase(**fields)
        known = ("learning_rate", "grad_clip_norm", "beta1")
        return DimuonParams(**{name: fields[name] for name in known if name in fields})


class DimuonParams(OptimParamsBase):
    """Dimuon settings for one step; `grad_clip_norm` 0 or less means no clipping."""

    __slots__ = ()

    learning_rate: float
    grad_clip_norm: float
    beta1: float

    def __init__(
        self,
        *,
        learning_rate: float,
        grad_clip_norm: float = 0.0,
        beta1: float = 0.9,
        type: Literal["dimuon"] = "dimuon",  # noqa: A002
    ) -> None:
        _check_literal("DimuonParams.type", type, "dimuon")
        super().__init__(
            type=type,
            learning_rate=_finite("DimuonParams.learning_rate", learning_rate, at_least=0.0),
            grad_clip_norm=_finite("DimuonParams.grad_clip_norm", grad_clip_norm),
            beta1=_finite("DimuonParams.beta1", beta1, at_least=0.0, below=1.0),
        )


OptimParams: TypeAlias = AdamParams | OptimParamsBase


class ForwardBackwardInput(Frozen):
    """The data of one forward pass, the loss function, and its settings."""

    __slots__ = ("data", "loss_fn", "loss_fn_config")

    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: dict[str, float | str] | None

    def __init__(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> None:
        for index, datum in enumerate(data):
            if not isinstance(datum, Datum):
                raise TypeError(f"data[{index}] must be a Datum, not {type(datum).__name__}")
        config = None
        if loss_fn_config is not None:
            config = {name: own_numbers(value) for name, value in loss_fn_config.items()}
        for name, value in (config or {}).items():
            if not isinstance(value, str | float | int):
                raise ValidationError(
                    f"loss_fn_config[{name!r}] must be a number or text, not {value!r:.80}"
                )
        set_once(self, "data", list(data))
        set_once(self, "loss_fn", loss_fn)
        set_once(self, "loss_fn_config", config)

    def _parts(self) -> tuple[Any, ...]:
        return self.data, self.loss_fn, self.loss_fn_config or None

    def __repr__(self) -> str:
        return (
            f"ForwardBackwardInput(data=[{len(self.data)} datums], loss_fn={self.loss_fn!r}, "
            f"loss_fn_config={self.loss_fn_config!r})"
        )

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "data": [datum._to_plain(write_array) for datum in self.data],
            "loss_fn": self.loss_fn,
        }
        if self.loss_fn_config is not None:
            plain["loss_fn_config"] = self.loss_fn_config
        return plain

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        if not isinstance(plain, dict) or not isinstance(plain.get("data"), list):
            raise ValueError("Expected an object with a list of data")
        if not isinstance(plain.get("loss_fn"), str):
            raise ValueError("Expected loss_fn to be the name of a loss")
        config = plain.get("loss_fn_config")
        if config is not None and not isinstance(config, dict):
            raise ValueError("Expected loss_fn_config to be an object")
        data = [Datum._from_plain(datum) for datum in plain["data"]]
        return cls(data, plain["loss_fn"], config)


class ForwardBackwardOutput(Frozen):
    """The result of a forward pass: a dict of tensors per datum, and metrics `name:reduction`.

    `metrics` is a plain dict, which callers may extend.
    """

    __slots__ = ("_count_tokens", "loss_fn_output_type", "loss_fn_outputs", "metrics")

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float]
    _count_tokens: Callable[[], float] | None

    def __init__(
        self,
        loss_fn_output_type: str,
        loss_fn_outputs: list[LossFnOutput],
        metrics: dict[str, float] | None = None,
    ) -> None:
        set_once(self, "loss_fn_output_type", loss_fn_output_type)
        set_once(self, "loss_fn_outputs", loss_fn_outputs)
        set_once(self, "metrics", {} if metrics is None else metrics)
        set_once(self, "_count_tokens", None)

    @property
    def loss(self) -> float:
        """The mean loss per *datum*, each of which is a sum over tokens: a few hundred is common.

        Use `loss_per_token` for a value that does not grow with the length of the data. This is the
        metric `loss:mean` if the service sent it, else `loss`, else `loss:sum` divided by the
        number of outputs; NaN if there is no such metric or no output.
        """
        for name in ("loss:mean", "loss"):
            if name in self.metrics:
                return self.metrics[name]
        if "loss:sum" not in self.metrics or not self.loss_fn_outputs:
            return math.nan
        return self.metrics["loss:sum"] / len(self.loss_fn_outputs)

    @property
    def loss_per_token(self) -> float:
        """The mean loss per token: `loss:sum` divided by the number of tokens in the request.

        With `weights` it is the weighted mean: each token counts with the absolute value of its
        weight, so the scale of the weights does not matter. With `advantages`, only tokens with a
        non-zero advantage count; otherwise all tokens do. This is meaningful for losses that are
        sums over tokens, as all named losses are. For `cross_entropy`, uniform predictions over V
        tokens have a loss of log(V), perfect ones 0.

        If the output was unpickled, or not returned by a training client, the number of tokens
        comes from its metrics, else from its log-probabilities. NaN without `loss:sum`, or if no
        token counts.
        """
        loss = self.metrics.get("loss:sum", math.nan)
        tokens = self._tokens() if self._count_tokens is None else self._count_tokens()
        return loss / tokens if tokens else math.nan

    def _tokens(self) -> float:
        """The number of tokens according to the response."""
        for name in (WEIGHTED_TOKENS, TOKENS):
            if self.metrics.get(name):
                return self.metrics[name]
        found = (output.get("logprobs") for output in self.loss_fn_outputs)
        return sum(len(tensor.numbers) for tensor in found if tensor is not None)

    def _with_tokens(self, count: Callable[[], float]) -> Self:
        """A copy that gets the request's number of tokens from `count`, when it is needed."""
        made = type(self)(*self._parts())
        set_once(made, "_count_tokens", count)
        return made

    def _parts(self) -> tuple[Any, ...]:
        return self.loss_fn_output_type, self.loss_fn_outputs, self.metrics

    def __repr__(self) -> str:
        return (
            f"ForwardBackwardOutput({self.loss_fn_output_type!r}, "
            f"loss_fn_outputs=[{len(self.loss_fn_outputs)} outputs], metrics={self.metrics!r})"
        )

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": to_plain(self.loss_fn_outputs, write_array=write_array),
            "metrics": self.metrics,
        }

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        from tinsmith.types.tensors import TensorData

        outputs = plain.get("loss_fn_outputs") if isinstance(plain, dict) else None
        if not isinstance(outputs, list) or not all(isinstance(item, dict) for item in outputs):
            raise ValueError("Expected an object with a list of loss_fn_outputs")
        metrics = msgspec.convert(plain.get("metrics") or {}, dict[str, float])
        made = [
            {name: TensorData._from_plain(tensor) for name, tensor in output.items()}
            for output in outputs
        ]
        return cls(str(plain.get("loss_fn_output_type", "ArrayRecord")), made, metrics)


class OptimStepResponse(Record):
    """The metrics of an optimizer step; names are up to the service."""

    metrics: dict[str, float] | None = None


class CreateModelResponse(Record):
    """The model was created and is ready for training."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class UnloadModelResponse(Record):
    """The model's adapter was unloaded."""

    model_id: str
    type: Literal["unload_model"] | None = None


class SaveWeightsResponse(Record):
    """The `tinker://` path of the saved training state."""

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str | None:
        """The URL of this checkpoint in its service's console; None if that has no console."""
        return checkpoint_console_url(self.path)


class SaveWeightsForSamplerResponse(Record):
    """The `tinker://` path of the saved sampler weights."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str | None:
        """The URL of this checkpoint in its service's console; None if that has no console."""
        return checkpoint_console_url(self.path)

    def get_playground_url(self) -> str | None:
        """The URL of a playground for this checkpoint; None if its service has no console."""
        from urllib.parse import quote  # 0.4 MB that clients that only sample never need

        run_id = ParsedCheckpointTinkerPath.from_tinker_path(self.path).training_run_id
        path = quote(self.path, safe="")
        return console_url(f"playground?mode=checkpoint&checkpoint={path}", run_id)


class SaveWeightsForSamplerResponseInternal(Record):
    """The wire format: `path` of a named save, `sampling_session_id` of an ephemeral one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalResponse(Record):
    """The `tinker://` path of weights exported for other programs."""

    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Record):
    """The response on the wire, with the size."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class LoadWeightsResponse(Record):
    """The checkpoint was loaded into the model."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class ModelData(Record):
    """The base model of a training run."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Record):
    """The model, adapter and optimizer of a training run."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


CustomLossInputRank: TypeAlias = Literal[0, 1, 2]


class CustomLossInput(Request):
    """A parameter of an uploaded loss, and its number of dimensions."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One operation of an uploaded loss; arguments refer to earlier nodes by name."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(Request):
    """An uploaded loss: its operations in the order they run."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossResponse(Record):
    """The id of an uploaded loss, valid in its session."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


def _fields_with_type(plain: Any) -> dict[str, Any]:
    if isinstance(plain, _Family):
        return plain._fields()
    if not isinstance(plain, dict) or not isinstance(plain.get("type"), str):
        raise ValueError("Expected an object with a type")
    return plain


def _check_literal(what: str, value: object, expected: object) -> None:
    if value != expected:
        raise ValidationError(f"{what} is always {expected!r}, not {shown(value)}")


def _finite(
    what: str, value: Any, *, at_least: float = -math.inf, below: float = math.inf
) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValidationError(f"{what} must be a number, not {shown(value)}") from None
    if not math.isfinite(number) or not at_least <= number < below:
        bounds = f"at least {at_least:g}" if below == math.inf else f"in [{at_least:g}, {below:g})"
        raise ValidationError(f"{what} must be finite and {bounds}, not {number}")
    return number
