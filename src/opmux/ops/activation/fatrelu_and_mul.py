"""The gate of MiniCPM-S."""

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

__all__ = ["FatreluAndMul"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(CustomOp):
    """``gate * x[..., d:]`` where ``gate = x[..., :d]`` if it is above the threshold, else 0.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Edges:   a gate equal to the threshold gives 0; a NaN gate stays NaN.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd; TypeError for integer x.
    Source:  MiniCPM-S (ProSparse), arXiv 2402.13516.

    Args:
        threshold: see above.
    """

    tolerance = Tolerance(ulp=1.0, fp32=1.0)

    def __init__(self, threshold: float = 0.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.threshold = float(threshold)

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("fatrelu_and_mul", x)
        gate, up = x.chunk(2, -1)
        kept = torch.where(wide(gate) <= self.threshold, 0.0, wide(gate))  # false for NaN, which is kept
        return (kept * wide(up)).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("fatrelu_and_mul", x)
        return kernels_cpu.act_and_mul_cpu(x, "fatrelu", self.threshold, False, False)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("fatrelu_and_mul", x)
        return kernels_triton.act_and_mul_triton(x, "fatrelu", self.threshold, False, False)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases([{"threshold": 0.0}, {"threshold": 0.5}])

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
