"""Triton kernels of encoder attention: packed segments, and a bias by the distance of two places in a grid.

One program takes a tile of queries of one head. It finds its segment from the boundaries itself, so that a call needs
neither the longest segment nor a wait for the device: a row of S tokens in n segments has at most ``S // BLOCK_M + n``
tiles, of which tile number ``bounds[i] // BLOCK_M + i`` is the first of segment i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.triton_launch import Launch, kernel, new, next_power_of_2, plan

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(
    acc, row_sum, row_max, q, k_ptr, v_ptr, by_row, by_column, start, stop, end, k_token, v_token, columns, in_rows, scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDARY: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys start .. stop-1 into the running softmax. Only a BOUNDARY range reaches beyond ``end``."""
    feature = tl.arange(0, BLOCK_D)
    for first in tl.range(start, stop, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        in_keys = at < end
        k_at = k_ptr + at.to(tl.int64)[:, None] * k_token + feature[None, :]
        v_at = v_ptr + at.to(tl.int64)[:, None] * v_token + feature[None, :]
        if BOUNDARY:
            k = tl.load(k_at, mask=in_keys[:, None] & (feature < D)[None, :], other=0.0)
        elif BLOCK_D != D:
            k = tl.load(k_at, mask=(feature < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if BIAS:
            inside = in_rows[:, None] & in_keys[None, :]
            score += tl.load(by_row + (at // columns)[None, :], mask=inside, other=0.0)
            score += tl.load(by_column + (at % columns)[None, :], mask=inside, other=0.0)
        score = score * _LOG2_E
        if BOUNDARY:
            score = tl.where(in_keys[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, axis=1))
        p = tl.exp2(score - new_max[:, None])
        keep = tl.exp2(row_max - new_max)
        row_sum = row_sum * keep + tl.sum(p, axis=1)
        if BOUNDARY:
            v = tl.load(v_at, mask=in_keys[:, None] & (feature < D)[None, :], other=0.0)
        elif BLOCK_D != D:
            v = tl.load(v_at, mask=(feature < D)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@kernel(loose=("bounds_ptr", "by_row_ptr", "by_column_ptr"))
def _encoder_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, bounds_ptr, by_row_ptr, by_column_ptr,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, out_batch: tl.int64, out_token: tl.int64, out_head: tl.int64,
    n_tokens: tl.int32, n_segments: tl.int32, n_heads: tl.int32, heads_per_key: tl.int32, rows: tl.int32, columns: tl.int32,
    scale: tl.float32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # Strides come in units of UNIT elements: 8 tells the compiler that 16-byte loads are safe, for head sizes like 72
    # too.
    q_batch, q_token, q_head = q_batch * UNIT, q_token * UNIT, q_head * UNIT
    k_batch, k_token, k_head = k_batch * UNIT, k_token * UNIT, k_head * UNIT
    v_batch, v_token, v_head = v_batch * UNIT, v_token * UNIT, v_head * UNIT
    out_batch, out_token, out_head = out_batch * UNIT, out_token * UNIT, out_head * UNIT
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    begin = 0
    end = n_tokens
    if PACKED:
        # The last segment whose first tile is not behind this one.
        low = 0
        high = n_segments
        while low < high:
            middle = (low + high) // 2
            is_behind = tl.load(bounds_ptr + middle).to(tl.int32) // BLOCK_M + middle > tile
            low = tl.where(is_behind, low, middle + 1)
            high = tl.where(is_behind, middle, high)
        segment = tl.maximum(low - 1, 0)
        begin = tl.minimum(tl.maximum(tl.load(bounds_ptr + segment).to(tl.int32), 0), n_tokens)
        end = tl.minimum(tl.load(bounds_ptr + segment + 1).to(tl.int32), n_tokens)
        tile -= begin // BLOCK_M + segment
    token = begin + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = token < end
    # A tile behind its segment's last token has nothing to do.
    stop = tl.where(begin + tile * BLOCK_M < end, end, begin)
    full = begin + (stop - begin) // BLOCK_N * BLOCK_N

    feature = tl.arange(0, BLOCK_D)
    inside = in_rows[:, None] & (feature < D)[None, :]
    q_at = q_ptr + batch * q_batch + head * q_head + token.to(tl.int64)[:, None] * q_token + feature[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    k_ptr += batch * k_batch + head // heads_per_key * k_head
    v_ptr += batch * v_batch + head // heads_per_key * v_head
    place = (batch * n_heads + head) * n_tokens + token.to(tl.int64)[:, None]
    by_row = by_row_ptr + place * rows
    by_column = by_column_ptr + place * columns

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, row_sum, row_max = _fold(
        acc, row_sum, row_max, q, k_ptr, v_ptr, by_row, by_column, begin, full, end, k_token, v_token, columns, in_rows,
        scale, BLOCK_N, D, BLOCK_D, False, BIAS, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = _fold(
        acc, row_sum, row_max, q, k_ptr, v_ptr, by_row, by_column, full, stop, end, k_token, v_token, columns, in_rows,
        scale, BLOCK_N, D, BLOCK_D, True, BIAS, PRECISION,
    )  # fmt: skip
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_at = out_ptr + batch * out_batch + head * out_head + token.to(tl.int64)[:, None] * out_token + feature[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


@plan
def _plan(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    segments: int,
    grid: tuple[int, int],
    scale: float,
    precision: str,
) -> Launch:
    """``sizes``: B, S, N, K, D. ``strides``: batch, token and head, of q, k and v. ``segments`` 0: whole rows."""
    batch, tokens, heads, key_heads, size = sizes
    strides = (*strides, tokens * heads * size, heads * size, size)
    unit = 1 if any(step % 8 for step in strides) else 8
    width = max(16, next_power_of_2(size))
    wide = dtypes[0] == torch.float32 or width > 128
    short = -(-tokens // max(segments, 1)) <= 256
    block_m, block_n = (64 if short or wide else 128), (32 if wide or grid[1] else 64)
    scalars = (
        *(step // unit for step in strides), tokens, segments, heads, heads // key_heads, *grid, scale,
    )  # fmt: skip
    constants = (block_m, block_n, size, width, segments > 0, grid[1] > 0, precision, unit)
    tiles = tokens // block_m + segments if segments else -(-tokens // block_m)
    return _encoder_kernel.prepare((tiles, heads, batch), scalars, constants, 8 if block_m == 128 and width > 64 else 4, 2)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, by_row: Tensor | None, by_column: Tensor | None, scale: float
) -> Tensor:
    batch, tokens, heads, size = q.shape
    # Boundaries in the device's memory are not read here, so tokens may be left over.
    out = new(tuple(q.shape), q.dtype, q.device) if bounds is None else q.new_zeros(q.shape)
    segments = 0 if bounds is None else bounds.numel() - 1
    if q.numel() == 0 or (bounds is not None and segments == 0):
        return out
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    precision = "tf32x3" if q.dtype == torch.float32 and torch.version.hip is None and q.is_cuda else "ieee"
    grid = (0, 0) if by_row is None or by_column is None else (by_row.shape[-1], by_column.shape[-1])
    bounds = q if bounds is None else bounds
    launch = _plan(
        (batch, tokens, heads, k.shape[2], size), (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        (q.dtype, bounds.dtype), segments, grid, scale, precision,
    )  # fmt: skip
    launch(q, k, v, out, bounds, q if by_row is None else by_row, q if by_column is None else by_column)
    return out


@opaque(fake=lambda query, *_: query.new_empty(query.shape))
def encoder_attention_triton(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """``softmax(scale * q k^T) v`` within each segment; query head h reads key head ``h * K // N``.

    Shapes:  query [B, S, N, D], key and value [B, S, K, D], any strides; cu_seqlens [n + 1], any integer dtype, on the
             host or on the device -> [B, S, N, D], contiguous.
    Casts:   fp32 scores, softmax and sums; probabilities are rounded to value's dtype for the second product; one
             rounding at the end.
    Tokens outside every segment give zeros. Mutates nothing.
    """
    return _launch(query, key, value, cu_seqlens.to(query.device).contiguous(), None, None, scale)


@opaque(fake=lambda query, *_: query.new_empty(query.shape))
def rel_pos_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, by_row: Tensor, by_column: Tensor, scale: float
) -> Tensor:
    """``softmax(scale * q k^T + bias) v`` over a grid of H W tokens.

    Shapes:  query, key, value [B, H W, N, D]; by_row [B, N, H W, H] and by_column [B, N, H W, W] in fp32, contiguous: what
             keys in each row and in each column add to the scores of a query -> [B, H W, N, D], contiguous.
    Casts:   as of ``encoder_attention_triton``. Mutates nothing.
    """
    return _launch(query, key, value, None, by_row, by_column, scale)
