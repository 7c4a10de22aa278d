"""Triton kernel of the gated activations: one block of one row a program, fp32 inside, any row stride, a new output."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import kernel, next_power_of_2


@kernel(multiples=("x_stride", "width"))
def _silu_and_mul_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, ROUND_GATE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if ROUND_GATE:
        gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * width + cols, (gate * up).to(y_ptr.dtype.element_ty), mask=mask)


def tile(width: int, n_rows: int) -> tuple[int, int]:
    """``(block, warps)`` for rows whose halves have ``width`` elements."""
    block = min(1024, next_power_of_2(width))
    if n_rows * width <= 64 * 1024:  # few elements: spread them over more processors
        block = min(block, 512)
    return block, 4 if block >= 512 else 1


def launch(x: Tensor, round_gate: bool, config: tuple[int, int] | None = None) -> Tensor:
    """``silu_and_mul_triton`` with a block and a number of warps other than ``tile``'s."""
    width = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    x, n_rows, _, x_stride = as_rows(x)
    if n_rows == 0:
        return y
    block, warps = config or tile(width, n_rows)
    per_row = -(-width // block)
    constants = (block, width % block == 0, round_gate)
    _silu_and_mul_kernel((n_rows * per_row, 1, 1), (x, y), (x_stride, width, per_row), constants, warps)
    return y


@opaque(fake=lambda x, *_: torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device))
def silu_and_mul_triton(x: Tensor, round_gate: bool) -> Tensor:
    """``silu(x[..., :d]) * x[..., d:]`` for x [..., 2d] -> [..., d], contiguous.

    Casts:   fp32, rounded once; with ``round_gate`` the silu is rounded to x's dtype before the product.
    Mutates: nothing.
    """
    return launch(x, round_gate)
