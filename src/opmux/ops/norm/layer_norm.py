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
    """``(s - mean(s)) / sqrt(var(s) + eps) * (weight + weight_offset) + bias`` over the last dimension.

    ``s = x``, or ``x + residual``, which is then returned, too: ``(y, s)``. The variance is the population's.

    Shapes:  x, residual [..., H] -> [..., H]; weight, bias [H].
    Dtypes:  fp32, fp16, bf16 for x and, independently, for the parameters; a residual has x's dtype. The sum and
             the norm are fp32, each rounded once to x's dtype. The norm reads the unrounded sum; with ``round_sum`` the
             rounded one, as two separate ops would. The variance is taken of the centred values, so a large mean costs no digits.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``hidden_size``, or the residual has another shape or dtype.
    Source:  Ba et al. 2016, arXiv 1607.06450; used by GPT-2, GPT-NeoX, StarCoder 2, vision towers; the offset by
             Nemotron, arXiv 2402.16819.

    Args:
        hidden_size: H.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
        dtype: of the parameters; None means torch's default.
        weight_offset: added to the weight, in fp32.
        round_sum: see Dtypes.
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
        weight_offset: float = 0.0,
        round_sum: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.hidden_size = hidden_size
        self.eps = float(eps)
        self.weight_offset = float(weight_offset)
        self.round_sum = round_sum
        self.weight = frozen(torch.ones(hidden_size, dtype=dtype)) if elementwise_affine else None
        self.bias = frozen(torch.zeros(hidden_size, dtype=dtype)) if elementwise_affine and bias else None

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        y = wide(x) if residual is None else wide(x) + wide(residual)
        total = y.to(x.dtype)
        if self.round_sum:
            y = wide(total)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * (self.weight.to(y.dtype) + self.weight_offset)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        y = y.to(x.dtype)
        return y if residual is None else (y, total)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return kernels_cpu.layer_norm_cpu(x, self.weight, self.bias, self.eps, self.weight_offset)
        return kernels_cpu.add_layer_norm_cpu(
            x, residual, self.weight, self.bias, self.eps, self.weight_offset, self.round_sum
        )

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return kernels_triton.layer_norm_triton(x, self.weight, self.bias, self.eps, self.weight_offset)
        return kernels_triton.add_layer_norm_triton(
            x, residual, self.weight, self.bias, self.eps, self.weight_offset, self.round_sum
        )

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor, residual: Tensor | None) -> None:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"layer_norm was built for hidden_size {self.hidden_size}; x has shape {tuple(x.shape)}.")
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise ValueError(
                f"residual is {residual.dtype} {tuple(residual.shape)}; it must be as x, {x.dtype} {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, h) for h in (1152, 4096) for t in (1, 64, 1024, 16384)]
        edges = [(0, 64), (7, 1), (7, 3), (3, 769), (2, 65537)]
        for adds in (False, True):
            for tokens, hidden in [*sizes[: None if not adds else 4], *edges]:
                yield Case(
                    name=f"T={tokens} H={hidden}{' residual' if adds else ''}",
                    init={"hidden_size": hidden, **({"weight_offset": 1.0} if adds else {})},
                    args=lambda i, t=tokens, h=hidden, adds=adds: (
                        i.randn(t, h, shift=0.5),
                        *([i.randn(t, h)] if adds else []),
                    ),
                    dims={"T": tokens, "H": hidden, "streams": 4 if adds else 2},
                    bench=(tokens, hidden) in sizes,
                    prepare=_random_parameters,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        rows = case.dims["streams"] * case.dims["T"]
        return Cost(size_bytes=dtype.itemsize * (rows + 2) * case.dims["H"])


def _random_parameters(op: LayerNorm, inputs: Inputs) -> None:
    if op.weight is not None:
        op.weight.data = inputs.randn(op.hidden_size, scale=0.2, shift=1.0)
    if op.bias is not None:
        op.bias.data = inputs.randn(op.hidden_size, scale=0.5)
