"""The SwiGLU gate with the halves exchanged."""

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
from .gated import check_gated, gated_cases, gated_cost

__all__ = ["MulAndSilu"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("mul_and_silu")
class MulAndSilu(CustomOp):
    """``x[..., :d] * silu(x[..., d:])``: the second half is the gate.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd; TypeError for integer x.
    Source:  Shazeer 2020, arXiv 2002.05202; used by Molmo, Ultravox, Cohere 2 Vision.
    """

    tolerance = Tolerance(ulp=1.0, fp32=4.0)

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("mul_and_silu", x)
        up, gate = x.chunk(2, -1)
        return (wide(up) * F.silu(wide(gate))).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("mul_and_silu", x)
        return kernels_cpu.act_and_mul_cpu(x, "silu", 0.0, False, True)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("mul_and_silu", x)
        return kernels_triton.act_and_mul_triton(x, "silu", 0.0, False, True)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
