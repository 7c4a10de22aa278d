"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu

__all__ = ["Attention"]

kernels_triton = lazy_module("opmux.ops.attention.kernels_triton")


_FEWEST_QUERIES_FOR_CUDNN = 128  # of one sequence
_FEWEST_ROWS_FOR_CUDNN = 512  # of the whole batch


@CustomOp.register("attention")
class Attention(CustomOp):
    """``softmax(scale * q k^T + mask) v`` per head, grouped-query, causal or full.

    Query head h reads key head ``h * K // N``. The queries are the last S of the L keys, so a prefill that continues a
    cache and a decode step are the same call with L > S.

    Shapes:  query [B, S, N, D]; key [B, L, K, D]; value [B, L, K, Dv] -> [B, S, N, Dv]. Any strides with the last
             dimension dense: views of a cache are read in place. attn_mask [B or 1, 1 or N, S or 1, >= L], boolean
             (True means attend) or floating (added to the scores).
    Dtypes:  fp32, fp16, bf16; scores, softmax and sums are fp32, rounded once. A floating mask has any of the three.
    Mutates: nothing.      Grad: native only.
    Rows without a visible key give zeros.
    Errors:  ValueError for shapes that do not fit, heads that do not divide, or fewer keys than causal queries.
    Source:  Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023 (grouped-query), arXiv 2305.13245; the kernels
             use the online softmax of Dao et al. 2022, arXiv 2205.14135.

    Args:
        num_heads: N.
        head_size: D.
        scale: None means ``D ** -0.5``.
        num_kv_heads: K; None means N.
        causal: a query sees the keys up to its own position.
        sliding_window: with ``causal``, the number of keys that a query sees, itself included; None means all.
        soft_cap: scores become ``cap * tanh(score / cap)`` before the mask.
        vendor: on CUDA, whether torch's ``scaled_dot_product_attention`` (cuDNN) takes the calls that it can express; None
            means where it was measured to be the faster.
    """

    # Kernels round the probabilities to the values' dtype before the second product, as every flash kernel does.
    tolerance = Tolerance(ulp=4.0, fp32=64.0, scale=1.0)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        causal: bool = True,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        vendor: bool | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot share {self.num_kv_heads} key heads: the first must be a multiple."
            )
        if sliding_window is not None and (sliding_window < 1 or not causal):
            raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1 and needs causal=True.")
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else float(scale)
        self.causal = causal
        self.sliding_window = sliding_window
        self.soft_cap = float(soft_cap) if soft_cap else None
        self.vendor = vendor

    def forward_native(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        self._check(query, key, value, attn_mask)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        groups = self.num_heads // self.num_kv_heads
        q = query.to(wide).transpose(1, 2)
        k, v = (t.to(wide).transpose(1, 2).repeat_interleave(groups, dim=1) for t in (key, value))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        visible = self._visible(query.shape[1], key.shape[1], query.device)
        if attn_mask is not None:
            attn_mask = attn_mask[..., : key.shape[1]]
            if attn_mask.dtype == torch.bool:
                visible = visible & attn_mask
            else:
                scores = scores + attn_mask.to(wide)
        scores = scores.masked_fill(~visible, float("-inf"))
        # A row without a visible key is 0/0 in a plain softmax.
        weights = torch.softmax(scores, dim=-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        return (weights @ v).transpose(1, 2).to(query.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        self._check(query, key, value, attn_mask)
        return kernels_cpu.attention_cpu(
            query, key, value, attn_mask, self.scale, self.causal, self.sliding_window or 0, self.soft_cap or 0.0
        )

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        self._check(query, key, value, attn_mask)
        if self._is_for_the_vendor(query, key, value, attn_mask):
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            shared = self.num_heads != self.num_kv_heads
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=shared
            )  # fmt: skip
            return out.transpose(1, 2)
        return kernels_triton.attention_triton(
            query, key, value, attn_mask, self.scale, self.causal, self.sliding_window or 0, self.soft_cap or 0.0
        )

    forward_hip = forward_xpu = forward_cuda

    def _is_for_the_vendor(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
        """Whether cuDNN, which torch calls for what it can express, is wanted, or the faster of the two.

        Measured on an H200 (torch 2.11, cuDNN 9.19, Triton 3.6), microseconds, cuDNN against Triton: causal S = L =
        2048, 32/8 heads of 128: 83, 112; the same at 8192: 1026, 1225; 4 x 2048, 16 heads of 64: 100, 130; 2048, 8/4
        heads of 256: 54, 77; 8 x 1024 full, 16 heads of 80: 110, 194; 512, 9/3 heads of 64: 10.2, 11.9; 32 x 128, 32/8
        heads of 128: 31, 47. But one sequence of 128: 8.3, 6.8, and of 256: 10.2, 9.3; 64 x 64 full, 16 heads of 80:
        28, 24; 512 queries behind 3584 keys: 121, 73; decode steps are equal.
        """
        batch, tokens, head_size = query.shape[0], query.shape[1], query.shape[3]
        wanted = tokens >= _FEWEST_QUERIES_FOR_CUDNN and batch * tokens >= _FEWEST_ROWS_FOR_CUDNN
        return (
            (wanted if self.vendor is None else self.vendor)
            and (tokens == key.shape[1] or not self.causal)
            and attn_mask is None
            and self.sliding_window is None
            and self.soft_cap is None
            and query.dtype != torch.float32
            and head_size % 8 == 0
            and head_size <= 256
            and value.shape[3] == head_size
            and query.is_cuda
            and torch.version.hip is None
        )

    def _visible(self, queries: int, keys: int, device: torch.device) -> Tensor:
        if not self.causal:
            return torch.ones(queries, keys, dtype=torch.bool, device=device)
        at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
        distance = at - torch.arange(keys, device=device)
        visible = distance >= 0
        return visible if self.sliding_window is None else visible & (distance < self.sliding_window)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
        if query.dim() == key.dim() == value.dim() == 4:
            b, s, n, d = query.shape
            length = key.shape[1]
            fits = (n, d) == (self.num_heads, self.head_size) and key.shape == (b, length, self.num_kv_heads, d)
            fits = fits and value.shape[:3] == key.shape[:3] and (length >= s or not self.causal)
            if fits and (attn_mask is None or _mask_fits(attn_mask, b, n, s, length)):
                return
        mask = None if attn_mask is None else tuple(attn_mask.shape)
        got = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("query", query), ("key", key), ("value", value)))
        raise ValueError(
            f"attention was built for {self.num_heads} query and {self.num_kv_heads} key heads of size {self.head_size}"
            f"{', causal: at least as many keys as queries' if self.causal else ''}; it got {got}, mask {mask}."
        )

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} kv heads, size {self.head_size}, causal={self.causal}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # B, S, L, N, K, D
        sizes = [(1, 512, 512, 9, 3, 64), (1, 1, 1024, 9, 3, 64), (1, 2048, 2048, 32, 8, 128), (8, 1, 4096, 32, 8, 128)]
        edges = [
            (1, 0, 0, 2, 1, 64),
            (2, 5, 9, 4, 2, 32),
            (1, 7, 7, 3, 3, 72),
            (1, 3, 130, 2, 1, 80),
            (1, 17, 17, 2, 2, 256),
        ]
        for b, s, n_keys, n, k, d in [*sizes, *edges]:
            for causal in (True, False):
                yield Case(
                    name=f"B={b} S={s} L={n_keys} N={n} K={k} D={d}{' causal' if causal else ''}",
                    init={"num_heads": n, "head_size": d, "num_kv_heads": k, "causal": causal},
                    args=lambda i, b=b, s=s, m=n_keys, n=n, k=k, d=d: (
                        i.randn(b, s, n, d),
                        i.randn(b, m, k, d, scale=0.9),
                        i.randn(b, m, k, d, scale=1.1),
                    ),
                    dims={"B": b, "S": s, "L": n_keys, "N": n, "K": k, "D": d, "causal": int(causal)},
                    bench=causal and (b, s, n_keys, n, k, d) in sizes,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        c = case.dims
        pairs = c["S"] * c["L"] - (c["S"] * (c["S"] - 1) // 2 if c["causal"] else 0)
        moved = c["B"] * c["D"] * (2 * c["S"] * c["N"] + 2 * c["L"] * c["K"])
        return Cost(size_bytes=moved * dtype.itemsize, flops=4 * c["B"] * c["N"] * pairs * c["D"])


def _mask_fits(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> bool:
    if mask.dim() != 4 or mask.shape[3] < keys:
        return False
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] in (1, queries)
