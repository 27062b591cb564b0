"""The compiled kernels, as functions of tensors.

The libraries beside this file are compiled when tinsmith is installed (`hatch_build.py`), one for
each kind of machine; the one for this machine is loaded on first use. `kernels_for` says who may
use them: tensors on a CPU, of float32 or bfloat16, whose rows are whole vectors. Others, and
everybody where nothing was compiled, compute with PyTorch.

Kernels compute in float32 and round once, at the end; in bfloat16, attention's weights too. Each
row comes out the same, bit for bit, whatever rows are beside it and however many threads there are.
"""

# T row, H part of a row that is treated by itself, D feature, R row of logits, V vocabulary, W and
# what fills its last block

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinsmith.model.kernels.names import library_path
from tinsmith.model.kernels.weight_memory import WeightMemory

ROW_STEP = 32
"""Rows of any multiple of it can be computed, and halves of them: no vector is only half full."""
_OUTPUT_STEP = 16
"""Packed weights are filled up to so many outputs."""
MOST_HEAD_SIZE = 256
MOST_QUERIES = 96
"""Of one key head, that a thread takes at a time; as in `attention.c`."""
MOST_PARTS = 3
"""Of a linear layer, that have factors of their own; as in `factors.c`."""
SWITCH = "TINSMITH_KERNELS"
"""Set to `off`, the environment's variable of this name has everything computed by PyTorch."""
_TYPES = frozenset((torch.float32, torch.bfloat16))

_log = logging.getLogger(__name__)

_Number = ctypes.c_int64
_Pointer = ctypes.c_void_p


class Rows(ctypes.Structure):
    """`rows_of` of `rows.h`."""

    _fields_ = [("at", _Pointer), ("step", _Number)]


class _NormShape(ctypes.Structure):
    """`norm_shape` of `rows.h`."""

    _fields_ = [
        *((name, _Number) for name in ("parts", "size", "x_half", "out_half", "threads")),
        ("epsilon", ctypes.c_float),
    ]


class AttentionShape(ctypes.Structure):
    """`shape` of `attention.c`."""

    _fields_ = [
        *(
            (name, _Number)
            for name in ("heads", "key_heads", "size", "is_half", "threads", "window")
        ),
        ("scale", ctypes.c_float),
    ]


class AttentionRows(ctypes.Structure):
    """`attention` of `attention_back.c`."""

    _fields_ = [
        *((name, _Number) for name in ("rows", "heads", "key_heads", "size", "threads", "window")),
        ("scale", ctypes.c_float),
        *((name, Rows) for name in ("q", "k", "v", "out", "dout")),
        ("sums", _Pointer),
        *((name, Rows) for name in ("dq", "dk", "dv")),
    ]


class FactorsOfLayer(ctypes.Structure):
    """`factors` of `factors.c`."""

    _fields_ = [
        *((name, _Number) for name in ("inputs", "rank", "parts")),
        ("outputs", _Number * MOST_PARTS),
        ("starts", _Number * (1 + MOST_PARTS)),
        ("scale", ctypes.c_float),
    ]


_ARGUMENTS: dict[str, list[Any]] = {
    "norm": [ctypes.POINTER(_NormShape), _Number, Rows, Rows, _Pointer, Rows],
    "norm_back": [ctypes.POINTER(_NormShape), _Number, Rows, _Pointer, Rows, Rows],
    "turn": [*[_Number] * 5, Rows, _Pointer, _Pointer, Rows],
    "gate": [*[_Number] * 5, Rows, Rows],
    "gate_back": [*[_Number] * 5, Rows, Rows, Rows],
    "shares": [*[_Number] * 5, Rows, _Pointer, Rows, _Pointer, _Pointer],
    "totals": [*[_Number] * 5, Rows, _Pointer, _Pointer],
    "logit_slopes": [*[_Number] * 4, Rows, _Pointer, _Pointer, _Number, _Pointer, _Pointer, Rows],
    "attend": [
        *(ctypes.POINTER(AttentionShape), _Number, _Pointer, _Pointer, _Number),
        *(*[Rows] * 4, _Pointer),
    ],
    "attend_back_room": [ctypes.POINTER(AttentionRows), _Number],
    "attend_back": [ctypes.POINTER(AttentionRows), _Pointer, _Number, _Pointer, _Number],
    "pack": [_Number, _Number, Rows, _Pointer],
    "product": [*[_Number] * 4, Rows, _Pointer, _Pointer, Rows],
    "factors_room": [ctypes.POINTER(FactorsOfLayer), _Number],
    "factors_add": [
        *(ctypes.POINTER(FactorsOfLayer), _Pointer, _Number, _Number, Rows, Rows, Rows, _Pointer),
    ],
    "factors_back": [
        *(
            ctypes.POINTER(FactorsOfLayer),
            _Pointer,
            _Pointer,
            *[_Number] * 3,
            *[Rows] * 4,
            _Pointer,
        ),
    ],
}
_RESULTS = {"factors_room": _Number, "attend_back_room": _Number}
_OF_SOME = {
    *("pack", "product", "factors_room", "factors_add", "factors_back"),
    *("attend_back_room", "attend_back"),
}
"""What only some libraries have: those of machines that multiply bfloat16."""
_NO_ROWS = Rows(None, 0)
_WEIGHT_MEMORY = WeightMemory()


