"""RMS norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu

__all__ = ["RMSNorm"]

kernels_triton = lazy_module("opmux.ops.norm.kernels_triton")

CastOrder = Literal["cast_first", "cast_last"]


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """Root-mean-square norm, with an optional residual that is added first.

    ``s = x + residual``; ``y = s * rsqrt(mean(s^2) + eps) * weight``; returns ``y``, or ``(y, s)`` with a residual.

    Shapes:  x, residual [..., H] -> [..., H]; weight [H].
    Dtypes:  fp32, fp16, bf16 for x and, independently, for the weight. ``s``, its mean square and the normalised value
             are fp32. ``cast_first`` rounds the normalised value to the weight's dtype, multiplies there, and rounds to
             x's dtype (Llama, Mistral, Qwen in transformers). ``cast_last`` multiplies in fp32 and rounds once (OLMo
             2).
             The output and the returned sum have x's dtype. The norm reads the unrounded fp32 sum; with ``round_sum``
             the rounded one, as two separate ops would.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``hidden_size``, the residual has another shape, or
             ``var_hidden_size`` is not in 1..hidden_size.
    Source:  Zhang and Sennrich 2019, arXiv 1910.07467; used by Llama, Mistral, Qwen, Phi-3.

    Args:
        hidden_size: H.
        eps: added to the mean square.
        var_hidden_size: take the mean square over the first so many features only (all of them are normalised).
        has_weight: without it there is no parameter and no multiplication.
        dtype: of the weight; None means torch's default.
        cast_order: where the value is rounded, see Dtypes.
        round_sum: see Dtypes.
    """

    tolerance = Tolerance(ulp=2.0, fp32=16.0)
    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
        *,
        cast_order: CastOrder = "cast_first",
        round_sum: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if var_hidden_size is not None and not 1 <= var_hidden_size <= hidden_size:
            raise ValueError(f"var_hidden_size is {var_hidden_size}; it must lie in 1..{hidden_size} (hidden_size).")
        if cast_order not in ("cast_first", "cast_last"):
            raise ValueError(f"cast_order is {cast_order!r}; there are 'cast_first' and 'cast_last'.")
        self.hidden_size = hidden_size
        self.eps = float(eps)
        self.variance_size = hidden_size if var_hidden_size is None else var_hidden_size
        self.cast_first = cast_order == "cast_first"
        self.round_sum = round_sum
        self.weight = frozen(torch.ones(hidden_size, dtype=dtype)) if has_weight else None

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
        summed = total.to(x.dtype)
        if self.round_sum:
            total = summed.to(wide)
        mean_square = total[..., : self.variance_size].square().mean(-1, keepdim=True)
        y = total * torch.rsqrt(mean_square + self.eps)
        if self.weight is not None:
            y = self.weight * y.to(self.weight.dtype) if self.cast_first else self.weight.to(wide) * y
        y = y.to(x.dtype)
        return y if residual is None else (y, summed)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if x.shape[-1] != self.hidden_size or (residual is not None and residual.shape != x.shape):
            self._check(x, residual)
        if residual is None:
            return kernels_cpu.rms_norm_cpu(x, self.weight, self.eps, self.variance_size, 0.0, self.cast_first)
        return kernels_cpu.add_rms_norm_cpu(
            x, residual, self.weight, self.eps, self.variance_size, 0.0, self.cast_first, self.round_sum
        )

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return kernels_triton.rms_norm_triton(x, self.weight, self.eps, self.variance_size, 0.0, self.cast_first)
        return kernels_triton.add_rms_norm_triton(
            x, residual, self.weight, self.eps, self.variance_size, 0.0, self.cast_first, self.round_sum
        )

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor, residual: Tensor | None) -> None:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"rms_norm was built for hidden_size {self.hidden_size}; x has shape {tuple(x.shape)}.")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}; it must have x's, {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, cast_first={self.cast_first}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from norm_cases()

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return norm_cost(case, dtype)


def norm_cases() -> Iterator[Case]:
    """Hidden sizes of real models at several token counts, with and without a residual, and the edges."""
    sizes = [(t, h) for h in (576, 4096, 8192) for t in (1, 64, 1024, 16384)]
    edges = [(0, 64), (7, 1), (7, 3), (7, 65), (7, 769), (2, 65537)]
    for tokens, hidden in [*sizes, *edges]:
        for add in (False, True):
            yield Case(
                name=f"{'add+' if add else ''}norm T={tokens} H={hidden}",
                init={"hidden_size": hidden},
                args=lambda i, t=tokens, h=hidden, add=add: (
                    (i.randn(t, h), i.randn(t, h, scale=2.0)) if add else (i.randn(t, h),)
                ),
                dims={"T": tokens, "H": hidden, "add": int(add)},
                bench=(tokens, hidden) in sizes,
                prepare=_random_weight,
            )


def norm_cost(case: Case, dtype: torch.dtype) -> Cost:
    """Each input read once, each output written once."""
    rows = case.dims["T"] * case.dims["H"]
    return Cost(size_bytes=dtype.itemsize * (rows * (4 if case.dims["add"] else 2) + case.dims["H"]))


def _random_weight(op: RMSNorm, inputs: Inputs) -> None:
    if op.weight is not None:
        op.weight.data = inputs.randn(op.hidden_size, scale=0.2, shift=1.0)
