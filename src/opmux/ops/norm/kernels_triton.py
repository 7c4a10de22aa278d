"""Triton kernels of the norms: fp32 inside, rows of any width, any row stride, new outputs.

A row of up to 32768 elements stays in registers between its two uses, so memory is read once; wider rows are read
twice. Several narrow rows (the heads of a q or k norm) share one program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import Launch, kernel, new_like, next_power_of_2, plan

_WIDEST_ROW_IN_REGISTERS = 32768
_LOOP_BLOCK = 8192
_ELEMENTS_PER_PROGRAM = 2048  # narrow rows are grouped up to this many
_MANY_ROWS = 4096  # above this, memory is the limit; below it, how soon a row is done


@triton.jit
def times_weight(y, w, weight_offset, CAST_FIRST: tl.constexpr):
    """The normalised y times a weight, in the weight's dtype or in fp32."""
    scale = w.to(tl.float32) + weight_offset
    # The product of two rounded 16-bit values is exact in fp32, so rounding it here is multiplying in the weight's
    # dtype.
    return (y.to(w.dtype).to(tl.float32) * scale).to(w.dtype).to(tl.float32) if CAST_FIRST else y * scale


@kernel(multiples=("x_stride", "residual_stride", "width"))
def _rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, sum_ptr,
    x_stride: tl.int64, residual_stride: tl.int64, width: tl.int64,
    n_rows: tl.int32, variance_width: tl.int32, eps: tl.float32, weight_offset: tl.float32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, CAST_FIRST: tl.constexpr, ROUND_SUM: tl.constexpr, PARTIAL: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = None if EVEN else (row < n_rows) & (cols < width)
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + cols
        x += tl.load(residual, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32)
    if HAS_WEIGHT:
        # Asked for before the reduction, so that it arrives while the row is summed.
        w = tl.load(w_ptr + cols, mask=None if EVEN else cols < width, other=other)
    if HAS_RESIDUAL:
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, rounded, mask=mask, cache_modifier=STORE)
        if ROUND_SUM:
            x = rounded.to(tl.float32)
    squares = tl.where(cols < variance_width, x * x, 0.0) if PARTIAL else x * x
    y = x * tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / variance_width + eps)
    if HAS_WEIGHT:
        y = times_weight(y, w, weight_offset, CAST_FIRST)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=STORE)


@kernel(multiples=("x_stride", "residual_stride", "width"))
def _rms_norm_wide_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, sum_ptr,
    x_stride: tl.int64, residual_stride: tl.int64, width: tl.int64,
    variance_width: tl.int32, eps: tl.float32, weight_offset: tl.float32,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST_FIRST: tl.constexpr,
    ROUND_SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    y_ptr += row * width
    sum_ptr += row * width
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + cols, rounded, mask=mask)
            if ROUND_SUM:
                x = rounded.to(tl.float32)
        squares += tl.where(cols < variance_width, x * x, 0.0)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / variance_width + eps)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if ROUND_SUM:
                x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        y = x * scale
        if HAS_WEIGHT:
            w = tl.load(w_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            y = times_weight(y, w, weight_offset, CAST_FIRST)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(multiples=("x_stride", "z_stride", "width", "group_size"))
def _gated_norm_kernel(
    x_ptr, z_ptr, w_ptr, y_ptr, x_stride: tl.int64, z_stride: tl.int64, width: tl.int64, group_size: tl.int64,
    n_groups: tl.int64, groups_per_row: tl.int32, eps: tl.float32,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_GATE: tl.constexpr, NORM_FIRST: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS))[:, None]
    row = group // groups_per_row
    col = tl.arange(0, BLOCK)[None, :]
    at = group % groups_per_row * group_size + col
    mask = None if EVEN else (group < n_groups) & (col < group_size)
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=other).to(tl.float32)
    if HAS_GATE:
        z = tl.load(z_ptr + row * z_stride + at, mask=mask, other=other).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=other).to(tl.float32)
    if HAS_GATE:
        gate = (1.0 if BY_SIGMOID else z) / (1.0 + tl.exp(-z))
        if not NORM_FIRST:
            x = x * gate
    y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / group_size + eps) * w
    if HAS_GATE and NORM_FIRST:
        y = y * gate
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(multiples=("x_stride", "residual_stride", "width"))
def _layer_norm_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, x_stride: tl.int64, residual_stride: tl.int64, width: tl.int64,
    n_rows: tl.int32, eps: tl.float32, weight_offset: tl.float32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROUND_SUM: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = None if EVEN else (row < n_rows) & (cols < width)
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=other).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=other).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, total, mask=mask)
        if ROUND_SUM:
            x = total.to(tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=None if EVEN else cols < width, other=other).to(tl.float32) + weight_offset
    if HAS_BIAS:
        b = tl.load(b_ptr + cols, mask=None if EVEN else cols < width, other=other).to(tl.float32)
    x = x - tl.sum(x, axis=1, keep_dims=True) / width
    squares = x * x if EVEN else tl.where(cols < width, x * x, 0.0)
    y = x * tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / width + eps)
    if HAS_WEIGHT:
        y = y * w
    if HAS_BIAS:
        y = y + b
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """How rows are cut. ``store``: cache modifier of what an RMS norm writes."""

    rows: int
    block: int
    warps: int
    store: str = ".cs"


