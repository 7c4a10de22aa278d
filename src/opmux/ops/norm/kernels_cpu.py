"""The RMS norm kernel of the compiled CPU library, for Python."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def rms_norm_cpu(
    x: Tensor, weight: Tensor | None, eps: float, variance_size: int, weight_offset: float, cast_first: bool
) -> Tensor:
    """``x / sqrt(mean(x[..., :variance_size]^2) + eps) * (weight + weight_offset)``, computed in fp32.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        weight: [H] of any of these dtypes, or None.
        variance_size: features that enter the mean; 0 means all H.
        weight_offset: added to the weight in fp32 (Gemma: 1.0).
        cast_first: round the normalised value to x's dtype before the product with the weight, and round again (Llama);
            otherwise round once, at the end.

    Returns: [..., H] in x's dtype, contiguous.
    """
    dtype = x.dtype
    if x.is_contiguous():  # as as_rows and new_like do, without their calls
        rows, width = x, x.shape[-1]
        count, stride, out = x.numel() // (width or 1), width, torch.empty_like(x)
    else:
        (rows, count, width, stride), out = as_rows(x), new_like(x)
    weight_is_fp32 = False  # which matters only where x's dtype is another
    if weight is not None and (weight.dtype is not dtype or not weight.is_contiguous()):
        weight = _readable(weight, dtype)
        weight_is_fp32 = weight.dtype is torch.float32
    kernels.rms_norm(
        rows.data_ptr(), stride, None, 0, None if weight is None else weight.data_ptr(), out.data_ptr(), None,
        count, width, variance_size or width, DTYPE_CODE[dtype], weight_is_fp32,
        eps, weight_offset, cast_first, False,
    )  # fmt: skip
    return out


@opaque(fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variance_size: int, weight_offset: float,
    cast_first: bool, round_sum: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm of ``x + residual``, and that sum rounded to x's dtype; arguments as of :func:`rms_norm_cpu`.

    Args:
        residual: [..., H]; a dtype other than x's is converted first.
        round_sum: normalise the rounded sum (what a transformers decoder layer computes) rather than the fp32 sum.

    Returns: (norm, new residual), both [..., H] in x's dtype, contiguous, new.
    """
    if residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
    rows, count, width, stride = as_rows(x)
    residual, _, _, residual_stride = as_rows(residual)
    out, new_residual = new_like(x), new_like(x)
    dtype = x.dtype
    weight_is_fp32 = False  # which matters only where x's dtype is another
    if weight is not None and (weight.dtype is not dtype or not weight.is_contiguous()):
        weight = _readable(weight, dtype)
        weight_is_fp32 = weight.dtype is torch.float32
    kernels.rms_norm(
        rows.data_ptr(), stride, residual.data_ptr(), residual_stride, None if weight is None else weight.data_ptr(),
        out.data_ptr(), new_residual.data_ptr(), count, width, variance_size or width, DTYPE_CODE[dtype],
        weight_is_fp32, eps, weight_offset, cast_first, round_sum,
    )  # fmt: skip
    return out, new_residual


def _readable(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the kernel reads it: contiguous, of x's dtype or fp32."""
    return weight.contiguous() if weight.dtype in (dtype, torch.float32) else weight.float().contiguous()
