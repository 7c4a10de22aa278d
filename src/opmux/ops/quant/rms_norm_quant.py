"""RMS norm, quantized."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from ..norm.rms_norm import CastOrder, RMSNorm
from . import kernels_cpu
from .fp8 import GroupShape
from .quant_fp8 import QuantFP8, name_of, quantizations, scale_of
from .silu_and_mul_quant import check_one_pass

__all__ = ["RMSNormQuant"]

kernels_triton = lazy_module("opmux.ops.quant.kernels_triton")


@CustomOp.register("rms_norm_quant")
class RMSNormQuant(CustomOp):
    """``quant_fp8(rms_norm(x, residual))`` in one pass over x.

    Returns ``(y_q, scale)``, or ``(y_q, scale, s)`` with a residual.

    Shapes:  x, residual [..., H] -> y_q, s [..., H]; scale as of ``QuantFP8``. The weight is ``norm.weight`` [H].
    Dtypes:  fp32, fp16, bf16. The norm is rounded to x's dtype before it is quantized, so the result is that of the
             two ops bit for bit; see ``RMSNorm`` and ``QuantFP8`` for the rest.
    Mutates: nothing.      Grad: native only.
    Errors:  those of the two ops; ValueError for a dynamic scale of the whole tensor, which takes two passes.
    Source:  the two ops'.

    Args:
        hidden_size, eps, var_hidden_size, has_weight, weight_dtype, cast_order, round_sum: as of ``RMSNorm``.
        static, group_shape, options: as of ``QuantFP8``.
    """

    tolerance = Tolerance(ulp=1.0, fp32=16.0, inside=2.0)

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        static: bool,
        group_shape: GroupShape | tuple[int, int],
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        weight_dtype: torch.dtype | None = None,
        cast_order: CastOrder = "cast_first",
        round_sum: bool = False,
        enforce_enable: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.norm = RMSNorm(
            hidden_size, eps, var_hidden_size, has_weight, weight_dtype, cast_order=cast_order, round_sum=round_sum
        )
        self.quant = QuantFP8(static, group_shape, **options)
        check_one_pass("rms_norm_quant", self.quant)

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        y, *summed = normed if isinstance(normed := self.norm.forward_native(x, residual), tuple) else (normed,)
        return (*self.quant.forward_native(y, scale), *summed)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        norm, quant = self.norm, self.quant
        norm._check(x, residual)
        scale = quant.prepared(x.shape, scale)
        if residual is None:
            y_q, scale = kernels_cpu.rms_norm_quant_cpu(
                x, norm.weight, norm.eps, norm.variance_size, norm.cast_first, scale, *quant.kernel_options
            )
            return quant.finished(y_q, scale)
        y_q, scale, summed = kernels_cpu.add_rms_norm_quant_cpu(
            x, residual, norm.weight, norm.eps, norm.variance_size, norm.cast_first, norm.round_sum, scale,
            *quant.kernel_options,
        )  # fmt: skip
        return (*quant.finished(y_q, scale), summed)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        norm, quant = self.norm, self.quant
        norm._check(x, residual)
        scale = quant.prepared(x.shape, scale)
        if residual is None:
            y_q, scale = kernels_triton.rms_norm_quant_triton(
                x, norm.weight, norm.eps, norm.variance_size, norm.cast_first, scale, *quant.kernel_options
            )
            return quant.finished(y_q, scale)
        y_q, scale, summed = kernels_triton.add_rms_norm_quant_triton(
            x, residual, norm.weight, norm.eps, norm.variance_size, norm.cast_first, norm.round_sum, scale,
            *quant.kernel_options,
        )  # fmt: skip
        return (*quant.finished(y_q, scale), summed)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, h) for h in (576, 4096, 8192) for t in (1, 64, 1024, 16384)]
        edges = [(0, 64), (7, 1), (7, 3), (3, 200), (3, 769), (2, 65537)]
        kinds = list(quantizations(per_tensor=False))
        for init, (tokens, hidden), add in itertools.product(kinds, [*sizes, *edges], (False, True)):
            yield Case(
                name=f"{'add+' if add else ''}norm T={tokens} H={hidden} {name_of(init)}",
                init={"hidden_size": hidden, **init},
                args=lambda i, t=tokens, h=hidden, add=add, s=init["static"]: (
                    i.randn(t, h),
                    i.randn(t, h, scale=2.0) if add else None,
                    *scale_of(i, s),
                ),
                dims={"T": tokens, "H": hidden, "add": int(add)},
                bench=(tokens, hidden) in sizes,
                prepare=_random_weight,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        streams = (3 if case.dims["add"] else 1) * dtype.itemsize + 1
        return Cost(size_bytes=case.dims["T"] * case.dims["H"] * streams + case.dims["H"] * dtype.itemsize)


def _random_weight(op: RMSNormQuant, inputs: Inputs) -> None:
    if op.norm.weight is not None:
        op.norm.weight.data = inputs.randn(op.norm.hidden_size, scale=0.2, shift=1.0)
