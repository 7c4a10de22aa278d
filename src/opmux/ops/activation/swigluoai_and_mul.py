"""The gate of gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .gated import check_gated, gated_cases, gated_cost

__all__ = ["SwigluOAIAndMul"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("swigluoai_and_mul")
class SwigluOAIAndMul(CustomOp):
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``.

    Gate and up alternate: gate at even, up at odd positions of the last dimension.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd; TypeError for integer x.
    Source:  gpt-oss, arXiv 2508.10925.

    Args:
        alpha, limit: see above. The gate has no lower bound.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def __init__(self, alpha: float = 1.702, limit: float = 7.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.alpha = float(alpha)
        self.limit = float(limit)

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("swigluoai_and_mul", x)
        gate, up = wide(x[..., ::2]), wide(x[..., 1::2])
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("swigluoai_and_mul", x)
        return kernels_cpu.swigluoai_and_mul_cpu(x, self.alpha, self.limit)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("swigluoai_and_mul", x)
        return kernels_triton.swigluoai_and_mul_triton(x, self.alpha, self.limit)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
