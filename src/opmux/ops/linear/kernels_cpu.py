"""Linear on the CPU: ``x W^T``, alone or with what commonly follows it.

Sums are fp32, the bias is added to them, and the product is rounded once to the storage dtype. What follows is computed
from the rounded product, so a fused function returns what its parts would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels, library
from opmux.native.layout import as_rows, new_like


@cache
def most_tokens(dtype: torch.dtype) -> int:
    """The number of tokens up to which the kernels take a product; torch's matrix product takes larger ones."""
    if dtype is torch.bfloat16 and "avx512_bf16" in library.isa:
        # Time against torch's, one thread: 3072x576 0.35 at 1 token, 0.75 at 64, 0.94 at 512; 4096x4096 0.97 at 512.
        return 1 << 62
    return 16


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])))
def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: [..., in], fp32, bf16 or fp16, any strides.
        weight: [out, in], x's dtype.
        bias: [out], x's dtype, or None.

    Returns: [..., out] in x's dtype, contiguous. Anything else than this goes to ``F.linear``, with its errors.
    """
    out = weight.shape[0]
    rows, tokens, width, stride = as_rows(x)
    if not 0 < tokens <= most_tokens(x.dtype) or _odd(x, weight, bias):
        return F.linear(x, weight, bias)
    y = new_like(x, out)
    _call(kernels.linear, y, rows, weight, bias, None, tokens, out, width, stride, 0)
    return y


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])))
def linear_add_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + (x @ weight.T + bias)``: the product is rounded to x's dtype, then the sum.

    Args:
        residual: [..., out], x's dtype; the others as of :func:`linear_cpu`.

    Returns: [..., out] in x's dtype, contiguous, new.
    """
    out = weight.shape[0]
    rows, tokens, width, stride = as_rows(x)
    added, _, added_width, added_stride = as_rows(residual)
    if not 0 < tokens <= most_tokens(x.dtype) or _odd(x, weight, bias) or residual.dtype is not x.dtype or (
        added_width != out or residual.shape[:-1] != x.shape[:-1]
    ):  # fmt: skip
        return residual + F.linear(x, weight, bias)
    y = new_like(x, out)
    _call(kernels.linear_add, y, rows, weight, bias, added, tokens, out, width, stride, added_stride)
    return y


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)))
def linear_silu_and_mul_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = (x @ weight.T + bias).chunk(2, -1)``; each of gate, up and silu is rounded.

    Args:
        weight: [2 I, in], the gates' rows first; bias: [2 I] or None; x as of :func:`linear_cpu`.

    Returns: [..., I] in x's dtype, contiguous.
    """
    rows, tokens, width, stride = as_rows(x)
    if not 0 < tokens <= most_tokens(x.dtype) or _odd(x, weight, bias) or weight.shape[0] % 2:
        gate, up = F.linear(x, weight, bias).chunk(2, -1)
        return F.silu(gate) * up
    out = weight.shape[0] // 2
    y = new_like(x, out)
    _call(kernels.linear_silu_and_mul, y, rows, weight, bias, None, tokens, out, width, stride, 0)
    return y


def _odd(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels, which check nothing, would misread these operands."""
    dtype = x.dtype
    if weight.dtype is not dtype or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or dtype not in DTYPE_CODE:
        return True
    return bias is not None and (bias.dtype is not dtype or bias.shape != weight.shape[:1])


def _call(
    kernel: Callable[..., int], y: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    tokens: int, out: int, width: int, stride: int, residual_stride: int,
) -> None:  # fmt: skip
    weight_stride, dense = weight.stride()
    if dense != 1:
        weight = weight.contiguous()
        weight_stride = width
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    kernel(
        y.data_ptr(), rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), tokens, out, width, stride, weight_stride, residual_stride,
        DTYPE_CODE[rows.dtype],
    )  # fmt: skip
