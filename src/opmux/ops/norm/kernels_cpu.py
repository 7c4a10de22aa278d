"""The norm kernels of the compiled CPU library, for Python. All compute in fp32 and return new, contiguous tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like

_F32 = DTYPE_CODE[torch.float32]


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
        cast_first: round the normalised value to the weight's dtype, the product with the weight too, and then to x's
            dtype (Llama); otherwise round once, at the end.

    Returns: [..., H] in x's dtype.
    """
    dtype = x.dtype
    heads = 0  # rows of one token, where tokens are another distance apart than rows
    if x.is_contiguous():  # as as_rows and new_like do, without their calls
        rows, width = x, x.shape[-1]
        count, stride, out = x.numel() // (width or 1), width, torch.empty_like(x)
    elif x.dim() > 2 and x.stride(-1) == 1 and x.stride(-3) != x.shape[-2] * x.stride(-2):
        rows, out = x.flatten(0, -3), new_like(x)
        count, heads, width = rows.shape
        stride = rows.stride(1)
    else:
        (rows, count, width, stride), out = as_rows(x), new_like(x)
    cast = _F32
    weight_is_fp32 = False  # which matters only where x's dtype is another
    if weight is not None:
        if cast_first:
            cast = DTYPE_CODE[weight.dtype]
        if weight.dtype is not dtype or not weight.is_contiguous():
            weight = readable(weight, dtype).contiguous()
            weight_is_fp32 = weight.dtype is torch.float32
    norm = (
        rows.data_ptr(), stride, None, 0, False, None if weight is None else weight.data_ptr(), weight_is_fp32,
        width, variance_size or width, eps, weight_offset, cast, False,
    )  # fmt: skip
    if heads:
        kernels.rms_norm_heads(out.data_ptr(), count, heads, rows.stride(0), DTYPE_CODE[dtype], *norm)
    else:
        kernels.rms_norm(out.data_ptr(), None, count, DTYPE_CODE[dtype], *norm)
    return out


@opaque(fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variance_size: int, weight_offset: float,
    cast_first: bool, round_sum: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm of ``x + residual``, and that sum rounded to x's dtype; arguments as of :func:`rms_norm_cpu`.

    Args:
        residual: [..., H] of any of the dtypes; the sum is fp32.
        round_sum: normalise the rounded sum (what a transformers decoder layer computes) rather than the fp32 sum.

    Returns: (norm, new residual), both [..., H] in x's dtype.
    """
    dtype = x.dtype
    out, new_residual = new_like(x), new_like(x)
    rows, count, width, stride = as_rows(x)
    residual, _, _, residual_stride = as_rows(readable(residual, dtype))
    cast = _F32
    weight_is_fp32 = False  # which matters only where x's dtype is another
    if weight is not None:
        if cast_first:
            cast = DTYPE_CODE[weight.dtype]
        if weight.dtype is not dtype or not weight.is_contiguous():
            weight = readable(weight, dtype).contiguous()
            weight_is_fp32 = weight.dtype is torch.float32
    kernels.rms_norm(
        out.data_ptr(), new_residual.data_ptr(), count, DTYPE_CODE[dtype],
        rows.data_ptr(), stride, residual.data_ptr(), residual_stride, residual.dtype is torch.float32,
        None if weight is None else weight.data_ptr(), weight_is_fp32,
        width, variance_size or width, eps, weight_offset, cast, round_sum,
    )  # fmt: skip
    return out, new_residual


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def rms_norm_gated_cpu(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool, by_sigmoid: bool
) -> Tensor:
    """RMS norm of groups of neighbours: ``norm(x) * weight * act(z)`` or ``norm(x * act(z)) * weight``.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        z: [..., H] of any of these dtypes, or None: no gate.
        weight: [H] of any of these dtypes.
        group_size: features that share a norm; divides H.
        norm_before_gate: the order.
        by_sigmoid: act is the sigmoid; otherwise silu.

    Returns: [..., H] in x's dtype, rounded once.
    """
    dtype = x.dtype
    out = new_like(x)
    rows, count, width, stride = as_rows(x)
    gate, z_stride = None, 0
    if z is not None:
        gate, _, _, z_stride = as_rows(readable(z, dtype))
    weight = readable(weight, dtype).contiguous()
    kernels.rms_norm_gated(
        rows.data_ptr(), stride,
        None if gate is None else gate.data_ptr(), gate is not None and gate.dtype is torch.float32, z_stride,
        weight.data_ptr(), weight.dtype is torch.float32,
        out.data_ptr(), count, width, group_size, DTYPE_CODE[dtype], eps, norm_before_gate, by_sigmoid,
    )  # fmt: skip
    return out


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def layer_norm_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * (weight + weight_offset) + bias``; the variance is the population's, of
    centred values.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        weight, bias: [H] of any of these dtypes, or None.

    Returns: [..., H] in x's dtype, rounded once.
    """
    out = new_like(x)
    _layer_norm(x, None, weight, bias, eps, weight_offset, out, None)
    return out


@opaque(fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_layer_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    round_sum: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``layer_norm_cpu`` of ``x + residual``.

    Args:
        residual: [..., H] in x's dtype.
        round_sum: normalise the rounded sum rather than the fp32 sum.

    Returns: (norm, sum), both [..., H] in x's dtype.
    """
    out, total = new_like(x), new_like(x)
    _layer_norm(x, residual, weight, bias, eps, weight_offset, out, total, round_sum)
    return out, total


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    out: Tensor, total: Tensor | None, round_sum: bool = False,
) -> None:  # fmt: skip
    dtype = x.dtype
    rows, count, width, stride = as_rows(x)
    added, added_stride = None, 0
    if residual is not None:
        added, _, _, added_stride = as_rows(residual)
    weight = None if weight is None else readable(weight, dtype).contiguous()
    bias = None if bias is None else readable(bias, dtype).contiguous()
    kernels.layer_norm(
        rows.data_ptr(), stride,
        None if weight is None else weight.data_ptr(), weight is not None and weight.dtype is torch.float32,
        None if bias is None else bias.data_ptr(), bias is not None and bias.dtype is torch.float32,
        out.data_ptr(), count, width, DTYPE_CODE[dtype], eps, weight_offset,
        None if added is None else added.data_ptr(), added_stride, None if total is None else total.data_ptr(), round_sum,
    )  # fmt: skip


def readable(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """A second operand as kernels read it: of x's dtype or fp32."""
    return operand if operand.dtype in (dtype, torch.float32) else operand.float()
