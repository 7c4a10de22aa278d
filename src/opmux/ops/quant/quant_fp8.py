"""Quantization to fp8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .fp8 import Fp8Format, GroupShape, power_of_two_above

__all__ = ["QuantFP8"]

kernels_triton = lazy_module("opmux.ops.quant.kernels_triton")


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """Scales x into the range of an 8-bit float and rounds it there; returns ``(x_q, scale)`` with ``x ~ x_q * scale``.

    Dynamic: the scale is ``amax / M`` of the tensor, of each token, or of each group of g neighbours in a row, where M
    is the format's largest value, and never less than ``1 / (512 M)``: a row of zeros stays zeros with a finite scale.
    Static: the scale is given. Values saturate at +-M before the cast; ties round to even.

    Shapes:  x [..., H] -> x_q [..., H] and a scale [1] (tensor), [..., 1] (token) or [..., ceil(H/g)] (group); a last
             group that is shorter than g is quantized on its own. A static scale has one element, one a token ([T] or
             [..., 1]), one a channel ([H]), or is 2-D and scales blocks of the last two dimensions; it is returned, as
             a copy, in the shape that broadcasts: [..., 1], [1, H].
    Dtypes:  fp32, fp16, bf16 -> float8_e4m3fn (M = 448) or float8_e4m3fnuz (M = 224); scales are fp32, as is the
             arithmetic. Tensor, token and static scales multiply by the reciprocal; groups divide.
    Edges:   a NaN makes its scale and values NaN; an infinity makes the scale infinite. Nothing to take a maximum of:
             the least scale.
    Mutates: nothing.      Grad: native only; the gradient of x_q is itself fp8.
    Errors:  TypeError for integer x. ValueError for a group shape that a dynamic scale cannot have, for a scale that is
             missing (static) or given (dynamic) or does not fit x, and for ``scale_ub`` outside per-token dynamic.
    Source:  Micikevicius et al. 2022, arXiv 2209.05433; group scales: DeepSeek-V3, arXiv 2412.19437.

    Args:
        static: the caller gives the scale.
        group_shape: ``GroupShape.PER_TENSOR``, ``PER_TOKEN``, ``PER_CHANNEL`` (static only) or ``GroupShape(1, g)``.
        num_token_padding: at least so many rows of x_q; those beyond x are zeros, and have no scale. Not with groups.
        column_major_scales: dynamic group scales have the strides (1, T).
        tma_aligned_scales: with ``column_major_scales``, the column stride is a multiple of 4.
        use_ue8m0: dynamic group scales are powers of two, rounded up after the floor.
        compile_native: as of ``CustomOp``.
        dtype: the format; None means float8_e4m3fn.
    """

    tolerance = Tolerance(ulp=1.0, fp32=2.0)

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape | tuple[int, int],
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
        *,
        dtype: torch.dtype | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable, compile_native=compile_native)
        group_shape = GroupShape(*group_shape)
        if not static and not (group_shape.is_per_tensor or group_shape.is_per_token or group_shape.is_per_group):
            raise ValueError(
                f"A dynamic scale is per tensor, per token or per group of (1, g); group_shape is {tuple(group_shape)}."
            )
        self.static = static
        self.group_shape = group_shape
        self.num_token_padding = num_token_padding or 0
        self.column_major_scales = column_major_scales
        self.tma_aligned_scales = tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        self.format = Fp8Format.of(dtype or torch.float8_e4m3fn)
        self.by_group = not static and group_shape.is_per_group

    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``use_triton`` changes nothing: which kernel runs is the dispatcher's business."""
        self._check(x, scale_ub)
        scale = self.prepared(x.shape, scale)
        if self.by_group:
            return self.finished(*self._native_by_group(x))
        values = wide(x)
        if scale is not None:
            scale = scale.clone()
        else:
            rows = values.reshape(1, -1) if self.group_shape.is_per_tensor else values
            amax = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros((*rows.shape[:-1], 1))
            if self.group_shape.is_per_tensor:
                amax = amax.reshape(1)
            if scale_ub is not None:
                amax = torch.minimum(amax, scale_ub.to(amax.dtype))
            scale = self.format.scale_of(amax)
        x_q = self.format.cast(values * _over_blocks(x.shape, 1.0 / scale.to(values.dtype)))
        return self.finished(x_q, scale.float())

    def _native_by_group(self, x: Tensor) -> tuple[Tensor, Tensor]:
        width, size = x.shape[-1], self.group_shape.col
        groups = -(-width // size)
        values = torch.nn.functional.pad(wide(x), (0, groups * size - width)).unflatten(-1, (groups, size))
        scale = self.format.scale_of(values.abs().amax(-1))
        if self.use_ue8m0:
            scale = power_of_two_above(scale)
        x_q = self.format.cast(values / scale.unsqueeze(-1)).flatten(-2)[..., :width]
        return x_q.contiguous(), scale.float()

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        self._check(x, scale_ub)
        x_q, scale = kernels_cpu.quant_fp8_cpu(x, self.prepared(x.shape, scale), scale_ub, *self.kernel_options)
        return self.finished(x_q, scale)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        self._check(x, scale_ub)
        x_q, scale = kernels_triton.quant_fp8_triton(x, self.prepared(x.shape, scale), scale_ub, *self.kernel_options)
        return self.finished(x_q, scale)

    forward_hip = forward_xpu = forward_cuda

    # Kernels, also of fused ops, take prepared(shape, scale) and kernel_options; finished takes what they return.

    def prepared(self, shape: torch.Size, scale: Tensor | None) -> Tensor | None:
        """The scale for values of this shape: a static one in fp32 and in the shape that broadcasts, otherwise None."""
        if self.static != (scale is not None):
            what = "needs a scale: it was built static" if self.static else "computes the scale: it was built dynamic"
            raise ValueError(f"quant_fp8 {what}.")
        return None if scale is None else self._fitting(shape, scale.float())

    @property
    def kernel_options(self) -> tuple[torch.dtype, int, bool]:
        """The format, the dynamic group size, and whether scales are powers of two."""
        if self.by_group:
            return self.format.dtype, self.group_shape.col, self.use_ue8m0
        return self.format.dtype, kernels_cpu.TENSOR if self.group_shape.is_per_tensor else kernels_cpu.ROW, False

    def finished(self, x_q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Values padded, or group scales in the memory order that was asked for."""
        return (x_q, self._laid_out(scale)) if self.by_group else (self._padded(x_q), scale)

    def _laid_out(self, scale: Tensor) -> Tensor:
        if not self.column_major_scales or scale.dim() < 2:
            return scale
        rows = scale.shape[-2]
        stride = -(-rows // 4) * 4 if self.tma_aligned_scales else rows
        out = scale.new_empty((*scale.shape[:-2], scale.shape[-1], stride)).transpose(-1, -2)[..., :rows, :]
        return out.copy_(scale)

    def _fitting(self, shape: torch.Size, scale: Tensor) -> Tensor:
        if scale.numel() == 1:
            return scale if self.group_shape.is_per_tensor else scale.reshape(1, 1)
        rows = (*shape[:-1], 1)
        if self.group_shape.is_per_token and (scale.shape == rows or scale.shape == (math.prod(rows),)):
            return scale.reshape(rows)
        if self.group_shape.is_per_channel and scale.shape == shape[-1:]:
            return scale.unsqueeze(0)
        if scale.dim() == 2 and len(shape) > 1 and all(map(_divides, scale.shape, shape[-2:])):
            return scale
        raise ValueError(
            f"A static scale of shape {tuple(scale.shape)} does not fit an input of shape {tuple(shape)} with "
            f"{self.group_shape}; give one element, one a row, one a column, or one for each block of a matrix."
        )

    def _padded(self, x_q: Tensor) -> Tensor:
        missing = self.num_token_padding - x_q.shape[-2] if x_q.dim() > 1 else 0
        if missing <= 0:
            return x_q
        shape = (*x_q.shape[:-2], self.num_token_padding, x_q.shape[-1])
        out = torch.zeros(shape, dtype=torch.uint8, device=x_q.device)  # which has more operations than fp8
        out[..., : x_q.shape[-2], :] = x_q.view(torch.uint8)
        return out.view(x_q.dtype)

    def _check(self, x: Tensor, scale_ub: Tensor | None) -> None:
        if not x.is_floating_point():
            raise TypeError(f"quant_fp8 takes floating-point tensors; x is {x.dtype}.")
        if scale_ub is not None and (self.static or not self.group_shape.is_per_token or scale_ub.numel() != 1):
            raise ValueError(
                "scale_ub bounds the absolute maximum of a row: one element, with dynamic per-token scales only."
            )

    def extra_repr(self) -> str:
        return f"{'static' if self.static else 'dynamic'}, {tuple(self.group_shape)}, {str(self.format.dtype)[6:]}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, h) for h in (4096, 14336) for t in (1, 64, 1024, 16384)]
        edges = [(0, 64), (7, 1), (7, 3), (3, 200), (3, 769), (2, 65537)]
        formats: tuple[dict[str, Any], ...] = ({}, {"dtype": torch.float8_e4m3fnuz})
        for init, (tokens, hidden) in ((i, s) for i in quantizations(per_tensor=True) for s in [*sizes, *edges]):
            for extra in formats if tokens < 8 else formats[:1]:
                yield Case(
                    name=f"T={tokens} H={hidden} {name_of(init)}{' fnuz' if extra else ''}",
                    init={**init, **extra},
                    args=lambda i, t=tokens, h=hidden, s=init["static"]: (i.randn(t, h, scale=3.0), *scale_of(i, s)),
                    dims={"T": tokens, "H": hidden},
                    bench=(tokens, hidden) in sizes,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=case.dims["T"] * case.dims["H"] * (dtype.itemsize + 1))


def quantizations(*, per_tensor: bool) -> Iterator[dict[str, Any]]:
    """The kinds of quantization that cases go through, as constructor arguments."""
    yield {"static": True, "group_shape": GroupShape.PER_TENSOR}
    if per_tensor:
        yield {"static": False, "group_shape": GroupShape.PER_TENSOR}
    yield {"static": False, "group_shape": GroupShape.PER_TOKEN}
    yield {"static": False, "group_shape": GroupShape(1, 128)}


def name_of(init: dict[str, Any]) -> str:
    """What a case calls one of ``quantizations``."""
    names = {GroupShape.PER_TENSOR: "per tensor", GroupShape.PER_TOKEN: "per token"}
    kind = names.get(init["group_shape"]) or f"groups of {init['group_shape'].col}"
    return f"{'static' if init['static'] else 'dynamic'} {kind}"


def scale_of(inputs: Inputs, static: bool) -> tuple[Tensor, ...]:
    """The scale argument of a static case."""
    return (torch.full((1,), 0.0153, device=inputs.device),) if static else ()


def _divides(parts: int, size: int) -> bool:
    return parts == size or (parts > 0 and size % parts == 0)


def _over_blocks(shape: torch.Size, factor: Tensor) -> Tensor:
    """Factors of blocks, spread over the elements."""
    if factor.numel() == 1:
        return factor.reshape(())
    if len(shape) == 1:
        return factor.reshape(shape)
    if factor.shape == (*shape[:-1], 1):
        return factor
    rows, columns = (n // s if s else 1 for n, s in zip(shape[-2:], factor.shape, strict=True))
    return factor.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
