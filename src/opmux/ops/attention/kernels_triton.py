"""Triton kernels of attention: an online softmax over blocks of keys, and its merge when the keys are split.

The rows of one program are queries, or for few queries the (query, head) pairs that share a key head, so that a decode
step reads the cache once. A decode step also splits the keys over programs (flash-decoding) and merges the parts by
their log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.triton_launch import Launch, kernel, new, next_power_of_2, plan
from ..logits.kernels_triton import tanh

_MOST_SPLITS = 128
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_ptr, v_ptr, mask_rows, start, stop, k_token, v_token, n_keys, position, in_rows,
    window, scale, soft_cap,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BOUNDARY: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys start .. stop-1 into the running softmax. Only a BOUNDARY range has keys that some row may not
    see."""
    feature = tl.arange(0, BLOCK_D)
    feature_v = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, stop, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        in_keys = at < n_keys
        k_at = k_ptr + at.to(tl.int64)[:, None] * k_token + feature[None, :]
        if BOUNDARY:
            k = tl.load(k_at, mask=in_keys[:, None] & (feature < D)[None, :], other=0.0)
        elif BLOCK_D != D:
            k = tl.load(k_at, mask=(feature < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP:
            score = soft_cap * tanh(score / soft_cap)
        if MASK == 1:
            score += tl.load(mask_rows + at[None, :], mask=in_rows[:, None] & in_keys[None, :], other=0.0).to(
                tl.float32
            )
        score = score * _LOG2_E
        if MASK == 2:
            allowed = tl.load(mask_rows + at[None, :], mask=in_rows[:, None] & in_keys[None, :], other=0)
            score = tl.where(allowed != 0, score, float("-inf"))
        if BOUNDARY:
            visible = in_keys[None, :]
            if CAUSAL:
                visible = visible & (at[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (at[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, axis=1))
        if BOUNDARY or MASK > 0:
            # A row that has seen no key yet: any finite reference gives it exp2(-inf) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            reference = new_max
        p = tl.exp2(score - reference[:, None])
        keep = tl.exp2(row_max - reference)
        row_sum = row_sum * keep + tl.sum(p, axis=1)
        v_at = v_ptr + at.to(tl.int64)[:, None] * v_token + feature_v[None, :]
        if BOUNDARY:
            v = tl.load(v_at, mask=in_keys[:, None] & (feature_v < DV)[None, :], other=0.0)
        elif BLOCK_DV != DV:
            v = tl.load(v_at, mask=(feature_v < DV)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@kernel(loose=("mask_ptr", "lse_ptr"))
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, lse_ptr,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    out_batch: tl.int64, out_token: tl.int64, out_head: tl.int64, out_split: tl.int64,
    mask_batch: tl.int64, mask_head: tl.int64, mask_token: tl.int64,
    n_tokens: tl.int32, n_keys: tl.int32, n_heads: tl.int32, heads_per_key: tl.int32, n_tiles: tl.int32,
    n_splits: tl.int32, window: tl.int32, scale: tl.float32, soft_cap: tl.float32,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    # Strides come in units of UNIT elements: 8 tells the compiler that 16-byte loads are safe, for head sizes like 72
    # too.
    q_batch, q_token, q_head = q_batch * UNIT, q_token * UNIT, q_head * UNIT
    k_batch, k_token, k_head = k_batch * UNIT, k_token * UNIT, k_head * UNIT
    v_batch, v_token, v_head = v_batch * UNIT, v_token * UNIT, v_head * UNIT
    out_batch, out_token, out_head, out_split = out_batch * UNIT, out_token * UNIT, out_head * UNIT, out_split * UNIT
    # Long causal tiles first, so that short ones fill the end.
    tile = n_tiles - 1 - tl.program_id(0) % n_tiles
    groups = n_heads // GROUP
    batch = (tl.program_id(0) // n_tiles // groups).to(tl.int64)
    first_head = (tl.program_id(0) // n_tiles) % groups * GROUP
    split = tl.program_id(1)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = first_head + row % GROUP
    in_rows = token < n_tokens
    feature = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * q_batch + token.to(tl.int64)[:, None] * q_token + head.to(tl.int64)[:, None] * q_head
    q = tl.load(q_at + feature[None, :], mask=in_rows[:, None] & (feature < D)[None, :], other=0.0)
    key_head = (first_head // heads_per_key).to(tl.int64)
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    mask_rows = mask_ptr + batch * mask_batch
    mask_rows = mask_rows + token.to(tl.int64)[:, None] * mask_token + head.to(tl.int64)[:, None] * mask_head

    # Keys lo .. hi-1 are seen by some row of the tile, keys full_lo .. full_hi-1 by all.
    behind = n_keys - n_tokens
    position = token + behind
    lowest = tile * BLOCK_M // GROUP + behind
    highest = tl.minimum(n_tokens - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP) + behind
    lo = 0
    hi = n_keys
    full_lo = 0
    full_hi = n_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        hi = tl.minimum(n_keys, highest + 1)
        full_hi = tl.minimum(n_keys, lowest + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        lo = tl.maximum(0, lowest - window + 1) // BLOCK_N * BLOCK_N
        full_lo = (tl.maximum(0, highest - window + 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if SPLIT:
        chunk = tl.cdiv(tl.cdiv(hi - lo, BLOCK_N), n_splits) * BLOCK_N
        lo = lo + split * chunk
        hi = tl.minimum(hi, lo + chunk)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.maximum(hi, lo))
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), tl.maximum(hi, full_lo))

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOW:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_ptr, v_ptr, mask_rows, lo, full_lo, k_token, v_token, n_keys, position, in_rows,
            window, scale, soft_cap, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, True, CAUSAL, WINDOW, SOFT_CAP, MASK, PRECISION,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_ptr, v_ptr, mask_rows, full_lo, full_hi, k_token, v_token, n_keys, position,
        in_rows, window, scale, soft_cap, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, False,
        CAUSAL, WINDOW, SOFT_CAP, MASK, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_ptr, v_ptr, mask_rows, full_hi, hi, k_token, v_token, n_keys, position, in_rows,
        window, scale, soft_cap, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, True, CAUSAL, WINDOW, SOFT_CAP, MASK, PRECISION,
    )  # fmt: skip

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # a row without a visible key gives zeros
    feature_v = tl.arange(0, BLOCK_DV)
    out_at = out_ptr + split.to(tl.int64) * out_split + batch * out_batch
    out_at = out_at + token.to(tl.int64)[:, None] * out_token + head.to(tl.int64)[:, None] * out_head
    in_out = in_rows[:, None] & (feature_v < DV)[None, :]
    tl.store(out_at + feature_v[None, :], out.to(out_ptr.dtype.element_ty), mask=in_out)
    if SPLIT:
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        lse_at = lse_ptr + ((batch * n_tokens + token) * n_heads + head) * n_splits + split
        tl.store(lse_at, lse, mask=in_rows)


@kernel(multiples=("part_split", "width"))
def _merge_kernel(
    part_ptr, out_ptr, lse_ptr, part_split: tl.int64, width: tl.int64, n_splits: tl.int32,
    MOST_SPLITS: tl.constexpr, STEP: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse_ptr += row * n_splits
    every = tl.arange(0, MOST_SPLITS)
    largest = tl.max(tl.load(lse_ptr + every, mask=every < n_splits, other=float("-inf")), axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    feature = tl.arange(0, BLOCK_DV)
    in_width = feature < width
    acc = tl.zeros([STEP, BLOCK_DV], tl.float32)
    total = tl.zeros([STEP], tl.float32)
    for first in range(0, n_splits, STEP):
        split = first + tl.arange(0, STEP)
        in_splits = split < n_splits
        weight = tl.exp2(tl.load(lse_ptr + split, mask=in_splits, other=float("-inf")) - largest)
        part_at = part_ptr + split.to(tl.int64)[:, None] * part_split + row * width + feature[None, :]
        part = tl.load(part_at, mask=in_splits[:, None] & in_width[None, :], other=0.0)
        acc += part * weight[:, None]
        total += weight
    weights = tl.sum(total, axis=0)
    out = tl.sum(acc, axis=0) / tl.where(weights == 0.0, 1.0, weights)
    tl.store(out_ptr + row * width + feature, out.to(out_ptr.dtype.element_ty), mask=in_width)


class Tile(NamedTuple):
    """How one call is cut. ``group``: heads per program; ``splits``: programs that share the keys of one tile.

    Only whether ``splits`` is above 1 is compiled in, so that a growing cache compiles nothing.
    """

    group: int
    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


@functools.lru_cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count)


def _precision(q: Tensor) -> str:
    """Of the products of fp32 blocks. Three tf32 products come close to fp32 and stay on the matrix units."""
    return "tf32x3" if q.dtype == torch.float32 and torch.version.hip is None and q.is_cuda else "ieee"


def tile(q: Tensor, k: Tensor, v: Tensor, window: int, changes_scores: bool) -> Tile:
    """The cut for q [B, S, N, D], k [B, L, K, D], v [B, L, K, Dv]; a mask or a cap on the scores takes registers."""
    batch, n_tokens, n_heads, head_size = q.shape
    n_keys, key_heads = k.shape[1], k.shape[2]
    width = max(next_power_of_2(max(head_size, v.shape[-1])), 16)
    sharing = n_heads // key_heads
    wide = q.dtype == torch.float32 or width > 256
    if n_tokens * sharing <= 64:
        block_m = max(16, next_power_of_2(n_tokens * sharing))
        block_n = 32 if wide or width > 128 else 64
        seen = min(n_keys, window + n_tokens) if window else n_keys
        most = -(-seen // (2 * block_n))
        # As many programs as processors: 32/8 heads of 128, L = 4096, one row on an H200 11.8 us; twice as many 13.1.
        splits = max(1, min(_MOST_SPLITS, most, -(-_processors(q.device) // (batch * key_heads))))
        if not wide and batch * key_heads >= _processors(q.device):
            splits = 1  # the heads alone fill the chip
        return Tile(sharing, block_m, block_n, splits, 4, 2 if wide or block_m == 64 else 3)
    if wide:
        return Tile(1, 32 if width > 128 else 64, 32, 1, 4, 2)
    if changes_scores:
        return Tile(1, 64 if width > 128 else 128, 32, 1, 8, 2)
    if n_tokens <= 256 and width <= 128:
        # Causal, 32/8 heads of 128: S = 128 6.8 us, S = 256 9.3; with blocks of 128 x 128 9.2 and 11.9.
        return Tile(1, 64, 64, 1, 4, 2)
    if width <= 64:
        return Tile(1, 128, 64, 1, 4, 3)
    return Tile(1, 128, 128, 1, 8, 3) if width <= 128 else Tile(1, 128, 64, 1, 8, 2)


class _Plan(NamedTuple):
    """The launches of one call, and the shapes of what they write. Without ``merge`` the keys are not split."""

    attend: Launch
    merge: Launch | None
    out: tuple[int, ...]
    parts: tuple[int, ...]
    log_sums: tuple[int, ...]


@plan
def _plan(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    mask_strides: tuple[int, ...],
    mask_kind: int,
    dtypes: tuple[torch.dtype, ...],
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    precision: str,
    cut: Tile,
) -> _Plan:
    """``sizes``: B, S, N, D, L, K, Dv. ``strides``: batch, token and head, of q, k and v."""
    batch, n_tokens, n_heads, head_size, n_keys, key_heads, width = sizes
    group, block_m, block_n, splits, warps, stages = cut
    n_tiles = -(-n_tokens * group // block_m)
    out = (batch, n_tokens, n_heads, width)
    split_stride = batch * n_tokens * n_heads * width if splits > 1 else 0
    strides = (*strides, n_tokens * n_heads * width, n_heads * width, width, split_stride)
    unit = 1 if any(step % 8 for step in strides) else 8
    scalars = (
        *(step // unit for step in strides), *mask_strides,
        n_tokens, n_keys, n_heads, n_heads // key_heads, n_tiles, splits, window, scale, soft_cap,
    )  # fmt: skip
    block_dv = max(16, next_power_of_2(width))
    constants = (
        group, block_m, block_n, splits > 1, head_size, width, max(16, next_power_of_2(head_size)), block_dv,
        causal, window > 0, soft_cap > 0.0, mask_kind, precision, unit,
    )  # fmt: skip
    grid = (n_tiles * batch * (n_heads // group), splits, 1)
    attend = _attention_kernel.prepare(grid, scalars, constants, warps, stages)
    if splits == 1:
        return _Plan(attend, None, out, (), ())
    grid = (batch * n_tokens * n_heads, 1, 1)
    merge = _merge_kernel.prepare(grid, (split_stride, width, splits), (_MOST_SPLITS, 16, block_dv), 4)
    return _Plan(attend, merge, out, (splits, *out), (*out[:3], splits))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    config: Tile | None = None,
) -> Tensor:
    """``attention_triton`` with a cut other than ``tile``'s."""
    batch, n_tokens, n_heads, head_size = q.shape
    n_keys, key_heads, width = k.shape[1], k.shape[2], v.shape[-1]
    if batch == 0 or n_tokens == 0 or n_heads == 0 or width == 0:
        return torch.empty((batch, n_tokens, n_heads, width), dtype=q.dtype, device=q.device)
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    mask_kind, mask_strides, mask_dtype = 0, (0, 0, 0), q.dtype
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_kind = 2 if mask.dtype == torch.bool else 1
        mask_strides = tuple(
            0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)
        )  # type: ignore[assignment]
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask_dtype = mask.dtype
    sizes = (batch, n_tokens, n_heads, head_size, n_keys, key_heads, width)
    attend, merge, out_shape, parts_shape, log_sums_shape = _plan(
        sizes, (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), mask_strides, mask_kind, (q.dtype, mask_dtype),
        scale, causal, window, soft_cap, _precision(q),
        config or tile(q, k, v, window, mask is not None or soft_cap > 0.0),
    )  # fmt: skip
    out = new(out_shape, q.dtype, q.device)
    if merge is None:
        attend(q, k, v, out, q if mask is None else mask, q)
        return out
    parts, log_sums = new(parts_shape, torch.float32, q.device), new(log_sums_shape, torch.float32, q.device)
    attend(q, k, v, parts, q if mask is None else mask, log_sums)
    merge(parts, out, log_sums)
    return out


@opaque(fake=lambda q, k, v, *_: q.new_empty((*q.shape[:3], v.shape[-1])))
def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float,
    causal: bool,
    sliding_window: int,
    soft_cap: float,
) -> Tensor:
    """``softmax(cap(scale * q k^T) + mask) v`` per head; query head h reads key head ``h * K // N``.

    Shapes:  query [B, S, N, D], key [B, L, K, D], value [B, L, K, Dv], any strides with a dense last dimension;
             attn_mask [B or 1, N or 1, S or 1, >= L], boolean (True: attend) or floating (added) -> [B, S, N, Dv],
             contiguous.
    Order:   the queries are the last S of the L keys. ``causal``: a query sees keys up to its own position;
             ``sliding_window`` w > 0: only the last w of them; ``soft_cap`` c > 0: ``c * tanh(score / c)`` before the
             mask.
    Casts:   fp32 scores, softmax and sums; probabilities are rounded to value's dtype for the second product; one
             rounding at the end. fp32 products are full fp32, not tf32.
    Rows without a visible key give zeros. Mutates nothing.
    """
    return launch(query, key, value, attn_mask, scale, causal, sliding_window, soft_cap)
