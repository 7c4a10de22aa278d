"""Triton kernel of a linear layer on few rows, which is bound by reading the weight once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import kernel

MOST_ROWS = 16


@kernel(multiples=("x_stride", "w_stride", "n_in"))
def _few_rows_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr,
    x_stride: tl.int64, w_stride: tl.int64, n_in: tl.int64, n_out: tl.int32, n_rows: tl.int32,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, ONE_ROW: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_out = out < n_out
    w_row = w_ptr + out.to(tl.int64)[:, None] * w_stride
    row = tl.arange(0, 1 if ONE_ROW else 16)
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN if ONE_ROW else 16], tl.float32)
    for start in range(0, n_in, BLOCK_IN):
        feature = start + tl.arange(0, BLOCK_IN)
        in_row = feature[None, :] >= 0 if EVEN else feature[None, :] < n_in
        w = tl.load(w_row + feature[None, :], mask=in_out[:, None] & in_row, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row + feature[None, :], mask=(row < n_rows)[:, None] & in_row, other=0.0)
        if ONE_ROW:
            acc += w.to(tl.float32) * x.to(tl.float32)
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    bias = (
        tl.load(bias_ptr + out, mask=in_out, other=0.0).to(tl.float32)
        if HAS_BIAS
        else tl.zeros([BLOCK_OUT], tl.float32)
    )
    if ONE_ROW:
        y = tl.sum(acc, axis=1) + bias
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=in_out)
    else:
        y = (acc + bias[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row[None, :] * n_out + out[:, None], y, mask=in_out[:, None] & (row < n_rows)[None, :])


def tile(n_rows: int) -> tuple[int, int, int]:
    """``(outputs per program, inputs per step, warps)``."""
    return (4, 2048, 4) if n_rows == 1 else (16, 256, 4)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, config: tuple[int, int, int] | None = None) -> Tensor:
    """``linear_triton`` with a tile other than ``tile``'s."""
    n_out = weight.shape[0]
    y = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, n_rows, n_in, x_stride = as_rows(x)
    if n_rows > MOST_ROWS:
        raise ValueError(f"linear_triton takes up to {MOST_ROWS} rows; x has {n_rows}. Use torch.nn.functional.linear.")
    weight, _, _, w_stride = as_rows(weight)
    block_out, block_in, warps = config or tile(n_rows)
    constants = (block_out, block_in, n_rows == 1, n_in % block_in == 0, bias is not None, "ieee")
    scalars = (x_stride, w_stride, n_in, n_out, n_rows)
    tensors = (x, weight, y, weight if bias is None else bias.contiguous())
    _few_rows_kernel((-(-n_out // block_out), 1, 1), tensors, scalars, constants, warps, 3)
    return y


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])))
def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for x [..., in] of at most 16 rows, weight [out, in], bias [out] -> [..., out].

    Casts:   fp32 products and sums, the bias added before the one rounding to x's dtype.
    Mutates: nothing.
    """
    return launch(x, weight, bias)
