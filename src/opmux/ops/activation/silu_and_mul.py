"""The SwiGLU gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu
from .gated import check_gated, gated_cases, gated_cost

__all__ = ["SiluAndMul"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """SwiGLU gate: ``silu(x[..., :d]) * x[..., d:]``.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype. With ``round_gate`` the silu is rounded to
             x's dtype before the multiply, as two separate ops would (transformers' MLPs).
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd; TypeError for integer x.
    Source:  Shazeer 2020, arXiv 2002.05202; used by Llama, Qwen, Mistral.
    """

    tolerance = Tolerance(ulp=1.0, fp32=4.0)

    def __init__(self, *, compile_native: bool = True, round_gate: bool = False, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable, compile_native=compile_native)
        self.round_gate = round_gate

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("silu_and_mul", x)
        gate, up = x.chunk(2, -1)
        if self.round_gate or x.dtype in (torch.float32, torch.float64):
            return F.silu(gate) * up
        return (F.silu(gate.float()) * up.float()).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("silu_and_mul", x)
        return kernels_cpu.act_and_mul_cpu(x, "silu", 0.0, self.round_gate, False)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("silu_and_mul", x)
        return kernels_triton.silu_and_mul_triton(x, self.round_gate)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
