"""Linear on the CPU: ``x W^T``, alone or with what commonly follows it.

Sums are fp32, the bias is added to them, and the product is rounded once to the storage dtype. What follows is computed
from the rounded product, so a fused function returns what its parts would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels, library
from opmux.native.layout import as_rows


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
    plan = _plan(x.shape, weight.shape, x.dtype, weight.dtype, 1)
    if plan is None or (bias is not None and not _is_vector(bias, weight)):
        return F.linear(x, weight, bias)
    return _call(kernels.linear, plan, x, weight, bias, None)


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])))
def linear_add_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + (x @ weight.T + bias)``: the product is rounded to x's dtype, then the sum.

    Args:
        residual: [..., out], x's dtype; the others as of :func:`linear_cpu`.

    Returns: [..., out] in x's dtype, contiguous, new.
    """
    plan = _plan(x.shape, weight.shape, x.dtype, weight.dtype, 1)
    if plan is None or (bias is not None and not _is_vector(bias, weight)) or (
        residual.dtype is not x.dtype or residual.shape != plan[0].shape
    ):  # fmt: skip
        return residual + F.linear(x, weight, bias)
    return _call(kernels.linear_add, plan, x, weight, bias, residual)


@opaque(fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)))
def linear_silu_and_mul_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = (x @ weight.T + bias).chunk(2, -1)``; each of gate, up and silu is rounded.

    Args:
        weight: [2 I, in], the gates' rows first; bias: [2 I] or None; x as of :func:`linear_cpu`.

    Returns: [..., I] in x's dtype, contiguous.
    """
    plan = _plan(x.shape, weight.shape, x.dtype, weight.dtype, 2)
    if plan is None or (bias is not None and not _is_vector(bias, weight)):
        gate, up = F.linear(x, weight, bias).chunk(2, -1)
        return F.silu(gate) * up
    return _call(kernels.linear_silu_and_mul, plan, x, weight, bias, None)


# The result's shape as a tensor without memory of its own, tokens, columns of the result, in, dtype code.
Plan = tuple[Tensor, int, int, int, int]


@lru_cache(maxsize=4096)
def _plan(
    x_shape: torch.Size, weight_shape: torch.Size, dtype: torch.dtype, weight_dtype: torch.dtype, halves: int
) -> Plan | None:
    """What a call with these operands needs; None if it is not for the kernels, which check nothing themselves."""
    if dtype is not weight_dtype or dtype not in DTYPE_CODE or len(weight_shape) != 2 or len(x_shape) == 0:
        return None
    tokens, (rows, width) = x_shape[:-1].numel(), weight_shape
    if width != x_shape[-1] or rows % halves or 0 in (rows, width) or not 0 < tokens <= most_tokens(dtype):
        return None
    out = rows // halves
    template = torch.empty((), dtype=dtype, device="cpu").expand(*x_shape[:-1], out)
    return template, tokens, out, width, DTYPE_CODE[dtype]


def _is_vector(bias: Tensor, weight: Tensor) -> bool:
    return bias.dtype is weight.dtype and bias.shape == weight.shape[:1]


def _call(
    kernel: Callable[..., int], plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    template, tokens, out, width, code = plan
    stride = width
    if not x.is_contiguous():
        x, _, _, stride = as_rows(x)
    weight_stride, dense = weight.stride()
    if dense != 1:
        weight, weight_stride = weight.contiguous(), width
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    residual_stride = 0
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    # A microsecond faster than handing a shape to torch; the template's strides are 0, so the result is contiguous.
    y = torch.empty_like(template)
    kernel(
        y.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        tokens, out, width, stride, weight_stride, residual_stride, code,
    )  # fmt: skip
    return y
