"""Attention by kernels, in samples and passes, and its way back."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.kernel_cases import DTYPES, close, near, noise
from tinsmith.engine.model.architecture import Architecture, LayerShape
from tinsmith.engine.model.attention import AttentionRule
from tinsmith.engine.model.kv_cache import CachedAttention, CachedSegment, KvBuffer, SequenceKv
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment


def _run(
    dtype: torch.dtype, length: int, *, heads: int, key_heads: int, size: int, seed: int
) -> KvBuffer:
    """One of a single layer that holds so many tokens."""
    shape = Architecture(
        name="test",
        vocabulary=8,
        hidden=heads * size,
        inner=32,
        heads=heads,
        kv_heads=key_heads,
        head_size=size,
        max_context=4096,
        layers=(LayerShape(),),
        ropes=(),
        norm_epsilon=1e-5,
    )
    run = KvBuffer(shape, dtype, torch.device("cpu"))
    run.reserve(length)
    if length:
        (place_PGD,) = run.places(0, length)
        place_PGD.copy_(noise(*place_PGD.shape, dtype=dtype, seed=100 + seed))
    run.length = length
    return run


def _wanted(segment: CachedSegment, q_LHD: Tensor, window: int | None) -> Tensor:
    """By the formula, for each query by itself, in float64."""
    own, shared = segment.kv.own, segment.kv.shared
    runs = [
        *([] if shared is None else [shared.read(0, shared.length)]),
        own.read(0, segment.own_end),
    ]
    keys, values = (torch.cat([one[which][0][0] for one in runs], 1).double() for which in (0, 1))
    group = q_LHD.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    found = []
    for row, q_HD in enumerate(q_LHD.double()):
        seen = segment.sequence_length - len(q_LHD) + row + 1
        first = 0 if window is None else max(0, seen - window)
        scores_HS = (keys[:, first:seen] @ q_HD.unsqueeze(-1)).squeeze(-1) * q_HD.shape[-1] ** -0.5
        found.append((scores_HS.softmax(-1).unsqueeze(1) @ values[:, first:seen]).squeeze(1))
    return torch.stack(found)


@pytest.mark.usefixtures("by_kernels", "threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 5, 100])
def test_attention_matches_the_formula_and_rows_are_independent(
    dtype: torch.dtype, heads: int, key_heads: int, size: int, window: int | None
) -> None:
    """Single rows and several, at the start and later, beside a run that they share and without."""
    a_run = functools.partial(_run, dtype, heads=heads, key_heads=key_heads, size=size)
    shared = a_run(70, seed=9)
    parts: list[tuple[KvBuffer | None, int, int]] = [
        *((None, 0, 40), (None, 63, 1), (None, 64, 1), (None, 130, 70), (shared, 0, 1)),
        *((shared, 0, 33), (shared, 20, 1), (None, 0, 1), (shared, 100, 3)),
    ]
    rows = sum(count for _, _, count in parts)
    q_THD, k_TGD, v_TGD = (
        noise(rows, some, size, dtype=dtype, seed=seed)
        for seed, some in enumerate((heads, key_heads, key_heads))
    )
    rule = AttentionRule(size**-0.5, window)

    def attend(which: list[int]) -> list[tuple[CachedSegment, Tensor, Tensor]]:
        segments: list[CachedSegment] = []
        taken: list[Tensor] = []
        row = 0
        for index in which:
            run, place, count = parts[index]
            keys = SequenceKv(run, a_run(place, seed=index))
            segments.append(CachedSegment(row, row + count, keys, place))
            start = sum(more for _, _, more in parts[:index])
            taken.append(torch.arange(start, start + count))
            row += count
        place_T = torch.cat(taken)
        attention = CachedAttention(segments)
        q, k, v = q_THD[place_T], k_TGD[place_T], v_TGD[place_T]
        out_THD = attention.attend(0, rule, q, k, v)
        attention.done()
        return [(one, q[one.start : one.end], out_THD[one.start : one.end]) for one in segments]

    together = attend(list(range(len(parts))))

    for index, (segment, q_LHD, out_LHD) in enumerate(together):
        close(out_LHD, _wanted(segment, q_LHD, window))
        ((_, _, alone_LHD),) = attend([index])
        assert torch.equal(alone_LHD, out_LHD), index


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_bit_identical_however_a_sequence_is_split(dtype: torch.dtype) -> None:
    """All at once, token by token, and in two parts at an odd place."""
    q_THD, k_TGD, v_TGD = (
        noise(150, some, 64, dtype=dtype, seed=seed) for seed, some in enumerate((6, 2, 2))
    )

    def read(*cuts: int) -> Tensor:
        keys = SequenceKv(None, _run(dtype, 0, heads=6, key_heads=2, size=64, seed=0))
        found = []
        for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
            attention = CachedAttention([CachedSegment(0, end - start, keys, start)])
            given = (rows[start:end] for rows in (q_THD, k_TGD, v_TGD))
            found.append(attention.attend(0, AttentionRule(0.125), *given))
            attention.done()
        return torch.cat(found)

    whole = read()

    assert torch.equal(read(*range(1, 150)), whole)
    assert torch.equal(read(37), whole)


@pytest.mark.usefixtures("by_kernels")
def test_the_memory_layout_of_heads_changes_nothing() -> None:
    """Of a lone row they lie alike either way, so its bits would follow from rows beside it."""
    q_THD, k_TGD, v_TGD = (
        noise(9, some, 64, dtype=torch.float32, seed=seed) for seed, some in enumerate((6, 2, 2))
    )

    def attend(*given: Tensor) -> Tensor:
        keys = SequenceKv(None, _run(torch.float32, 0, heads=6, key_heads=2, size=64, seed=0))
        attention = CachedAttention([CachedSegment(0, 9, keys, 0)])
        return attention.attend(0, AttentionRule(0.125), *given)

    rows_first = q_THD, k_TGD, v_TGD
    heads_first = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in rows_first]

    assert torch.equal(attend(*heads_first), attend(*rows_first))


@pytest.mark.usefixtures("by_kernels")
def test_rows_of_another_dtype_than_the_kv_cache_are_rejected() -> None:
    """Kernels would write beyond the run: float32 takes twice the room of bfloat16."""
    run = _run(torch.bfloat16, 0, heads=2, key_heads=2, size=32, seed=0)
    attention = CachedAttention([CachedSegment(0, 64, SequenceKv(None, run), 0)])

    with pytest.raises(RuntimeError, match="BFloat16"):
        attention.attend(0, AttentionRule(1.0), *torch.ones(3, 64, 2, 32))


@pytest.mark.usefixtures("by_kernels")
def test_layers_of_several_sizes_share_one_packed_batch() -> None:
    """Models of which nobody knows more yet: `load_with_transformers.py` finds out by a pass."""
    attention = PackedAttention([PackedSegment(0, 40)])

    for size in (32, 64, 128):
        given = [noise(40, 2, size, dtype=torch.float32, seed=seed) for seed in range(3)]
        q, k, v = (one.transpose(0, 1) for one in given)
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found_THD = attention.attend(0, AttentionRule(size**-0.5), *given)
        close(found_THD, wanted.transpose(0, 1).double())


@pytest.mark.usefixtures("by_kernels")
def test_values_of_another_size_than_keys_are_rejected() -> None:
    attention = PackedAttention([PackedSegment(0, 40)])
    q_THD, v_THD = torch.ones(40, 2, 64), torch.ones(40, 2, 32)

    with pytest.raises(RuntimeError, match="size"):
        attention.attend(0, AttentionRule(1.0), q_THD, q_THD, v_THD)


_ON_SMALL_STACKS = """
import threading, torch
from tests.numerics.test_attention_kernels import _run
from tinsmith.engine.model.attention import AttentionRule
from tinsmith.engine.model.kv_cache import CachedAttention
from tinsmith.engine.model.kv_cache import CachedSegment, SequenceKv