def tile(width: int, n_rows: int, adds: bool = False) -> Tile:
    """The cut for ``n_rows`` rows of ``width`` elements; ``adds``: a residual is read and a sum written too.

    Microseconds on an H200, bf16, H = 4096: 1024 rows, 4 warps 6.0 and with a sum 10.3, where 8 warps took 7.4 and
    11.6; 16384 rows, 8 warps 66.6, with a sum 16 warps 132.4. H = 8192: 1024 rows, 16 warps 11.0 and 19.1; 16384 rows,
    16 warps 133.8, with a sum 32 warps 258.8. Loads that leave the cache first and streaming stores (.cs) together gain
    4 to 7 % over neither; but a sum of few rows of 4096 takes 10.5 with .cs.
    """
    block = next_power_of_2(width)
    rows_per_program = max(1, _ELEMENTS_PER_PROGRAM // block)
    elements = rows_per_program * block
    many = n_rows > _MANY_ROWS
    if elements <= 2048:
        warps = 4
    elif elements <= 4096:
        warps = (16 if adds else 8) if many else 4
    else:
        warps = 32 if elements > 16384 or (adds and many) else 16
    return Tile(rows_per_program, block, warps, "" if adds and not many and elements <= 4096 else ".cs")


@plan
def _rms_norm_plan(
    n_rows: int,
    width: int,
    strides: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    eps: float,
    variance_size: int,
    weight_offset: float,
    cast_first: bool,
    round_sum: bool,
    config: Tile | None,
) -> Launch:
    flags = (dtypes[1] is not None, dtypes[2] is not None, cast_first, round_sum)
    if width > _WIDEST_ROW_IN_REGISTERS:
        scalars = (*strides, width, variance_size, eps, weight_offset)
        return _rms_norm_wide_kernel.prepare((n_rows, 1, 1), scalars, (_LOOP_BLOCK, *flags), 16)
    rows, block, warps, store = config or tile(width, n_rows, dtypes[1] is not None)
    even = block == width and n_rows % rows == 0
    scalars = (*strides, width, n_rows, variance_size, eps, weight_offset)
    constants = (rows, block, even, *flags, variance_size != width, store)
    return _rms_norm_kernel.prepare((-(-n_rows // rows), 1, 1), scalars, constants, warps)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    variance_size: int,
    weight_offset: float,
    cast_first: bool,
    round_sum: bool,
    config: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, rounded sum)``; without a residual the second is ``y`` too. ``config`` overrides ``tile``."""
    y = new_like(x)
    total = y if residual is None else new_like(x)
    x, n_rows, width, stride = as_rows(x)
    if n_rows == 0:
        return y, total
    residual_dtype, residual_stride = None, width
    if residual is None:
        residual = x
    else:
        residual_dtype = residual.dtype
        residual, _, _, residual_stride = as_rows(residual)
    weight_dtype = None
    if weight is None:
        weight = x
    else:
        weight_dtype = weight.dtype
        weight = weight.contiguous()
    _rms_norm_plan(
        n_rows, width, (stride, residual_stride), (x.dtype, residual_dtype, weight_dtype), eps, variance_size,
        weight_offset, cast_first, round_sum, config,
    )(x, residual, weight, y, total)  # fmt: skip
    return y, total


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@opaque(fake=_fake)
def rms_norm_triton(
    x: Tensor, weight: Tensor | None, eps: float, variance_size: int, weight_offset: float, cast_first: bool
) -> Tensor:
    """``x / sqrt(mean(x[..., :variance_size]^2) + eps) * (weight + weight_offset)`` over the last dimension.

    Shapes:  x [..., H], weight [H] of any floating dtype or None -> [..., H] in x's dtype, contiguous.
    Casts:   fp32 inside. With ``cast_first`` the normalised value is rounded to the weight's dtype and multiplied
             there; else the product is fp32 and rounded once.
    Mutates: nothing.
    """
    return launch(x, None, weight, eps, variance_size, weight_offset, cast_first, False)[0]


@opaque(fake=lambda x, *_: (_fake(x), _fake(x)))
def add_rms_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    variance_size: int,
    weight_offset: float,
    cast_first: bool,
    round_sum: bool,
) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``; the sum is rounded once to x's dtype.

    The norm sees the unrounded fp32 sum, or with ``round_sum`` the rounded one. Otherwise as ``rms_norm_triton``.
    """
    return launch(x, residual, weight, eps, variance_size, weight_offset, cast_first, round_sum)


@plan
def _gated_norm_plan(
    n_rows: int,
    width: int,
    strides: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    group_size: int,
    eps: float,
    has_gate: bool,
    norm_before_gate: bool,
    by_sigmoid: bool,
    config: Tile | None,
) -> Launch:
    per_row = width // group_size
    n_groups = n_rows * per_row
    groups, block, warps, _ = config or tile(group_size, n_groups)
    even = block == group_size and n_groups % groups == 0
    scalars = (*strides, width, group_size, n_groups, per_row, eps)
    constants = (groups, block, even, has_gate, norm_before_gate, by_sigmoid)
    return _gated_norm_kernel.prepare((-(-n_groups // groups), 1, 1), scalars, constants, warps)


@opaque(fake=_fake)
def rms_norm_gated_triton(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    by_sigmoid: bool,
) -> Tensor:
    """RMS norm of groups of ``group_size`` neighbours, times weight, with ``act(z)`` multiplied before or after.

    Shapes:  x, z [..., H], weight [H], any floating dtypes; H a multiple of ``group_size`` -> [..., H] in x's dtype.
    Casts:   fp32, rounded once. The gate is z * sigmoid(z), or sigmoid(z) with ``by_sigmoid``.
    Mutates: nothing.
    """
    return launch_gated(x, z, weight, eps, group_size, norm_before_gate, by_sigmoid)


def launch_gated(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    by_sigmoid: bool,
    config: Tile | None = None,
) -> Tensor:
    """``rms_norm_gated_triton`` with another tile."""
    y = new_like(x)
    x, n_rows, width, stride = as_rows(x)
    if n_rows == 0:
        return y
    gate, _, _, gate_stride = (x, 0, 0, stride) if z is None else as_rows(z)
    dtypes = (x.dtype, gate.dtype, weight.dtype)
    weight = weight.contiguous()
    _gated_norm_plan(
        n_rows, width, (stride, gate_stride), dtypes, group_size, eps, z is not None, norm_before_gate, by_sigmoid,
        config,
    )(x, gate, weight, y)  # fmt: skip
    return y


def layer_norm_tile(width: int) -> Tile:
    """That of few rows, for any number: 16384 rows of 4096 take 68.2 us with 4 warps, 71.4 with 8."""
    return tile(width, 1)


@plan
def _layer_norm_plan(
    n_rows: int,
    width: int,
    strides: tuple[int, int],
    dtypes: tuple[torch.dtype | None, ...],
    numbers: tuple[float, float],
    round_sum: bool,
    config: Tile | None,
) -> Launch:
    rows, block, warps, _ = config or layer_norm_tile(width)
    even = block == width and n_rows % rows == 0
    constants = (rows, block, even, dtypes[1] is not None, dtypes[2] is not None, dtypes[3] is not None, round_sum)
    return _layer_norm_kernel.prepare((-(-n_rows // rows), 1, 1), (*strides, width, n_rows, *numbers), constants, warps)


@opaque(fake=_fake)
def layer_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * (weight + weight_offset) + bias`` over the last dimension, the variance of
    centred values.

    Shapes:  x [..., H]; weight, bias [H] of any floating dtype, or None -> [..., H] in x's dtype, contiguous.
    Casts:   fp32, rounded once.
    Mutates: nothing.
    """
    return launch_layer_norm(x, weight, bias, eps, weight_offset=weight_offset)


@opaque(fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_layer_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    round_sum: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``layer_norm_triton`` of ``x + residual``, with ``round_sum`` of the rounded sum -> (norm, rounded sum)."""
    total = new_like(x)
    return launch_layer_norm(x, weight, bias, eps, None, weight_offset, residual, total, round_sum), total


def launch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, config: Tile | None = None,
    weight_offset: float = 0.0, residual: Tensor | None = None, total: Tensor | None = None,
    round_sum: bool = False,
) -> Tensor:  # fmt: skip
    """``layer_norm_triton`` with another tile; with ``residual`` the sum is written to ``total``."""
    y = new_like(x)
    x, n_rows, width, stride = as_rows(x)
    if n_rows == 0:
        return y
    dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias, residual))
    weight = x if weight is None else weight.contiguous()
    bias = x if bias is None else bias.contiguous()
    added, _, _, added_stride = (x, 0, 0, 0) if residual is None else as_rows(residual)
    launch = _layer_norm_plan(n_rows, width, (stride, added_stride), dtypes, (eps, weight_offset), round_sum, config)
    launch(x, added, weight, bias, y, y if total is None else total)
    return y
