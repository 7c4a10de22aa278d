"""Attention of vision and audio encoders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from ..attention.attention import Attention
from . import kernels_cpu
from .segments import boundaries

__all__ = ["MMEncoderAttention"]

kernels_triton = lazy_module("opmux.ops.encoder.kernels_triton")


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """``softmax(scale * q k^T) v`` per head, both ways, over whole rows or over segments of packed tokens.

    Query head h reads key head ``h * K // N``. With ``cu_seqlens`` the tokens ``[c[i], c[i + 1])`` of each row see each
    other and nothing else, so that images of many sizes go through one call; a segment may be empty.

    Shapes:  query [B, S, N D] or [B, S, N, D]; key and value [B, L, K D] or [B, L, K, D], L = S with ``cu_seqlens`` -> as
             query. cu_seqlens [n + 1], from 0 to S, any integer dtype, on any device.
    Dtypes:  fp32, fp16, bf16, one for all three; scores, softmax and sums are fp32, rounded once.
    Mutates: nothing.      Grad: native only.
    Memory:  linear in S on every path, whatever the head size.
    Errors:  ValueError for shapes that do not fit, heads that do not divide, or boundaries that do not rise from 0 to S.
             Boundaries that lie in a GPU's memory are not read by the host: there tokens outside every segment give
             zeros.
    Source:  Vaswani et al. 2017, arXiv 1706.03762; packing as in Dehghani et al. 2023 (NaViT), arXiv 2307.06304; the
             kernels use the online softmax of Dao et al. 2022, arXiv 2205.14135.

    ``max_seqlen``, the longest segment, is never needed: kernels find segments from ``cu_seqlens`` without waiting for the
    device. On CUDA it may tell that all segments are equally long, see ``vendor``.

    Args:
        num_heads: N.
        head_size: D.
        scale: None means ``D ** -0.5``.
        num_kv_heads: K; None means N.
        vendor: on CUDA, whether torch's ``scaled_dot_product_attention`` (cuDNN) takes the calls that it can express: whole
            rows, and segments that are known to be equally long. None means by the rule of ``Attention``, which was
            measured on an H200 for rows; nothing was measured for segments.
    """

    # Kernels round the probabilities to the values' dtype before the second product, as every flash kernel does. In fp32 the
    # output's root mean square, the unit here, falls with a segment's length while the errors of scores stay.
    tolerance = Tolerance(ulp=4.0, fp32=128.0, scale=1.0)
    anywhere = ("cu_seqlens", "max_seqlen")

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        vendor: bool | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.rows = Attention(
            num_heads, head_size, scale, num_kv_heads, causal=False, vendor=vendor, enforce_enable=enforce_enable
        )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, self.rows.num_kv_heads, head_size
        self.scale = self.rows.scale
        self.vendor = vendor

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        heads = self._heads(query, key, value, cu_seqlens)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = (x.to(wide).transpose(1, 2) for x in heads)
        if query.numel() == 0 or key.numel() == 0:
            out = torch.zeros_like(q)
            if cu_seqlens is not None and not torch.compiler.is_compiling():
                boundaries(cu_seqlens, query.shape[1])
        elif cu_seqlens is None:
            out = self._softmax(q, k, v)
        elif torch.compiler.is_compiling():
            # A graph cannot depend on where the boundaries lie.
            segment = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(query.shape[1]).to(cu_seqlens), right=True)
            out = self._softmax(q, k, v, (segment.unsqueeze(0) == segment.unsqueeze(1)).to(q.device))
        else:
            spans = [slice(a, b) for a, b in pairwise(boundaries(cu_seqlens, query.shape[1])) if a < b]
            out = torch.cat([self._softmax(*(x[:, :, span] for x in (q, k, v))) for span in spans], dim=2)
        return out.transpose(1, 2).to(query.dtype).contiguous().view(query.shape)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        shared = self.num_heads != self.num_kv_heads
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=shared)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        q, k, v = self._heads(query, key, value, cu_seqlens)
        if cu_seqlens is None:
            return self.rows.forward_cpu(q, k, v).view(query.shape)
        return kernels_cpu.encoder_attention_cpu(q, k, v, cu_seqlens, self.scale).view(query.shape)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        q, k, v = self._heads(query, key, value, cu_seqlens)
        count = 1 if cu_seqlens is None else self._equal_segments(query.shape[1], cu_seqlens, max_seqlen)
        if count is None:
            assert cu_seqlens is not None
            return kernels_triton.encoder_attention_triton(q, k, v, cu_seqlens, self.scale).view(query.shape)
        if count > 1:
            q, k, v = (x.unflatten(1, (count, -1)).flatten(0, 1) for x in (q, k, v))
        return self.rows.forward_cuda(q, k, v).reshape(query.shape)

    forward_hip = forward_xpu = forward_cuda

    def _equal_segments(self, tokens: int, cu_seqlens: Tensor, max_seqlen: Tensor | int | None) -> int | None:
        """The number of segments, where they are all equally long as far as the host knows; else None."""
        count = cu_seqlens.numel() - 1
        if tokens == 0 or count == 0:
            return None
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            bounds = boundaries(cu_seqlens, tokens)
            return count if all(b - a == bounds[1] for a, b in pairwise(bounds)) else None
        # None is longer than max_seqlen, so all have its length if that many fill the row.
        return count if isinstance(max_seqlen, int) and max_seqlen * count == tokens else None

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The three as [B, S, N, D] and [B, L, K, D], checked."""
        n, k, d = self.num_heads, self.num_kv_heads, self.head_size
        flat = query.dim() == 3
        if query.dim() == key.dim() == value.dim() and query.dim() in (3, 4) and key.shape == value.shape:
            batch, tokens = query.shape[:2]
            fits = tuple(query.shape[2:]) == ((n * d,) if flat else (n, d)) and key.shape[0] == batch
            fits = fits and tuple(key.shape[2:]) == ((k * d,) if flat else (k, d))
            packed = cu_seqlens is None or (key.shape[1] == tokens and _are_bounds(cu_seqlens))
            if fits and packed:
                if not flat:
                    return query, key, value
                return query.unflatten(2, (n, d)), key.unflatten(2, (k, d)), value.unflatten(2, (k, d))
        got = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("query", query), ("key", key), ("value", value)))
        segments = "none" if cu_seqlens is None else f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        raise ValueError(
            f"mm_encoder_attn was built for {n} query and {k} key heads of size {d}: [B, S, heads, {d}], or heads and size in "
            f"one, and with cu_seqlens (integers, [segments + 1]) as many keys as queries; it got {got}, cu_seqlens {segments}."
        )

    def _notes(self) -> tuple[str, ...]:
        chosen = "as vendor=True asks" if self.vendor else "where that was measured to be faster for rows (an H200)"
        if self.vendor is False:
            return (*super()._notes(), "on CUDA every call goes to the Triton kernel, as vendor=False asks")
        return (
            *super()._notes(),
            "on CUDA rows, and segments that are known to be equally long, go to torch's scaled_dot_product_attention "
            f"{chosen}; all else goes to the Triton kernel, which has not been measured",
        )

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} kv heads, size {self.head_size}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # B, N, K, D, segments: a tuple of lengths, or the length of whole rows
        real: list[tuple[int, int, int, int, tuple[int, ...] | int]] = [
            (1, 16, 16, 80, (64,) * 64),  # Qwen2.5-VL: windows
            (1, 16, 16, 80, (1024, 576, 256)),  # Qwen2.5-VL: whole images
            (1, 16, 16, 72, (1024, 784, 256)),  # Qwen3-VL
            (4, 12, 12, 64, 196),  # SigLIP and CLIP B/16
            (1, 16, 16, 64, 1025),  # InternVL
        ]
        edges: list[tuple[int, int, int, int, tuple[int, ...] | int]] = [
            (1, 4, 2, 64, (0, 2, 0, 3, 0)),
            (1, 2, 1, 80, (1, 1, 1)),
            (2, 3, 3, 72, (70, 5)),
            (1, 4, 4, 40, (96, 97)),
            (1, 2, 2, 128, (33,)),
            (1, 2, 2, 64, ()),
            (1, 2, 2, 64, (0,)),
            (2, 4, 2, 72, 19),
            (1, 1, 1, 3, (7, 2)),
            (0, 2, 1, 16, 4),
        ]
        for b, n, k, d, lengths in [*real, *edges]:
            packed = isinstance(lengths, tuple)
            sizes = lengths if isinstance(lengths, tuple) else (lengths,)
            name = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 and len(sizes) > 3 else "+".join(map(str, sizes))
            yield Case(
                name=f"B={b} {'segments' if packed else 'rows'} {name or 'none'} N={n} K={k} D={d}",
                init={"num_heads": n, "head_size": d, "num_kv_heads": k},
                args=lambda i, b=b, n=n, k=k, d=d, s=sizes, p=packed: _arguments(i, b, n, k, d, s, p),
                dims={"B": b, "T": sum(sizes), "N": n, "K": k, "D": d, "pairs": sum(s * s for s in sizes)},
                bench=(b, n, k, d, lengths) in real,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        c = case.dims
        moved = 2 * c["B"] * c["T"] * c["D"] * (c["N"] + c["K"])
        return Cost(size_bytes=moved * dtype.itemsize, flops=4 * c["B"] * c["N"] * c["pairs"] * c["D"])


def _are_bounds(cu_seqlens: Tensor) -> bool:
    dtype = cu_seqlens.dtype
    return cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0 and not (dtype.is_floating_point or dtype == torch.bool)


def _arguments(
    inputs: Inputs, b: int, n: int, k: int, d: int, lengths: tuple[int, ...], packed: bool
) -> tuple[Tensor, ...]:
    t = sum(lengths)
    q, key, value = inputs.randn(b, t, n, d), inputs.randn(b, t, k, d, scale=0.9), inputs.randn(b, t, k, d, scale=1.1)
    if not packed:
        return q.flatten(2), key.flatten(2), value.flatten(2)
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return q, key, value, ends.to(inputs.device)
