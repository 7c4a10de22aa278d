"""The fp8 kernels of the compiled CPU library, for Python. All return new, contiguous tensors.

They share their last arguments:

* scale: a given scale in fp32 (static quantization): one element, [..., 1] with one a row, or 2-D, where each element
  scales a block of the matrices in x's last two dimensions. None: the scale is computed (dynamic).
* dtype: float8_e4m3fn or float8_e4m3fnuz.
* group_size: columns that share a dynamic scale; ``ROW`` means all of a row, ``TENSOR`` everything.
* power_of_two: round dynamic scales up to powers of two.

And they return, first, the values and the scale: fp32, of the given scale's shape, or [1] (``TENSOR``), [..., groups].
Groups divide by their scale, all others multiply by its reciprocal.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like
from opmux.ops.norm.kernels_cpu import readable
from opmux.ops.quant.fp8 import Fp8Format

FORMAT_CODE = {torch.float8_e4m3fn: 0, torch.float8_e4m3fnuz: 1}
TENSOR, ROW = 0, -1


def _shape_of_scale(shape: torch.Size, scale: Tensor | None, group_size: int) -> torch.Size | tuple[int, ...]:
    if scale is not None:
        return scale.shape
    if group_size == TENSOR:
        return (1,)
    return (*shape[:-1], 1 if group_size == ROW else -(-shape[-1] // group_size))


def _fake(
    x: Tensor, shape: torch.Size, scale: Tensor | None, dtype: torch.dtype, group_size: int
) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(_shape_of_scale(shape, scale, group_size), dtype=torch.float32)
    return x.new_empty(shape, dtype=dtype), scales


class _Plan(NamedTuple):
    """What calls on operands of the same shapes share."""

    out: Tensor  # templates of the outputs, without memory of their own
    scale: Tensor
    layout: tuple[int, ...]  # width, group, groups, block_rows, matrix_rows of the kernels


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, scale: torch.Size | None, dtype: torch.dtype, group_size: int) -> _Plan:
    width, rows = shape[-1], math.prod(shape[:-1])
    matrix_rows = block_rows = shape[-2] if len(shape) > 1 else 1
    if scale is None:
        group = group_size if group_size > 0 else width
        groups = -(-width // group) if width else 0
        scale = torch.Size(_shape_of_scale(shape, None, group_size))
    else:
        groups = scale[-1] if scale else 1
        group = width // (groups or 1)
        if scale == (*shape[:-1], 1):
            block_rows, matrix_rows = 1, rows
        elif math.prod(scale) != 1:
            block_rows = matrix_rows // scale[0]
    layout = (width, group, groups, max(block_rows, 1), max(matrix_rows, 1))
    return _Plan(_template(shape, dtype), _template(scale, torch.float32), layout)


def _template(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of that shape; ``empty_like`` of it is a microsecond faster than handing a shape to torch."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


class _Quantization:
    """The outputs of a call, and the kernels' last arguments."""

    def __init__(
        self, shape: torch.Size, scale: Tensor | None, dtype: torch.dtype, group_size: int, scale_ub: Tensor | None,
        power_of_two: bool,
    ) -> None:  # fmt: skip
        plan = _plan(shape, None if scale is None else scale.shape, dtype, group_size)
        self.out = torch.empty_like(plan.out)
        written = given = None
        if scale is None:
            self.scale = torch.empty_like(plan.scale)
            written = self.scale.data_ptr()
            if plan.layout[0] == 0:  # rows of nothing: the kernels see none
                self.scale.fill_(Fp8Format.of(dtype).least_scale)
        else:
            self.scale = scale.clone(memory_format=torch.contiguous_format)
            given = self.scale.data_ptr()
        bound = math.inf if scale_ub is None else float(scale_ub)
        divide = scale is None and group_size > 0
        self.arguments = (self.out.data_ptr(), written, given, *plan.layout, bound, divide, power_of_two)


