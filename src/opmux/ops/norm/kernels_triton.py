"""Triton kernels of the RMS norms: fp32 inside, rows of any width, any row stride, new outputs.

A row of up to 32768 elements stays in registers between its two uses, so memory is read once; wider rows are read
twice. Several narrow rows (the heads of a q or k norm) share one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import kernel, next_power_of_2

_WIDEST_ROW_IN_REGISTERS = 32768
_LOOP_BLOCK = 8192
_ELEMENTS_PER_PROGRAM = 2048  # narrow rows are grouped up to this many


@triton.jit
def _times_weight(y, w, weight_offset, CAST_FIRST: tl.constexpr):
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
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = row < n_rows if EVEN else (row < n_rows) & (cols < width)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if HAS_WEIGHT:
        # Asked for before the reduction, so that it arrives while the row is summed.
        w = tl.load(w_ptr + cols, mask=cols < width, other=0.0, eviction_policy="evict_last")
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + cols
        x += tl.load(residual, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, rounded, mask=mask)
        if ROUND_SUM:
            x = rounded.to(tl.float32)
    squares = tl.where(cols < variance_width, x * x, 0.0) if PARTIAL else x * x
    y = x * tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / variance_width + eps)
    if HAS_WEIGHT:
        y = _times_weight(y, w, weight_offset, CAST_FIRST)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


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
            y = _times_weight(y, w, weight_offset, CAST_FIRST)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def tile(width: int) -> tuple[int, int, int]:
    """``(rows per program, block, warps)`` for rows of ``width`` elements."""
    block = next_power_of_2(width)
    rows_per_program = max(1, _ELEMENTS_PER_PROGRAM // block)
    elements = rows_per_program * block
    return (
        rows_per_program,
        block,
        4 if elements <= 2048 else 8 if elements <= 4096 else 16 if elements <= 16384 else 32,
    )


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    variance_size: int,
    weight_offset: float,
    cast_first: bool,
    round_sum: bool,
    config: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, rounded sum)``; without a residual the second is ``y`` too. ``config`` overrides ``tile``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, n_rows, width, x_stride = as_rows(x)
    if n_rows == 0:
        return y, total
    residual_stride = width
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    if weight is not None:
        weight = weight.contiguous()
    tensors = (x, x if residual is None else residual, x if weight is None else weight, y, total)
    strides = (x_stride, residual_stride, width)
    flags = (residual is not None, weight is not None, cast_first, round_sum)
    if width > _WIDEST_ROW_IN_REGISTERS:
        scalars = (*strides, variance_size, eps, weight_offset)
        _rms_norm_wide_kernel((n_rows, 1, 1), tensors, scalars, (_LOOP_BLOCK, *flags), 16)
        return y, total
    per_program, block, warps = config or tile(width)
    constants = (per_program, block, block == width, *flags, variance_size != width)
    grid = (-(-n_rows // per_program), 1, 1)
    _rms_norm_kernel(grid, tensors, (*strides, n_rows, variance_size, eps, weight_offset), constants, warps)
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
