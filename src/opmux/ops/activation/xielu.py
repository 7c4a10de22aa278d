"""xIELU: a quadratic for positive values, an exponential for negative ones, with learned slopes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu
from .elementwise import check_floating, elementwise_cases, elementwise_cost

__all__ = ["XIELU"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("xielu")
class XIELU(CustomOp):
    """``ap x^2 + beta x`` for x > 0, else ``(expm1(min(x, eps)) - x) an + beta x``.

    ``ap = softplus(alpha_p)``, ``an = beta + softplus(alpha_n)``.

    Shapes:  x [...] -> [...].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype, whatever dtype the parameters have.
    State:   parameters ``alpha_p``, ``alpha_n`` [1], stored as inverse softplus; buffers ``beta``, ``eps``, in the
             state dict.
    Mutates: nothing.      Grad: native only.
    Errors:  TypeError for integer x.
    Source:  Huang and Schlag 2024, arXiv 2411.13010; used by Apertus.

    Args:
        alpha_p_init, alpha_n_init: the slopes at first.
        beta, eps: see above.
        dtype: of the parameters and buffers.
        with_vector_loads: accepted for the order of the parameters; kernels choose their own loads.
    """

    beta: Tensor
    eps: Tensor
    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype = torch.bfloat16,
        with_vector_loads: bool = False,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.alpha_p = frozen(torch.tensor([alpha_p_init], dtype=dtype).expm1().log())
        self.alpha_n = frozen(torch.tensor([alpha_n_init - beta], dtype=dtype).expm1().log())
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward_native(self, x: Tensor) -> Tensor:
        check_floating("xielu", x)
        values = wide(x)
        alpha_p = F.softplus(self.alpha_p.to(values.dtype))
        alpha_n = self.beta.to(values.dtype) + F.softplus(self.alpha_n.to(values.dtype))
        negative = (torch.expm1(torch.minimum(values, self.eps.to(values.dtype))) - values) * alpha_n
        chosen = torch.where(values > 0, alpha_p * values * values, negative)
        return (chosen + self.beta.to(values.dtype) * values).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_floating("xielu", x)
        return kernels_cpu.xielu_cpu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_floating("xielu", x)
        return kernels_triton.xielu_triton(x, self.alpha_p, self.alpha_n, self.beta, self.eps)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from elementwise_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return elementwise_cost(case, dtype)
