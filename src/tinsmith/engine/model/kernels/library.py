"""The compiled C kernels as functions of tensors.

The libraries beside this file are compiled when tinsmith is installed (`hatch_build.py`), one per
instruction set; the one for this CPU is loaded on first use. `kernels_for` decides which tensors
they support: on the CPU, float32 or bfloat16, with rows of whole vectors. All others are computed
by PyTorch, and so is everything where nothing was compiled.

Kernels compute in float32 and round once, at the end; in bfloat16, attention weights are rounded
too. Each row is bit-identical whatever rows are beside it and however many threads compute.
"""

# T row, H part of a row that is treated by itself, D feature, R row of logits, V vocabulary, W
# vocabulary padded to whole blocks

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.model.kernels.library_path import library_path
from tinsmith.engine.model.kernels.weight_arena import WeightArena

ROW_STEP = 32
"""Row sizes must be a multiple of it, so that even half a row fills whole vectors."""
_OUTPUT_STEP = 16
"""Pre-packed weights are padded to a multiple of so many outputs."""
MOST_HEAD_SIZE = 256
MOST_QUERIES = 96
"""Maximum queries per key head and work unit; as in `attention.c`."""
MOST_PARTS = 3
"""Maximum fused parts of a linear layer, each with its own LoRA factors; as in `lora.c`."""
SWITCH = "TINSMITH_KERNELS"
"""Setting this environment variable to `off` disables the kernels."""
_TYPES = frozenset((torch.float32, torch.bfloat16))

_log = logging.getLogger(__name__)

_Number = ctypes.c_int64
_Pointer = ctypes.c_void_p


class RowPointer(ctypes.Structure):
    """`row_pointer` of `rows.h`."""

    _fields_ = [("at", _Pointer), ("step", _Number)]


class _NormShape(ctypes.Structure):
    """`norm_shape` of `rows.h`."""

    _fields_ = [
        *((name, _Number) for name in ("parts", "size", "x_is_bf16", "out_is_bf16", "threads")),
        ("epsilon", ctypes.c_float),
    ]


class AttentionShape(ctypes.Structure):
    """`shape` of `attention.c`."""

    _fields_ = [
        *(
            (name, _Number)
            for name in ("heads", "key_heads", "size", "is_bf16", "threads", "window")
        ),
        ("scale", ctypes.c_float),
    ]


class AttentionRows(ctypes.Structure):
    """`attention` of `attention_backward.c`."""

    _fields_ = [
        *((name, _Number) for name in ("rows", "heads", "key_heads", "size", "threads", "window")),
        ("scale", ctypes.c_float),
        *((name, RowPointer) for name in ("q", "k", "v", "out", "dout")),
        ("sums", _Pointer),
        *((name, RowPointer) for name in ("dq", "dk", "dv")),
    ]


class LoraShape(ctypes.Structure):
    """`lora_shape` of `lora.c`."""

    _fields_ = [
        *((name, _Number) for name in ("inputs", "rank", "parts")),
        ("outputs", _Number * MOST_PARTS),
        ("starts", _Number * (1 + MOST_PARTS)),
        ("scale", ctypes.c_float),
    ]


_NORM, _ATTENTION, _LORA = map(ctypes.POINTER, (_NormShape, AttentionRows, LoraShape))
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_NORM, _Number, RowPointer, RowPointer, _Pointer, RowPointer],
    "rms_norm_backward": [_NORM, _Number, RowPointer, _Pointer, RowPointer, RowPointer],
    "rope": [*[_Number] * 5, RowPointer, _Pointer, _Pointer, RowPointer],
    "gate": [*[_Number] * 5, RowPointer, RowPointer],
    "gate_backward": [*[_Number] * 5, RowPointer, RowPointer, RowPointer],
    "exp_logits": [*[_Number] * 5, RowPointer, _Pointer, RowPointer, _Pointer, _Pointer],
    "exp_totals": [*[_Number] * 5, RowPointer, _Pointer, _Pointer],
    "logit_gradients": [
        *(*[_Number] * 4, RowPointer, _Pointer, _Pointer),
        *(_Number, _Pointer, _Pointer, RowPointer),
    ],
    "attend": [
        *(ctypes.POINTER(AttentionShape), _Number, _Pointer, _Pointer, _Number),
        *(*[RowPointer] * 4, _Pointer),
    ],
    "attend_backward_scratch": [_ATTENTION, _Number],
    "attend_backward": [_ATTENTION, _Pointer, _Number, _Pointer, _Number],
    "prepack": [_Number, _Number, RowPointer, _Pointer],
    "matmul": [*[_Number] * 4, RowPointer, _Pointer, _Pointer, RowPointer],
    "lora_scratch": [_LORA, _Number],
    "lora_forward": [_LORA, _Pointer, _Number, _Number, *[RowPointer] * 3, _Pointer],
    "lora_backward": [_LORA, _Pointer, _Pointer, *[_Number] * 3, *[RowPointer] * 4, _Pointer],
}
_RESULTS = {"lora_scratch": _Number, "attend_backward_scratch": _Number}
_BF16_ONLY = {
    *("prepack", "matmul", "lora_scratch", "lora_forward", "lora_backward"),
    *("attend_backward_scratch", "attend_backward"),
}
"""Only in libraries for CPUs with bfloat16 arithmetic."""
_NO_ROWS = RowPointer(None, 0)
_WEIGHT_MEMORY = WeightArena()


