"""The first half of a gated MLP in one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu
from .product import random_parameters

__all__ = ["LinearSiluAndMul"]


@CustomOp.register("linear_silu_and_mul")
class LinearSiluAndMul(CustomOp):
    """``silu(x @ Wg.T) * (x @ Wu.T)``, with ``Wg`` over ``Wu`` in one weight.

    Shapes:  x [..., in] -> [..., I]; weight [2I, in], gate rows first; bias [2I].
    Dtypes:  fp32, fp16, bf16; fp32 accumulation. Both products, the silu and the result are each rounded to x's
             dtype, so that the op equals ``replicated_linear`` followed by ``silu_and_mul`` with ``round_gate``.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``input_size``.
    Source:  Shazeer 2020, arXiv 2002.05202.
    """

    tolerance = Tolerance(ulp=4.0, fp32=64.0, scale=1.0)

    def __init__(
        self, input_size: int, intermediate_size: int, bias: bool = False, *, enforce_enable: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.input_size = input_size
        self.intermediate_size = intermediate_size
        self.weight = frozen(torch.empty(2 * intermediate_size, input_size))
        self.bias = frozen(torch.zeros(2 * intermediate_size)) if bias else None

    def forward_native(self, x: Tensor) -> Tensor:
        self._check(x)
        gate, up = F.linear(x, self.weight, self.bias).chunk(2, -1)
        return F.silu(gate) * up

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.input_size:
            self._check(x)
        return kernels_cpu.linear_silu_and_mul_cpu(x, self.weight, self.bias)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"linear_silu_and_mul was built for input_size {self.input_size}; x has shape {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.intermediate_size}, bias={self.bias is not None}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, i, d) for i, d in ((576, 1536), (4096, 14336)) for t in (1, 4, 512)]
        edges = [(0, 64, 8), (1, 1, 1), (3, 7, 5), (5, 65, 3)]
        for t, i, d in [*sizes, *edges]:
            yield Case(
                name=f"T={t} {i}->{d}",
                init={"input_size": i, "intermediate_size": d, "bias": d % 2 == 1},
                args=lambda inputs, t=t, i=i: (inputs.randn(t, i),),
                dims={"T": t, "in": i, "I": d},
                bench=(t, i, d) in sizes,
                prepare=random_parameters,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        t, i, d = case.dims["T"], case.dims["in"], case.dims["I"]
        return Cost(size_bytes=dtype.itemsize * (t * i + 2 * i * d + t * d), flops=4 * t * i * d)
