"""The GeGLU gate."""

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

__all__ = ["GeluAndMul"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """GeGLU gate: ``gelu(x[..., :d]) * x[..., d:]``.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype. With
             ``round_gate`` the gelu is rounded to x's dtype before the multiply, as two separate ops would.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd or ``approximate`` is neither "none" nor "tanh"; TypeError for
             integer x.
    Source:  Shazeer 2020, arXiv 2002.05202; used by Gemma ("tanh"), Zamba 2 ("none").

    Args:
        approximate: "none" for ``x * Phi(x)``, "tanh" for the tanh form.
        round_gate: see Dtypes.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def __init__(self, approximate: str = "none", *, round_gate: bool = False, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is {approximate!r}; gelu_and_mul knows 'none' and 'tanh'.")
        self.approximate = approximate
        self.round_gate = round_gate
        self._kind = "gelu" if approximate == "none" else "gelu_tanh"

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul", x)
        gate, up = x.chunk(2, -1)
        gate = F.gelu(wide(gate), approximate=self.approximate)
        if self.round_gate:
            gate = wide(gate.to(x.dtype))
        return (gate * wide(up)).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul", x)
        return kernels_cpu.act_and_mul_cpu(x, self._kind, 0.0, self.round_gate, False)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul", x)
        return kernels_triton.act_and_mul_triton(x, self._kind, 0.0, self.round_gate, False)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases([{"approximate": "none"}, {"approximate": "tanh"}])

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
