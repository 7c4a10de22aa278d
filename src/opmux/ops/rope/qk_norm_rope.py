"""RMS norm of every query and key head, then the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.requires import requires
from ..norm import kernels_cpu as norm_kernels_cpu
from .rotary_embedding import RotaryEmbedding

__all__ = ["QKNormRope"]

kernels_triton = lazy_module("opmux.ops.rope.kernels_triton")


@CustomOp.register("qk_norm_rope")
class QKNormRope(RotaryEmbedding):
    """``rotary_embedding(positions, rms_norm(query), rms_norm(key))``, the norms over each head, in one pass.

    Shapes:  positions [T]; query [T, N*D] or [T, N, D]; key the same with its own heads, or
             None -> (query, key) of the same shapes. Views of a packed product are read in place.
    Dtypes:  fp32, fp16, bf16. The norm is fp32, rounded to the weight's dtype, multiplied there and rounded to the
             query's dtype, as a norm of its own would (``RMSNorm``, cast_first); then as ``RotaryEmbedding``.
    State:   ``q_weight``, ``k_weight`` [D]; the table of ``RotaryEmbedding``.
    Mutates: nothing.      Grad: native only.
    Errors:  those of ``RotaryEmbedding``; ValueError for a ``rotary_dim`` of 0.
    Source:  Qwen3's attention, arXiv 2505.09388; the norm is Dehghani et al. 2023, arXiv 2302.05442.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, init_cache: as of ``RotaryEmbedding``.
        dtype: of the weights; None means torch's default.
        eps: added to the mean square.
    """

    # Three roundings, and what they do to two terms that may be several times their sum: native in 16 bits is off by 4.
    tolerance = Tolerance(ulp=6.0, fp32=16.0, scale=1.0)
    lead = 1

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        init_cache: bool = True,
        *,
        eps: float = 1e-6,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache,
            enforce_enable=enforce_enable,
        )  # fmt: skip
        if rotary_dim == 0:
            raise ValueError("qk_norm_rope turns at least one pair; for a rotary_dim of 0 use rms_norm on the heads.")
        self.eps = float(eps)
        self.q_weight = nn.Parameter(torch.ones(head_size, dtype=dtype))
        self.k_weight = nn.Parameter(torch.ones(head_size, dtype=dtype))

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = self._rows(positions.flatten()).chunk(2, -1)
        q = self._turn(cos, sin, self._normed(query, self.q_weight))
        return q, None if key is None else self._turn(cos, sin, self._normed(key, self.k_weight))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        heads = wide(x.reshape(-1, self.head_size))
        y = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return (weight * y.to(weight.dtype)).to(x.dtype).reshape(x.shape)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        q = self._normed_cpu(query, self.q_weight)
        k = None if key is None else self._normed_cpu(key, self.k_weight)
        return self._turn_cpu(positions.flatten(), self.cos_sin_cache, q, k)

    def _normed_cpu(self, x: Tensor, weight: Tensor) -> Tensor:
        heads = x.reshape(-1, self.head_size)
        return norm_kernels_cpu.rms_norm_cpu(heads, weight, self.eps, self.head_size, 0.0, True).view(x.shape)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        # Without a key the query stands in for it: rare, and not worth a kernel.
        q, k = kernels_triton.qk_norm_rope_triton(
            positions, query, query if key is None else key, self.q_weight, self.k_weight, self.eps, self.head_size,
            self.cos_sin_cache, self.is_neox_style,
        )  # fmt: skip
        return q, None if key is None else k

    forward_hip = forward_xpu = forward_cuda

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, 32, 8, 128, 128, True) for t in (1, 64, 1024, 16384)] + [(512, 16, 8, 128, 128, True)]
        edges = [(0, 2, 1, 64, 64, True), (5, 3, 1, 80, 32, True), (5, 3, 1, 256, 64, False), (7, 1, 1, 6, 2, False)]
        for t, n, k, d, r, neox in [*sizes, *edges]:
            yield Case(
                name=f"T={t} {n}+{k} heads x{d} R={r} {'neox' if neox else 'gptj'}",
                init={
                    "head_size": d,
                    "rotary_dim": r,
                    "max_position_embeddings": 4096,
                    "base": 10000.0,
                    "is_neox_style": neox,
                },
                args=lambda i, t=t, n=n, k=k, d=d: (i.integers(0, 4096, t), i.randn(t, n * d), i.randn(t, k * d)),
                dims={"T": t, "heads": n + k, "D": d, "R": r},
                bench=(t, n, k, d, r, neox) in sizes,
                prepare=_random_weights,
            )


def _random_weights(op: QKNormRope, inputs: Inputs) -> None:
    op.q_weight.data = inputs.randn(op.head_size, scale=0.2, shift=1.0)
    op.k_weight.data = inputs.randn(op.head_size, scale=0.2, shift=0.8)