def attend():
    torch.set_num_threads(2)
    run = _run(torch.float32, 0, heads=2, key_heads=2, size=256, seed=0)
    attention = CachedAttention([CachedSegment(0, 96, SequenceKv(None, run), 0)])
    print(attention.attend(0, AttentionRule(0.1), *torch.ones(3, 96, 2, 256)).sum())

threading.stack_size(256 * 1024)
thread = threading.Thread(target=attend)
thread.start()
thread.join()
"""


def test_attention_needs_no_large_thread_stack() -> None:
    """Neither of whoever calls it nor of the threads that help."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_SMALL_STACKS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_STACKSIZE": "256k"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "tensor(49152.)\n"), done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_within_the_window_is_unaffected_by_longer_ones(dtype: torch.dtype) -> None:
    """Whatever is computed with masks on the way back."""
    q_THD, k_TGD, v_TGD = (
        noise(60, heads, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2))
    )
    rule = AttentionRule(0.125, 10)
    given = q_THD, k_TGD, v_TGD

    alone = PackedAttention([PackedSegment(0, 8)]).attend(0, rule, *(rows[:8] for rows in given))
    beside = PackedAttention([PackedSegment(0, 8), PackedSegment(8, 60)]).attend(0, rule, *given)

    assert torch.equal(beside[:8], alone)


