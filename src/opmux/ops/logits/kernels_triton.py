"""Triton kernel of the logits' soft cap and scale: one pass, fp32 inside, padding columns left behind, a new output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import Launch, kernel, new, plan


@triton.jit
def tanh(x):
    """fp32 tanh from exp, which every back end and the interpreter have; below 0.3 a series, where 1 - 2/(e+1)
    cancels."""
    square = x * x
    series = x * (
        1.0
        + square
        * (
            -1.0 / 3
            + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835 + square * (-1382.0 / 155925))))
        )
    )
    # exp overflows to infinity for large x, and 2/inf is 0.
    return tl.where(tl.abs(x) < 0.3, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _fast_tanh(x):
    """tanh to 2^-19 of its value: exact enough for a 16-bit result."""
    return tl.where(tl.abs(x) < 0.03, x - x * x * x * (1.0 / 3), 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@kernel(multiples=("x_stride", "width"))
def _softcap_scale_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32, cap: tl.float32, scale: tl.float32,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask).to(tl.float32)
    if SCALE_FIRST:
        x = x * scale
    if HAS_CAP:
        # A 16-bit result hides the cancellation that tanh's series avoids down to where tanh is linear.
        x = cap * tanh(x / cap) if PRECISE else cap * _fast_tanh(x / cap)
    if not SCALE_FIRST:
        x = x * scale
    tl.store(y_ptr + row * width + cols, x.to(y_ptr.dtype.element_ty), mask=mask)


def tile(elements: int) -> tuple[int, int]:
    """``(block, warps)``. One row of 128256 on an H200: 512 1.5 us, 2048 1.7; 64 rows: 2048 11.4, 512 14.2."""
    return 512 if elements <= 256 * 1024 else 2048, 4


@plan
def _plan(
    n_rows: int,
    width: int,
    x_stride: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    soft_cap: float | None,
    scale: float,
    scale_first: bool,
    config: tuple[int, int] | None,
) -> Launch:
    block, warps = config or tile(n_rows * width)
    per_row = -(-width // block)
    precise = dtypes[1] == torch.float32
    constants = (block, width % block == 0, bool(soft_cap), scale_first, precise)
    scalars = (x_stride, width, per_row, soft_cap or 1.0, scale)
    return _softcap_scale_kernel.prepare((n_rows * per_row, 1, 1), scalars, constants, warps)


def launch(
    x: Tensor,
    width: int,
    soft_cap: float | None,
    scale: float,
    scale_first: bool,
    dtype: torch.dtype | None,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """``softcap_scale_triton`` with another block and another number of warps."""
    y = new((*x.shape[:-1], width), dtype or x.dtype, x.device)
    if width == x.shape[-1] and x.is_contiguous() and x.numel() < 2**31:
        n_rows, width, x_stride = min(1, x.numel()), x.numel(), x.numel()  # one row: fewer blocks end early
    else:
        x, n_rows, _, x_stride = as_rows(x)
    if n_rows and width:
        _plan(n_rows, width, x_stride, (x.dtype, y.dtype), soft_cap, scale, scale_first, config)(x, y)
    return y


def _fake(
    x: Tensor, width: int, soft_cap: float | None, scale: float, scale_first: bool, dtype: torch.dtype | None
) -> Tensor:
    return torch.empty((*x.shape[:-1], width), dtype=dtype or x.dtype, device=x.device)


@opaque(fake=_fake)
def softcap_scale_triton(
    x: Tensor, width: int, soft_cap: float | None, scale: float, scale_first: bool, dtype: torch.dtype | None
) -> Tensor:
    """The first ``width`` columns of x [..., V], capped (``c * tanh(x / c)``) and scaled, -> [..., width], contiguous.

    Casts:   fp32, rounded once to ``dtype`` (None: x's).
    Order:   cap, then scale (vLLM's LogitsProcessor); with ``scale_first`` the other way round. A cap of None or 0 is
             no cap.
    Mutates: nothing.
    """
    return launch(x, width, soft_cap, scale, scale_first, dtype)
