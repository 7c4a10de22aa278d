"""GELU by a sigmoid."""

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
from .elementwise import check_floating, elementwise_cases, elementwise_cost

__all__ = ["QuickGELU"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("quick_gelu")
class QuickGELU(CustomOp):
    """``x * sigmoid(1.702 x)``; up to 0.02 from GELU.

    Shapes:  x [...] -> [...].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  TypeError for integer x.
    Source:  Hendrycks and Gimpel 2016, arXiv 1606.08415; used by CLIP.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def forward_native(self, x: Tensor) -> Tensor:
        check_floating("quick_gelu", x)
        return (wide(x) * torch.sigmoid(1.702 * wide(x))).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_floating("quick_gelu", x)
        return kernels_cpu.activation_cpu(x, "quick_gelu", [])

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_floating("quick_gelu", x)
        return kernels_triton.activation_triton(x, "quick_gelu", [])

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from elementwise_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return elementwise_cost(case, dtype)
