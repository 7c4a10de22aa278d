"""GELU by the normal distribution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .elementwise import check_floating, elementwise_cases, elementwise_cost

__all__ = ["GELU"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("gelu")
class GELU(CustomOp):
    """``x * Phi(x)``, where Phi is the normal distribution.

    Shapes:  x [...] -> [...].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Edges:   minus infinity gives NaN (infinity times 0), as the formula does; finite x never gives NaN.
    Mutates: nothing.      Grad: native only.
    Errors:  TypeError for integer x.
    Source:  Hendrycks and Gimpel 2016, arXiv 1606.08415; used by GPT-NeoX, Falcon, Whisper, ViT.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def forward_native(self, x: Tensor) -> Tensor:
        check_floating("gelu", x)
        return F.gelu(wide(x)).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_floating("gelu", x)
        return kernels_cpu.activation_cpu(x, "gelu", [])

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_floating("gelu", x)
        return kernels_triton.activation_triton(x, "gelu", [])

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from elementwise_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return elementwise_cost(case, dtype)