class Kernels:
    """The functions of one library. Tensors must be ones that `kernels_for` accepts."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.has_matmul = hasattr(library, "tinsmith_matmul")
        """Whether the library has the bfloat16 functions: `prepack`, `matmul`, LoRA, backward."""
        self._library: Any = types.SimpleNamespace()
        for name, arguments in _ARGUMENTS.items():
            if name in _BF16_ONLY and not self.has_matmul:
                continue
            function = library[f"tinsmith_{name}"]
            function.argtypes, function.restype = arguments, _RESULTS.get(name)
            setattr(self._library, name, function)

    def rms_norm(
        self,
        x_THD: Tensor,
        weight_D: Tensor,
        epsilon: float,
        *,
        added_TD: Tensor | None = None,
    ) -> Tensor:
        """RMS norm: rows over the root of their mean square, times the weight, in its dtype.

        Args:
            x_THD: Rows, or rows of heads that are normalised separately.
            weight_D: For one row or head.
            epsilon: Added to the mean square.
            added_TD: If given, first added to `x_THD` in place; in the weight's dtype.
        """
        assert added_TD is None or x_THD.dtype == torch.float32
        shape = _norm_shape(x_THD, weight_D, epsilon)
        out = torch.empty(x_THD.shape, dtype=weight_D.dtype)
        added = _NO_ROWS if added_TD is None else row_pointer(added_TD)
        self._library.rms_norm(
            shape, len(x_THD), row_pointer(x_THD), added, weight_D.data_ptr(), row_pointer(out)
        )
        return out

    def rms_norm_backward(
        self, x_THD: Tensor, weight_D: Tensor, epsilon: float, dy_THD: Tensor
    ) -> Tensor:
        """The gradient of `x_THD`, given that of the normalised rows."""
        shape = _norm_shape(x_THD, weight_D, epsilon)
        dx = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        self._library.rms_norm_backward(
            *(shape, len(x_THD), row_pointer(x_THD), weight_D.data_ptr()),
            *(row_pointer(dy_THD), row_pointer(dx)),
        )
        return dx

    def rope(self, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Rotary embedding: heads · cos + swapped halves · sin; both tables are float32."""
        assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous()
        out = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        self._library.rope(
            *(*x_THD.shape, is_bfloat16(x_THD), torch.get_num_threads()),
            *(row_pointer(x_THD), cos_T1D.data_ptr(), sin_T1D.data_ptr(), row_pointer(out)),
        )
        return out

    def gate(self, x_TF: Tensor, *, is_gelu: bool) -> Tensor:
        """SiLU, or tanh GELU, of the first half of each row, times its second half."""
        rows, columns = x_TF.shape
        out = torch.empty((rows, columns // 2), dtype=x_TF.dtype)
        self._library.gate(
            *(rows, columns // 2, is_gelu, is_bfloat16(x_TF), torch.get_num_threads()),
            *(row_pointer(x_TF), row_pointer(out)),
        )
        return out

    def gate_backward(self, x_TF: Tensor, dy_TF: Tensor, *, is_gelu: bool) -> Tensor:
        """The gradient of both halves, given that of the result."""
        rows, columns = x_TF.shape
        dx = torch.empty(x_TF.shape, dtype=x_TF.dtype)
        self._library.gate_backward(
            *(rows, columns // 2, is_gelu, is_bfloat16(x_TF), torch.get_num_threads()),
            *(row_pointer(x_TF), row_pointer(dy_TF), row_pointer(dx)),
        )
        return dx

    def exp_logits(
        self, logits_RV: Tensor, inverse_temperatures_R: Tensor, block: int, exp_RW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """exp((logit - max) / temperature) of each row.

        Args:
            logits_RV: One row per position.
            inverse_temperatures_R: float32.
            block: Tokens per block of sums; W is a multiple of it.
            exp_RW: Output, float32.

        Returns:
            The cumulative sums over blocks, float64, and the largest logits, float32.
        """
        rows, vocabulary = logits_RV.shape
        sums_RB = torch.empty((rows, exp_RW.shape[1] // block), dtype=torch.float64)
        max_R = torch.empty(rows, dtype=torch.float32)
        self._library.exp_logits(
            *(rows, vocabulary, block, is_bfloat16(logits_RV), torch.get_num_threads()),
            *(row_pointer(logits_RV), inverse_temperatures_R.data_ptr(), row_pointer(exp_RW)),
            *(sums_RB.data_ptr(), max_R.data_ptr()),
        )
        return sums_RB, max_R

    def exp_totals(self, logits_RV: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The totals of `exp_logits` at temperature 1, and the largest logits."""
        rows, vocabulary = logits_RV.shape
        exp_totals_R = torch.empty(rows, dtype=torch.float64)
        max_R = torch.empty(rows, dtype=torch.float32)
        self._library.exp_totals(
            *(rows, vocabulary, block, is_bfloat16(logits_RV), torch.get_num_threads()),
            *(row_pointer(logits_RV), exp_totals_R.data_ptr(), max_R.data_ptr()),
        )
        return exp_totals_R, max_R

    def logit_gradients(
        self,
        logits_RV: Tensor,
        max_R: Tensor,
        factors_R: Tensor,
        targets_RK: Tensor,
        dlp_RK: Tensor,
    ) -> Tensor:
        """exp(logit - max) · factor, plus `dlp_RK` at each row's targets.

        Args:
            logits_RV: One row per position.
            max_R: The largest logit of each row, float32.
            factors_R: float32.
            targets_RK: A few token ids per row, int64; duplicates are allowed.
            dlp_RK: The gradients of their log-probabilities, float32.
        """
        rows, vocabulary = logits_RV.shape
        targets_RK, dlp_RK = targets_RK.contiguous(), dlp_RK.contiguous()
        out_RV = torch.empty((rows, vocabulary), dtype=logits_RV.dtype)
        self._library.logit_gradients(
            *(rows, vocabulary, is_bfloat16(logits_RV), torch.get_num_threads()),
            *(row_pointer(logits_RV), max_R.data_ptr(), factors_R.data_ptr()),
            *(targets_RK.shape[1], targets_RK.data_ptr(), dlp_RK.data_ptr(), row_pointer(out_RV)),
        )
        return out_RV

    def attend(
        self,
        shape: AttentionShape,
        layer: int,
        segments: int,
        starts: int,
        units: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        lse_TH: Tensor | None = None,
    ) -> Tensor:
        """`tinsmith_attend` of `attention.c`; `segments` and `starts` are addresses."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        self._library.attend(
            *(shape, layer, segments, starts, units, row_pointer(q_THD), row_pointer(k_TGD)),
            *(
                row_pointer(v_TGD),
                row_pointer(out_THD),
                None if lse_TH is None else lse_TH.data_ptr(),
            ),
        )
        return out_THD

    def attend_backward(self, rows: AttentionRows, segments: int, count: int, longest: int) -> None:
        """`tinsmith_attend_backward` of `attention_backward.c`; `segments` is an address."""
        numbers = self._library.attend_backward_scratch(rows, longest)
        scratch = _scratch(numbers * rows.threads)
        self._library.attend_backward(rows, segments, count, scratch.data_ptr(), numbers)

    def prepack(self, weight_OI: Tensor) -> Tensor:
        """bfloat16 weights in the layout that `matmul` reads."""
        outputs, inputs = weight_OI.shape
        prepacked = _WEIGHT_MEMORY.take(_whole_vectors(outputs) * inputs // 2)
        self._library.prepack(outputs, inputs, row_pointer(weight_OI), prepacked.data_ptr())
        return prepacked

    def matmul(
        self, x_TI: Tensor, prepacked: Tensor, outputs: int, bias_O: Tensor | None
    ) -> Tensor:
        """x·Wᵀ + bias with a pre-packed W; all in bfloat16."""
        rows, inputs = x_TI.shape
        y_TO = torch.empty((rows, outputs), dtype=torch.bfloat16)
        self._library.matmul(
            *(
                rows,
                outputs,
                inputs,
                torch.get_num_threads(),
                row_pointer(x_TI),
                prepacked.data_ptr(),
            ),
            *(None if bias_O is None else bias_O.data_ptr(), row_pointer(y_TO)),
        )
        return y_TO

    def lora_forward(
        self, factors: LoraShape, flat_N: Tensor, x_TI: Tensor, y_TO: Tensor, t_TR: Tensor
    ) -> None:
        """`tinsmith_lora_forward` of `lora.c`; rows are bfloat16."""
        assert x_TI.dtype == y_TO.dtype == torch.bfloat16
        rows = len(x_TI)
        scratch = _scratch(self._library.lora_scratch(factors, rows))
        self._library.lora_forward(
            *(factors, flat_N.data_ptr(), rows, torch.get_num_threads()),
            *(row_pointer(x_TI), row_pointer(y_TO), row_pointer(t_TR), scratch.data_ptr()),
        )

    def lora_backward(
        self,
        factors: LoraShape,
        flat_N: Tensor,
        gradients_N: Tensor | None,
        dy_TO: Tensor,
        x_TI: Tensor,
        t_TR: Tensor,
        dx_TI: Tensor,
        *,
        is_added: bool,
    ) -> None:
        """`tinsmith_lora_backward` of `lora.c`; rows are bfloat16."""
        assert dy_TO.dtype == x_TI.dtype == t_TR.dtype == dx_TI.dtype == torch.bfloat16
        rows = len(x_TI)
        scratch = _scratch(self._library.lora_scratch(factors, rows))
        self._library.lora_backward(
            *(factors, flat_N.data_ptr(), None if gradients_N is None else gradients_N.data_ptr()),
            *(rows, torch.get_num_threads(), is_added),
            *(
                row_pointer(dy_TO),
                row_pointer(x_TI),
                row_pointer(t_TR),
                row_pointer(dx_TI),
                scratch.data_ptr(),
            ),
        )


class _OfThread(threading.local):
    scratch: Tensor | None = None


_OF_THREAD = _OfThread()


def _scratch(numbers: int) -> Tensor:
    """Scratch memory of this thread, valid until the next call; fresh memory is expensive."""
    scratch = _OF_THREAD.scratch
    if scratch is None or len(scratch) < numbers:
        # A tensor made in inference mode could be written in inference mode only.
        with torch.inference_mode(mode=False):
            scratch = torch.empty(numbers, dtype=torch.int32)
        _OF_THREAD.scratch = scratch
    return scratch


def _whole_vectors(outputs: int) -> int:
    return -(-outputs // _OUTPUT_STEP) * _OUTPUT_STEP


def matmul_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they multiply this dtype faster than PyTorch on this device.

    Not on CPUs with AMX, where PyTorch's own matmul is faster.
    """
    found = kernels()
    if found is None or not found.has_matmul or device.type != "cpu" or dtype != torch.bfloat16:
        return None
    return None if _has_amx() else found


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def row_pointer(tensor: Tensor) -> RowPointer:
    """Its rows, as kernels take them."""
    return RowPointer(tensor.data_ptr(), tensor.stride(0))


def is_bfloat16(tensor: Tensor) -> bool:
    """Whether it is bfloat16 rather than float32."""
    return tensor.dtype == torch.bfloat16


def _norm_shape(x_THD: Tensor, weight_D: Tensor, epsilon: float) -> _NormShape:
    parts = x_THD.shape[1] if x_THD.dim() == 3 else 1
    return _kept_shape(
        *(parts, weight_D.shape[0], is_bfloat16(x_THD), is_bfloat16(weight_D)),
        *(torch.get_num_threads(), epsilon),
    )


@functools.lru_cache(64)
def _kept_shape(*fields: float) -> _NormShape:
    return _NormShape(*fields)


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they support all of these tensors; None to compute with PyTorch."""
    found = kernels()
    if found is None:
        return None
    return found if all(map(_fits, tensors)) else None


def _fits(x: Tensor) -> bool:
    *_, size = shape = x.shape
    if size % ROW_STEP or not x.is_cpu or x.dtype not in _TYPES or x.stride(-1) != 1:
        return False
    return len(shape) < 3 or (len(shape) == 3 and x.stride(1) == size)


def is_dense(x_THD: Tensor) -> bool:
    """Whether the heads of each row are contiguous."""
    return x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]


@functools.cache
def kernels() -> Kernels | None:
    """The kernels for this CPU; None if there are none or they are disabled."""
    path = library_path(_instruction_set())
    if os.environ.get(SWITCH, "").lower() in ("off", "0") or not path.exists():
        return None
    try:
        return Kernels(path)
    except OSError as exc:  # compiled against other C or OpenMP libraries
        _log.warning("the compiled kernels cannot be loaded; computing with PyTorch alone: %s", exc)
        return None


def _instruction_set() -> str:
    """The instruction set by the name that the build uses, as PyTorch detects it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return "x86-64-v4-bf16" if torch.cpu._is_avx512_bf16_supported() else "x86-64-v4"
    return "x86-64-v3" if capability == "AVX2" else platform.machine()