class Kernels:
    """The functions of one library. Tensors are as `kernels_for` wants them."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.multiplies = hasattr(library, "tinsmith_product")
        """Whether there are `pack` and `product`."""
        for name, arguments in _ARGUMENTS.items():
            if name in _OF_SOME and not self.multiplies:
                continue
            function = library[f"tinsmith_{name}"]
            function.argtypes, function.restype = arguments, _RESULTS.get(name)
            setattr(self, f"_{name}", function)
        self._norm: Any
        self._norm_back: Any
        self._turn: Any
        self._gate: Any
        self._gate_back: Any
        self._shares: Any
        self._totals: Any
        self._logit_slopes: Any
        self._attend: Any
        self._attend_back_room: Any
        self._attend_back: Any
        self._pack: Any
        self._product: Any
        self._factors_room: Any
        self._factors_add: Any
        self._factors_back: Any

    def norm(
        self,
        x_THD: Tensor,
        weight_D: Tensor,
        epsilon: float,
        *,
        added_TD: Tensor | None = None,
    ) -> Tensor:
        """Rows over the root of their mean square, times the weight, in the weight's type.

        Args:
            x_THD: Rows, or rows of parts that are normed each by itself.
            weight_D: Of one part.
            epsilon: Added to the mean square.
            added_TD: Is first added to the rows, in their place; of the weight's type.
        """
        assert added_TD is None or x_THD.dtype == torch.float32
        shape = _norm_shape(x_THD, weight_D, epsilon)
        out = torch.empty(x_THD.shape, dtype=weight_D.dtype)
        added = _NO_ROWS if added_TD is None else rows_of(added_TD)
        self._norm(shape, len(x_THD), rows_of(x_THD), added, weight_D.data_ptr(), rows_of(out))
        return out

    def norm_back(self, x_THD: Tensor, weight_D: Tensor, epsilon: float, dy_THD: Tensor) -> Tensor:
        """The slopes of what was normed, given those of what came of it."""
        shape = _norm_shape(x_THD, weight_D, epsilon)
        dx = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        self._norm_back(
            *(shape, len(x_THD), rows_of(x_THD), weight_D.data_ptr()),
            *(rows_of(dy_THD), rows_of(dx)),
        )
        return dx

    def turn(self, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Heads times the cosines, plus their other halves times the sines, both float32."""
        assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous()
        out = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        self._turn(
            *(*x_THD.shape, is_half(x_THD), torch.get_num_threads()),
            *(rows_of(x_THD), cos_T1D.data_ptr(), sin_T1D.data_ptr(), rows_of(out)),
        )
        return out

    def gate(self, x_TF: Tensor, *, is_gelu: bool) -> Tensor:
        """SiLU, or GELU by tanh, of the first half of each row, times its second half."""
        rows, columns = x_TF.shape
        out = torch.empty((rows, columns // 2), dtype=x_TF.dtype)
        self._gate(
            *(rows, columns // 2, is_gelu, is_half(x_TF), torch.get_num_threads()),
            *(rows_of(x_TF), rows_of(out)),
        )
        return out

    def gate_back(self, x_TF: Tensor, dy_TF: Tensor, *, is_gelu: bool) -> Tensor:
        """The slopes of both halves, given those of what came of them."""
        rows, columns = x_TF.shape
        dx = torch.empty(x_TF.shape, dtype=x_TF.dtype)
        self._gate_back(
            *(rows, columns // 2, is_gelu, is_half(x_TF), torch.get_num_threads()),
            *(rows_of(x_TF), rows_of(dy_TF), rows_of(dx)),
        )
        return dx

    def shares(
        self, logits_RV: Tensor, colder_R: Tensor, block: int, shares_RW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """E to the power of how far each logit is below its row's largest, times `colder_R`.

        Args:
            logits_RV: Of a vocabulary.
            colder_R: float32.
            block: How many shares are added up together: the width is a multiple of it.
            shares_RW: Where they are put, float32.

        Returns:
            The sum of each block and all before it, in float64; and the largest logits, float32.
        """
        rows, vocabulary = logits_RV.shape
        sums_RB = torch.empty((rows, shares_RW.shape[1] // block), dtype=torch.float64)
        most_R = torch.empty(rows, dtype=torch.float32)
        self._shares(
            *(rows, vocabulary, block, is_half(logits_RV), torch.get_num_threads()),
            *(rows_of(logits_RV), colder_R.data_ptr(), rows_of(shares_RW)),
            *(sums_RB.data_ptr(), most_R.data_ptr()),
        )
        return sums_RB, most_R

    def totals(self, logits_RV: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The last sums of `shares` with `colder_R` of 1, and the largest logits."""
        rows, vocabulary = logits_RV.shape
        totals_R = torch.empty(rows, dtype=torch.float64)
        most_R = torch.empty(rows, dtype=torch.float32)
        self._totals(
            *(rows, vocabulary, block, is_half(logits_RV), torch.get_num_threads()),
            *(rows_of(logits_RV), totals_R.data_ptr(), most_R.data_ptr()),
        )
        return totals_R, most_R

    def logit_slopes(
        self,
        logits_RV: Tensor,
        most_R: Tensor,
        factors_R: Tensor,
        targets_RK: Tensor,
        slopes_RK: Tensor,
    ) -> Tensor:
        """Each logit's share times its row's factor; plus, at each target, the target's slope.

        Args:
            logits_RV: Of a vocabulary.
            most_R: The largest of each row, float32.
            factors_R: float32.
            targets_RK: Some tokens of each row, not many; int64. One may be there more than once.
            slopes_RK: Of these, float32.
        """
        rows, vocabulary = logits_RV.shape
        targets_RK, slopes_RK = targets_RK.contiguous(), slopes_RK.contiguous()
        out_RV = torch.empty((rows, vocabulary), dtype=logits_RV.dtype)
        self._logit_slopes(
            *(rows, vocabulary, is_half(logits_RV), torch.get_num_threads()),
            *(rows_of(logits_RV), most_R.data_ptr(), factors_R.data_ptr()),
            *(targets_RK.shape[1], targets_RK.data_ptr(), slopes_RK.data_ptr(), rows_of(out_RV)),
        )
        return out_RV

    def attend(
        self,
        shape: AttentionShape,
        layer: int,
        stretches: int,
        starts: int,
        units: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sums_TH: Tensor | None = None,
    ) -> Tensor:
        """`tinsmith_attend` of `attention.c`; stretches and starts by their addresses."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        self._attend(
            *(shape, layer, stretches, starts, units, rows_of(q_THD), rows_of(k_TGD)),
            *(rows_of(v_TGD), rows_of(out_THD), None if sums_TH is None else sums_TH.data_ptr()),
        )
        return out_THD

    def attend_back(self, rows: AttentionRows, stretches: int, count: int, longest: int) -> None:
        """`tinsmith_attend_back` of `attention_back.c`; stretches by their address."""
        numbers = self._attend_back_room(rows, longest)
        room = _room(numbers * rows.threads)
        self._attend_back(rows, stretches, count, room.data_ptr(), numbers)

    def pack(self, weight_OI: Tensor) -> Tensor:
        """Weights in bfloat16 as `product` reads them."""
        outputs, inputs = weight_OI.shape
        packed = _WEIGHT_MEMORY.take(_whole_vectors(outputs) * inputs // 2)
        self._pack(outputs, inputs, rows_of(weight_OI), packed.data_ptr())
        return packed

    def product(self, x_TI: Tensor, packed: Tensor, outputs: int, bias_O: Tensor | None) -> Tensor:
        """x·Wᵀ and a bias, with a W that was packed; all in bfloat16."""
        rows, inputs = x_TI.shape
        y_TO = torch.empty((rows, outputs), dtype=torch.bfloat16)
        self._product(
            *(rows, outputs, inputs, torch.get_num_threads(), rows_of(x_TI), packed.data_ptr()),
            *(None if bias_O is None else bias_O.data_ptr(), rows_of(y_TO)),
        )
        return y_TO

    def add_factors(
        self, factors: FactorsOfLayer, flat_N: Tensor, x_TI: Tensor, y_TO: Tensor, t_TR: Tensor
    ) -> None:
        """`tinsmith_factors_add` of `factors.c`; rows are bfloat16."""
        assert x_TI.dtype == y_TO.dtype == torch.bfloat16
        rows = len(x_TI)
        room = _room(self._factors_room(factors, rows))
        self._factors_add(
            *(factors, flat_N.data_ptr(), rows, torch.get_num_threads()),
            *(rows_of(x_TI), rows_of(y_TO), rows_of(t_TR), room.data_ptr()),
        )

    def factors_back(
        self,
        factors: FactorsOfLayer,
        flat_N: Tensor,
        gradients_N: Tensor | None,
        dy_TO: Tensor,
        x_TI: Tensor,
        t_TR: Tensor,
        dx_TI: Tensor,
        *,
        is_added: bool,
    ) -> None:
        """`tinsmith_factors_back` of `factors.c`; rows are bfloat16."""
        assert dy_TO.dtype == x_TI.dtype == t_TR.dtype == dx_TI.dtype == torch.bfloat16
        rows = len(x_TI)
        room = _room(self._factors_room(factors, rows))
        self._factors_back(
            *(factors, flat_N.data_ptr(), None if gradients_N is None else gradients_N.data_ptr()),
            *(rows, torch.get_num_threads(), is_added),
            *(rows_of(dy_TO), rows_of(x_TI), rows_of(t_TR), rows_of(dx_TI), room.data_ptr()),
        )


class _OfThread(threading.local):
    room: Tensor | None = None


_OF_THREAD = _OfThread()


def _room(numbers: int) -> Tensor:
    """Memory of this thread, until it asks again: fresh memory costs more than to fill it."""
    room = _OF_THREAD.room
    if room is None or len(room) < numbers:
        # What is made in a sampler's step could else be written in such steps alone.
        with torch.inference_mode(mode=False):
            room = torch.empty(numbers, dtype=torch.int32)
        _OF_THREAD.room = room
    return room


def _whole_vectors(outputs: int) -> int:
    return -(-outputs // _OUTPUT_STEP) * _OUTPUT_STEP


def product_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if products there, in such a type, are faster by them.

    Not where a processor multiplies whole tiles of bfloat16: PyTorch's products use these.
    """
    found = kernels()
    if found is None or not found.multiplies or device.type != "cpu" or dtype != torch.bfloat16:
        return None
    return None if _has_tiles() else found


@functools.cache
def _has_tiles() -> bool:
    return torch.cpu._is_amx_tile_supported()


def rows_of(tensor: Tensor) -> Rows:
    """Where its rows are."""
    return Rows(tensor.data_ptr(), tensor.stride(0))


def is_half(tensor: Tensor) -> bool:
    """Whether its numbers have sixteen bits."""
    return tensor.dtype == torch.bfloat16


def _norm_shape(x_THD: Tensor, weight_D: Tensor, epsilon: float) -> _NormShape:
    parts = x_THD.shape[1] if x_THD.dim() == 3 else 1
    return _kept_shape(
        *(parts, weight_D.shape[0], is_half(x_THD), is_half(weight_D)),
        *(torch.get_num_threads(), epsilon),
    )


@functools.lru_cache(64)
def _kept_shape(*fields: float) -> _NormShape:
    return _NormShape(*fields)


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they can compute with all of these; None if PyTorch is to do it."""
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
    """Whether the parts of each row lie one behind the other."""
    return x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine; None if there are none, or they are switched off."""
    path = library_path(_kind_of_machine())
    if os.environ.get(SWITCH, "").lower() in ("off", "0") or not path.exists():
        return None
    try:
        return Kernels(path)
    except OSError as exc:  # compiled where there were other libraries of C and OpenMP than here
        _log.warning("computing without compiled kernels, which cannot be loaded: %s", exc)
        return None


def _kind_of_machine() -> str:
    """As the build names it; of its vector instructions PyTorch knows whether they are there."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return "x86-64-v4-bf16" if torch.cpu._is_avx512_bf16_supported() else "x86-64-v4"
    return "x86-64-v3" if capability == "AVX2" else platform.machine()