@opaque(fake=lambda x, scale, scale_ub, dtype, group_size, *_: _fake(x, x.shape, scale, dtype, group_size))
def quant_fp8_cpu(
    x: Tensor, scale: Tensor | None, scale_ub: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantizes x [..., H] in fp32, bf16 or fp16, any strides.

    scale_ub: bounds the largest absolute value that a dynamic scale is made of; one element, or None. The others are in
    the module's docstring.
    """
    q = _Quantization(x.shape, scale, dtype, group_size, scale_ub, power_of_two)
    rows, count, _, stride = as_rows(x)
    kernels.quant_fp8(
        rows.data_ptr(), stride, count, DTYPE_CODE[x.dtype], FORMAT_CODE[dtype],
        scale is None and group_size == TENSOR, *q.arguments,
    )  # fmt: skip
    return q.out, q.scale


@opaque(
    fake=lambda x, round_gate, scale, dtype, group_size, *_: _fake(
        x, torch.Size((*x.shape[:-1], x.shape[-1] // 2)), scale, dtype, group_size
    )
)
def silu_and_mul_quant_cpu(
    x: Tensor, round_gate: bool, scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantizes ``silu(x[..., :d]) * x[..., d:]`` [..., d], rounded to x's dtype before; not with ``TENSOR``.

    ``round_gate`` rounds the silu too; the others are in the module's docstring.
    """
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
    q = _Quantization(shape, scale, dtype, group_size, None, power_of_two)
    rows, count, _, stride = as_rows(x)
    kernels.silu_and_mul_quant_fp8(
        rows.data_ptr(), stride, count, DTYPE_CODE[x.dtype], FORMAT_CODE[dtype], round_gate, *q.arguments
    )
    return q.out, q.scale


@opaque(
    fake=lambda x, weight, eps, variance_size, cast_first, scale, dtype, group_size, *_: _fake(
        x, x.shape, scale, dtype, group_size
    )
)
def rms_norm_quant_cpu(
    x: Tensor, weight: Tensor | None, eps: float, variance_size: int, cast_first: bool,
    scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantizes the norm of x [..., H], rounded to x's dtype before; not with ``TENSOR``.

    The first arguments are those of ``rms_norm_cpu``, the others are in the module's docstring.
    """
    q = _Quantization(x.shape, scale, dtype, group_size, None, power_of_two)
    _rms_norm_quant(x, None, None, weight, eps, variance_size, cast_first, False, q)
    return q.out, q.scale


@opaque(
    fake=lambda x, residual, weight, eps, variance_size, cast_first, round_sum, scale, dtype, group_size, *_: (
        *_fake(x, x.shape, scale, dtype, group_size),
        x.new_empty(x.shape),
    )
)
def add_rms_norm_quant_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variance_size: int, cast_first: bool,
    round_sum: bool, scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As :func:`rms_norm_quant_cpu`, of ``x + residual``; returns that sum too, as ``add_rms_norm_cpu`` does."""
    q = _Quantization(x.shape, scale, dtype, group_size, None, power_of_two)
    new_residual = new_like(x)
    _rms_norm_quant(x, residual, new_residual, weight, eps, variance_size, cast_first, round_sum, q)
    return q.out, q.scale, new_residual


def _rms_norm_quant(
    x: Tensor, residual: Tensor | None, new_residual: Tensor | None, weight: Tensor | None, eps: float,
    variance_size: int, cast_first: bool, round_sum: bool, q: _Quantization,
) -> None:  # fmt: skip
    dtype = x.dtype
    rows, count, width, stride = as_rows(x)
    residual_stride = 0
    if residual is not None:
        residual, _, _, residual_stride = as_rows(readable(residual, dtype))
    cast = DTYPE_CODE[weight.dtype if cast_first and weight is not None else torch.float32]
    if weight is not None:
        weight = readable(weight, dtype).contiguous()
    kernels.rms_norm_quant_fp8(
        None if new_residual is None else new_residual.data_ptr(), count, DTYPE_CODE[dtype],
        FORMAT_CODE[q.out.dtype],
        rows.data_ptr(), stride,
        None if residual is None else residual.data_ptr(), residual_stride,
        residual is not None and residual.dtype is torch.float32,
        None if weight is None else weight.data_ptr(), weight is not None and weight.dtype is torch.float32,
        width, variance_size or width, eps, 0.0, cast, round_sum, *q.arguments,
    )  # fmt: skip
