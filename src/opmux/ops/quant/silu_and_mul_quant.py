"""The SwiGLU gate, quantized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from ..activation.gated import check_gated
from ..activation.silu_and_mul import SiluAndMul
from . import kernels_cpu
from .fp8 import GroupShape
from .quant_fp8 import QuantFP8, name_of, quantizations, scale_of

__all__ = ["SiluAndMulQuant"]

kernels_triton = lazy_module("opmux.ops.quant.kernels_triton")


@CustomOp.register("silu_and_mul_quant")
class SiluAndMulQuant(CustomOp):
    """``quant_fp8(silu_and_mul(x))`` in one pass over x; returns ``(y_q, scale)``.

    Shapes:  x [..., 2d] -> y_q [..., d]; scale as of ``QuantFP8``.
    Dtypes:  fp32, fp16, bf16. The product is rounded to x's dtype before it is quantized, so the result is that of the
             two ops bit for bit; see ``SiluAndMul`` and ``QuantFP8`` for the rest.
    Mutates: nothing.      Grad: native only.
    Errors:  those of the two ops; ValueError for a dynamic scale of the whole tensor, which takes two passes.
    Source:  the two ops'.

    Args:
        static, group_shape, options: as of ``QuantFP8``.
        round_gate: as of ``SiluAndMul``.
    """

    tolerance = Tolerance(ulp=1.0, fp32=8.0, inside=1.0)

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape | tuple[int, int],
        *,
        round_gate: bool = False,
        enforce_enable: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.quant = QuantFP8(static, group_shape, **options)
        self.activation = SiluAndMul(round_gate=round_gate)
        check_one_pass("silu_and_mul_quant", self.quant)

    def forward_native(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.quant.forward_native(self.activation.forward_native(x), scale)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_gated("silu_and_mul_quant", x)
        quant = self.quant
        shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
        y_q, scale = kernels_cpu.silu_and_mul_quant_cpu(
            x, self.activation.round_gate, quant.prepared(shape, scale), *quant.kernel_options
        )
        return quant.finished(y_q, scale)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_gated("silu_and_mul_quant", x)
        quant = self.quant
        shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
        y_q, scale = kernels_triton.silu_and_mul_quant_triton(
            x, self.activation.round_gate, quant.prepared(shape, scale), *quant.kernel_options
        )
        return quant.finished(y_q, scale)

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, d) for d in (1536, 14336) for t in (1, 64, 1024, 16384)]
        edges = [(0, 64), (7, 1), (7, 3), (3, 200), (3, 769), (2, 65537)]
        for init, (tokens, width) in ((i, s) for i in quantizations(per_tensor=False) for s in [*sizes, *edges]):
            yield Case(
                name=f"T={tokens} d={width} {name_of(init)}",
                init=init,
                args=lambda i, t=tokens, d=width, s=init["static"]: (i.randn(t, 2 * d, scale=2.0), *scale_of(i, s)),
                dims={"T": tokens, "d": width},
                bench=(tokens, width) in sizes,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=case.dims["T"] * case.dims["d"] * (2 * dtype.itemsize + 1))


def check_one_pass(op: str, quant: QuantFP8) -> None:
    """A fused op reads its input once, and the maximum of a whole tensor takes a second time."""
    if not quant.static and quant.group_shape.is_per_tensor:
        raise ValueError(
            f"{op} has static, per-token and per-group scales; for a dynamic scale of the whole tensor use quant_fp8."
        )
