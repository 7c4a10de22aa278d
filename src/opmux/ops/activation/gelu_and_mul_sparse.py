"""The gate of Gemma 3n's sparse layers."""

from __future__ import annotations

import statistics
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

__all__ = ["GeluAndMulSparse"]

kernels_triton = lazy_module("opmux.ops.activation.kernels_triton")


@CustomOp.register("gelu_and_mul_sparse")
class GeluAndMulSparse(CustomOp):
    """``gelu(relu(gate - cutoff)) * x[..., d:]``; the cutoff keeps about the largest ``1 - activation_sparsity`` of a
    row's gates.

    ``gate = x[..., :d]``; ``cutoff = mean(gate) + m * std(gate)`` over the last dimension, with the population
    deviation and
    ``m`` the normal quantile of ``activation_sparsity``. Under tensor parallelism the statistics are those of the
    local shard.

    Shapes:  x [..., 2d] -> [..., d].
    Dtypes:  fp32, fp16, bf16; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is odd, the sparsity is not inside (0, 1) or ``approximate`` is neither
             "none" nor "tanh"; TypeError for integer x.
    Source:  Gemma 3n; the statistical top-k of Spark Transformer, arXiv 2506.06644.

    Args:
        activation_sparsity: the share of gates to drop. For 0 use ``GeluAndMul``.
        approximate: as of ``GeluAndMul``.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def __init__(self, activation_sparsity: float, approximate: str = "none", *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if not 0.0 < activation_sparsity < 1.0:
            raise ValueError(
                f"activation_sparsity is {activation_sparsity}; it must lie between 0 and 1. For 0 use GeluAndMul."
            )
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is {approximate!r}; gelu_and_mul_sparse knows 'none' and 'tanh'.")
        self.activation_sparsity = activation_sparsity
        self.approximate = approximate
        self._multiplier = statistics.NormalDist().inv_cdf(activation_sparsity)

    def forward_native(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul_sparse", x)
        gate, up = (wide(half) for half in x.chunk(2, -1))
        cutoff = gate.mean(-1, keepdim=True) + self._multiplier * gate.std(-1, keepdim=True, unbiased=False)
        return (F.gelu(F.relu(gate - cutoff), approximate=self.approximate) * up).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul_sparse", x)
        return kernels_cpu.gelu_and_mul_sparse_cpu(x, self._multiplier, self.approximate == "tanh")

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        check_gated("gelu_and_mul_sparse", x)
        return kernels_triton.gelu_and_mul_sparse_triton(x, self._multiplier, self.approximate == "tanh")

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield from gated_cases([{"activation_sparsity": 0.95}, {"activation_sparsity": 0.5, "approximate": "tanh"}])

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return gated_cost(case, dtype)
