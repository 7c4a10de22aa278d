"""Gemma's RMS norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu
from .rms_norm import norm_cases, norm_cost

__all__ = ["GemmaRMSNorm"]

kernels_triton = lazy_module("opmux.ops.norm.kernels_triton")


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(CustomOp):
    """RMS norm that multiplies by ``1 + weight``, everything in fp32.

    ``s = x + residual``; ``y = s * rsqrt(mean(s^2) + eps) * (1 + weight)``; returns ``y``, or ``(y, s)``.

    Shapes:  x, residual [..., H] -> [..., H]; weight [H], zeros at first.
    Dtypes:  fp32, fp16, bf16. The sum, the norm, ``1 + weight`` and the product are fp32, rounded once to x's dtype: in
             bf16 ``1 + weight`` would lose a step. The norm reads the unrounded sum; with ``round_sum`` the rounded
             one.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``hidden_size`` or the residual has another shape.
    Source:  Gemma (arXiv 2403.08295); Gemma 2, Gemma 3.
    """

    tolerance = Tolerance(ulp=1.0, fp32=16.0)

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, round_sum: bool = False, enforce_enable: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.hidden_size = hidden_size
        self.eps = float(eps)
        self.round_sum = round_sum
        self.weight = frozen(torch.zeros(hidden_size))

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
        summed = total.to(x.dtype)
        if self.round_sum:
            total = summed.to(wide)
        y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + self.eps)
        y = (y * (1.0 + self.weight.to(wide))).to(x.dtype)
        return y if residual is None else (y, summed)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return kernels_cpu.rms_norm_cpu(x, self.weight, self.eps, self.hidden_size, 1.0, False)
        return kernels_cpu.add_rms_norm_cpu(
            x, residual, self.weight, self.eps, self.hidden_size, 1.0, False, self.round_sum
        )

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return kernels_triton.rms_norm_triton(x, self.weight, self.eps, self.hidden_size, 1.0, False)
        return kernels_triton.add_rms_norm_triton(
            x, residual, self.weight, self.eps, self.hidden_size, 1.0, False, self.round_sum
        )

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor, residual: Tensor | None) -> None:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"gemma_rms_norm was built for hidden_size {self.hidden_size}; x has shape {tuple(x.shape)}."
            )
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}; it must have x's, {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for case in norm_cases():
            yield Case(case.name, case.init, case.args, case.dims, case.bench, _random_weight)

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return norm_cost(case, dtype)


def _random_weight(op: GemmaRMSNorm, inputs: Inputs) -> None:
    op.weight.data = inputs.randn(op.hidden_size, scale=0.2)
