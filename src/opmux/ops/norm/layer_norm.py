"""Layer norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu

__all__ = ["LayerNorm"]

kernels_triton = lazy_module("opmux.ops.norm.kernels_triton")


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, with the population variance.

    Shapes:  x [..., H] -> [..., H]; weight, bias [H].
    Dtypes:  fp32, fp16, bf16 for x and, independently, for the parameters; computed in fp32, rounded once to x's dtype.
             The variance is taken of the centred values, so a large mean costs no digits.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``hidden_size``.
    Source:  Ba et al. 2016, arXiv 1607.06450; used by GPT-2, GPT-NeoX, StarCoder 2, vision towers.
    """

    tolerance = Tolerance(ulp=1.0, fp32=32.0, scale=1.0)

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.hidden_size = hidden_size
        self.eps = float(eps)
        self.weight = frozen(torch.ones(hidden_size, dtype=dtype)) if elementwise_affine else None
        self.bias = frozen(torch.zeros(hidden_size, dtype=dtype)) if elementwise_affine and bias else None

    def forward_native(self, x: Tensor) -> Tensor:
        self._check(x)
        y = wide(x)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        self._check(x)
        return kernels_cpu.layer_norm_cpu(x, self.weight, self.bias, self.eps)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        self._check(x)
        return kernels_triton.layer_norm_triton(x, self.weight, self.bias, self.eps)

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"layer_norm was built for hidden_size {self.hidden_size}; x has shape {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, h) for h in (1152, 4096) for t in (1, 64, 1024, 16384)]
        edges = [(0, 64), (7, 1), (7, 3), (3, 769), (2, 65537)]
        for tokens, hidden in [*sizes, *edges]:
            yield Case(
                name=f"T={tokens} H={hidden}",
                init={"hidden_size": hidden},
                args=lambda i, t=tokens, h=hidden: (i.randn(t, h, shift=0.5),),
                dims={"T": tokens, "H": hidden},
                bench=(tokens, hidden) in sizes,
                prepare=_random_parameters,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=dtype.itemsize * 2 * (case.dims["T"] * case.dims["H"] + case.dims["H"]))


def _random_parameters(op: LayerNorm, inputs: Inputs) -> None:
    if op.weight is not None:
        op.weight.data = inputs.randn(op.hidden_size, scale=0.2, shift=1.0)
    if op.bias is not None:
        op.bias.data = inputs.randn(op.hidden_size, scale=0.5)
