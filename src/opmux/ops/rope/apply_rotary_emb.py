"""Rotation by given cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu
from .rotate import rotate

__all__ = ["ApplyRotaryEmb"]

kernels_triton = lazy_module("opmux.ops.rope.kernels_triton")


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotates the pairs of each head by cosines and sines that the caller computed.

    Shapes:  x [S, N, R] or [B, S, N, R]; cos, sin [S, R/2], or [B, S, R/2] with one row a token -> x's shape.
    Dtypes:  fp32, fp16, bf16 for x and, independently, for the tables. With ``enable_fp32_compute`` the tables stay as
             they are; without it they are rounded to x's dtype first. Products and sums are fp32, rounded once.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if x's last dimension is not twice the tables', or the token counts differ.
    Source:  Su et al. 2021, arXiv 2104.09864; the vision towers of Qwen-VL.
    """

    tolerance = Tolerance(ulp=1.0, fp32=4.0, scale=1.0)

    def __init__(
        self, enforce_enable: bool = False, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style = is_neox_style
        self.enable_fp32_compute = enable_fp32_compute

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._check(x, cos, sin)
        cos, sin = self._tables(x, cos, sin)
        return rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2), self.is_neox_style)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._check(x, cos, sin)
        cos, sin = self._tables(x, cos, sin)
        if x.dim() == 4 and cos.dim() == 2:  # what a decoder calls at every step: no view on the way
            return kernels_cpu.apply_rotary_emb_cpu(
                x, cos, sin, not self.is_neox_style, not self.enable_fp32_compute, False
            )
        if cos.dtype != sin.dtype:
            cos, sin = cos.float(), sin.float()
        if cos.dim() == 3 and cos.shape[0] == 1:
            cos, sin = cos[0], sin[0]
        # One row of the tables a token: a batch with its own tables is one longer sequence.
        rows = x.flatten(0, 1) if cos.dim() == 3 and x.dim() == 4 else x
        one = rows if rows.dim() == 4 else rows.unsqueeze(0)
        interleaved, fp32 = not self.is_neox_style, self.enable_fp32_compute
        out = kernels_cpu.apply_rotary_emb_cpu(
            one, cos.flatten(0, -2), sin.flatten(0, -2), interleaved, not fp32, False
        )
        return out.view(x.shape)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._check(x, cos, sin)
        cos, sin = self._tables(x, cos, sin)
        return kernels_triton.apply_rotary_emb_triton(x, cos, sin, self.is_neox_style)

    forward_hip = forward_xpu = forward_cuda

    def _tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return (cos, sin) if self.enable_fp32_compute else (cos.to(x.dtype), sin.to(x.dtype))

    def _check(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        if x.dim() in (3, 4) and cos.dim() in (2, x.dim() - 1) and cos.shape == sin.shape:
            batches = (1, x.shape[0]) if cos.dim() == 3 else (cos.shape[0],)
            if cos.shape[-2:] == (x.shape[-3], x.shape[-1] / 2) and cos.shape[0] in batches:
                return
        raise ValueError(
            f"apply_rotary_emb takes x [B?, S, N, R] with cos and sin [S, R/2] or [B or 1, S, R/2]; it got x "
            f"{tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}."
        )

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(1, 1024, 16, 80), (1, 16384, 16, 80), (4, 512, 9, 64)]
        edges = [(1, 0, 2, 64), (2, 5, 3, 6), (1, 7, 1, 2)]
        for b, s, n, r in [*sizes, *edges]:
            yield Case(
                name=f"B={b} S={s} N={n} R={r}",
                init={},
                args=lambda i, b=b, s=s, n=n, r=r: (
                    i.randn(b, s, n, r),
                    i.randn(s, r // 2).cos(),
                    i.randn(s, r // 2).sin(),
                ),
                dims={"T": b * s, "S": s, "N": n, "R": r},
                bench=(b, s, n, r) in sizes,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        d = case.dims
        return Cost(size_bytes=dtype.itemsize * (2 * d["T"] * d["N"] * d["R"] + d["S"] * d["R"]))
