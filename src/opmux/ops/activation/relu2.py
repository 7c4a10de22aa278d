"""Squared ReLU."""

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

__all__ = ["ReLUSquaredActivation"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("relu2")
class ReLUSquaredActivation(CustomOp):
    """``max(x, 0)^2``.

    Shapes:  x [...] -> [...].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype. In fp16
             values above 255.8 become infinity.
    Mutates: nothing.      Grad: native only.
    Errors:  TypeError for integer x.
    Source:  So et al. 2021 (Primer), arXiv 2109.08668; used by Nemotron.
    """

    tolerance = Tolerance(ulp=1.0, fp32=1.0)

    def __init__(self, *, compile_native: bool = True, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable, compile_native=compile_native)

    def forward_native(self, x: Tensor) -> Tensor:
        check_floating("relu2", x)
        return F.relu(wide(x)).square().to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_floating("relu2", x)
        return kernels_cpu.activation_cpu(x, "relu2", [])

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_floating("relu2", x)
        return kernels_triton.activation_triton(x, "relu2", [])

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from elementwise_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return elementwise_cost(case, dtype)