_PACKS: list[list[PackedSegment]] = [
    [PackedSegment(0, 1)],
    [PackedSegment(0, 16), PackedSegment(16, 33), PackedSegment(33, 34)],
    [PackedSegment(0, 130), PackedSegment(130, 330)],
    [
        PackedSegment(0, 70),
        PackedSegment(70, 75, (0, 70)),
        PackedSegment(75, 205, (0, 70)),
        PackedSegment(205, 260),
    ],
    [
        PackedSegment(0, 9, (20, 84)),
        PackedSegment(9, 20),
        PackedSegment(20, 84),
        PackedSegment(84, 85, (20, 84)),
    ],
]
"""Less than a block of keys and more, and prefixes of several, before and behind what follows."""


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("segments", _PACKS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_attention_backward_matches_the_formula(
    segments: list[PackedSegment], heads: int, key_heads: int, size: int, window: int | None
) -> None:
    rows = segments[-1].end
    given = [
        noise(rows, some, size, dtype=torch.bfloat16, seed=seed)
        for seed, some in enumerate((heads, key_heads, key_heads))
    ]
    dout_THD = noise(rows, heads, size, dtype=torch.bfloat16, seed=9)

    found = _slopes_of_attention(segments, given, dout_THD, window)

    wanted = _wanted_slopes(segments, given, dout_THD, window)
    for one, formula in zip(found, wanted, strict=True):
        near(one, formula)


def _slopes_of_attention(
    segments: list[PackedSegment], given: list[Tensor], dout_THD: Tensor, window: int | None = None
) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    rule = AttentionRule(given[0].shape[2] ** -0.5, window)
    PackedAttention(segments).attend(0, rule, *leaves).backward(dout_THD)
    return [one.grad for one in leaves if one.grad is not None]


def _wanted_slopes(
    segments: list[PackedSegment], given: list[Tensor], dout_THD: Tensor, window: int | None
) -> list[Tensor]:
    """By autograd of the formula, in float64."""
    leaves = [one.double().requires_grad_() for one in given]
    q_THD, k_THD, v_THD = (
        one.repeat_interleave(given[0].shape[1] // one.shape[1], 1) for one in leaves
    )
    for start, end, prefix in segments:
        before = range(0) if prefix is None else range(*prefix)
        place = torch.tensor([*before, *range(start, end)])
        q, k, v = (one.transpose(0, 1) for one in (q_THD[start:end], k_THD[place], v_THD[place]))
        seen = torch.ones(end - start, len(place), dtype=torch.bool).tril(len(before))
        if window is not None:
            seen = seen.triu(len(before) - window + 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        out.transpose(0, 1).backward(dout_THD[start:end].double(), retain_graph=True)
    return [one.grad for one in leaves if one.grad is not None]


@pytest.mark.usefixtures("products", "threads")
def test_gradients_of_attention_do_not_depend_on_other_rows() -> None:
    """Bit for bit: alone with one thread, and in a pack with others before and behind."""
    mine = [PackedSegment(0, 70), PackedSegment(70, 105, (0, 70)), PackedSegment(105, 240)]
    others = [PackedSegment(0, 33), *(_moved(one, 33) for one in mine), PackedSegment(273, 400)]
    given = [noise(400, n, 64, dtype=torch.bfloat16, seed=n) for n in (6, 2, 2)]
    dout_THD = noise(400, 6, 64, dtype=torch.bfloat16, seed=9)

    beside = _slopes_of_attention(others, given, dout_THD)

    torch.set_num_threads(1)
    alone = _slopes_of_attention(mine, [one[33:273] for one in given], dout_THD[33:273])
    assert all(torch.equal(one, two[33:273]) for one, two in zip(alone, beside, strict=True))


def _moved(segment: PackedSegment, by: int) -> PackedSegment:
    prefix = segment.prefix and (segment.prefix[0] + by, segment.prefix[1] + by)
    return PackedSegment(segment.start + by, segment.end + by, prefix)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("window", [3, 10, 13, 30])
def test_backward_through_sliding_windows_matches_autograd(window: int) -> None:
    """Of sequences within them and of longer ones, behind a prefix and without."""
    prefix, lone = (0, 11), PackedSegment(27, 60)
    tails = [
        PackedSegment(11, 15, prefix),
        PackedSegment(15, 16, prefix),
        PackedSegment(16, 27, prefix),
    ]
    segments = [PackedSegment(*prefix), *tails, lone]
    q, k, v = (
        noise(60, heads, 64, dtype=torch.float32, seed=seed).requires_grad_()
        for seed, heads in enumerate((4, 2, 2))
    )
    rule, slopes_THD = (
        AttentionRule(0.3, window),
        noise(60, 4, 64, dtype=torch.float32, seed=7),
    )

    def gradients(out_THD: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out_THD, (q, k, v), slopes_THD)

    found_THD = PackedAttention(segments).attend(0, rule, q, k, v)

    wanted_THD = torch.cat([_in_window(one, q, k, v, rule) for one in segments])
    close(found_THD.detach(), wanted_THD.detach().double())
    for found, wanted in zip(gradients(found_THD), gradients(wanted_THD), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _in_window(
    segment: PackedSegment, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule
) -> Tensor:
    """By the formula, of each head by itself."""
    rows = list(range(segment.start, segment.end))
    seen = [*range(*(segment.prefix or (0, 0))), *rows]
    apart_LS = torch.arange(len(seen))[-len(rows) :, None] - torch.arange(len(seen))
    is_hidden_LS = (apart_LS < 0) | (apart_LS >= (rule.window or len(seen)))
    outs = []
    for head in range(q.shape[1]):
        key_head = head * k.shape[1] // q.shape[1]
        scores_LS = rule.scale * q[rows, head] @ k[seen, key_head].T
        weights_LS = scores_LS.masked_fill(is_hidden_LS, -math.inf).softmax(-1)
        outs.append(weights_LS @ v[seen, key_head])
    return torch.stack(outs, 1)
