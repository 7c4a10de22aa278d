"""Attention over a grid of image patches with decomposed relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.parameters import frozen
from ...core.requires import requires
from ..attention.attention import Attention
from ..linear.replicated_linear import ReplicatedLinear
from . import kernels_cpu

__all__ = ["RelPosAttention"]

kernels_triton = lazy_module("opmux.ops.encoder.kernels_triton")


@CustomOp.register("rel_pos_attention")
class RelPosAttention(CustomOp):
    """The attention layer of SAM's image encoder: q, k, v, attention with a bias by distance, output projection.

    The score of a query at (i, j) and a key at (i', j') is ``D^-0.5 q k + q R_h[i - i' + H - 1] + q R_w[j - j' + W - 1]``:
    the query is not scaled for the bias. A table that was made for another size is resized linearly.

    Shapes:  x [B, H, W, C] -> [B, H, W, C]; qkv [3 C, C] in the order (3, head, D), proj [C, C], rel_pos_h [2 H' - 1, D],
             rel_pos_w [2 W' - 1, D], D = C / heads. Windows are rows of the batch, cut by the caller.
    Dtypes:  fp32, fp16, bf16. The two projections round to x's dtype; tables are resized in fp32 and rounded to x's dtype;
             scores, bias, softmax and sums are fp32, rounded once before the last projection. Tables may be fp32 for any x.
    Mutates: nothing.      Grad: native only.
    Memory:  linear in B H W: the bias is made for a query row at a time on every path, and on a GPU as H + W numbers for
             each query and head.
    Errors:  ValueError for a width other than ``dim``, heads that do not divide it, or ``use_rel_pos`` without
             ``input_size``.
    Source:  Li et al. 2022 (MViTv2), arXiv 2112.01526; Kirillov et al. 2023 (Segment Anything), arXiv 2304.02643.

    Args:
        dim: C.
        num_heads: heads.
        qkv_bias: whether the first projection has one; the last one always has.
        use_rel_pos: whether there is a bias by distance.
        input_size: (H', W') that the tables are made for.
    """

    # Queries, keys and values, then probabilities, then their product are rounded, each by its own half ulp, before the last
    # product sums up what came of it.
    tolerance = Tolerance(ulp=8.0, fp32=128.0, scale=1.0)

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        use_rel_pos: bool = False,
        *,
        input_size: tuple[int, int] | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"rel_pos_attention got dim {dim} and {num_heads} heads: the first must be a multiple.")
        if use_rel_pos and input_size is None:
            raise ValueError("rel_pos_attention needs input_size=(height, width) with use_rel_pos=True: its tables' sizes.")
        self.dim, self.num_heads, self.head_size = dim, num_heads, dim // num_heads
        self.scale = self.head_size**-0.5
        self.use_rel_pos = use_rel_pos
        self.rows = Attention(num_heads, self.head_size, causal=False)
        self.qkv = ReplicatedLinear(dim, 3 * dim, qkv_bias, return_bias=False)
        self.proj = ReplicatedLinear(dim, dim, return_bias=False)
        if use_rel_pos and input_size is not None:
            self.rel_pos_h = frozen(torch.zeros(2 * input_size[0] - 1, self.head_size))
            self.rel_pos_w = frozen(torch.zeros(2 * input_size[1] - 1, self.head_size))

    def forward_native(self, x: Tensor) -> Tensor:
        self._check(x)
        height, width = x.shape[1:3]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k, v = self._heads(self.qkv.forward_native(x))
        q, k, v = (t.to(wide).transpose(1, 2) for t in (q, k, v))  # [B, N, H W, D]
        tables = [None if t is None else t.to(wide) for t in self._tables(height, width, x.dtype)]
        outs = []
        for i, rows in enumerate(q.split(width, dim=2) if x.numel() else ()):  # one row of the grid: [B, N, W, D]
            scores = rows @ k.transpose(-1, -2) * self.scale
            if tables[0] is not None and tables[1] is not None:
                by_row = rows @ _from(tables[0], i, height).T
                by_column = torch.stack([rows[:, :, j] @ _from(tables[1], j, width).T for j in range(width)], dim=2)
                scores = scores + (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(-2)
            outs.append(torch.softmax(scores, dim=-1) @ v)
        out = torch.cat(outs, dim=2) if outs else q
        return self.proj.forward_native(out.transpose(1, 2).to(x.dtype).reshape(x.shape))  # type: ignore[return-value]

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor:
        self._check(x)
        q, k, v = self._heads(self.qkv.forward_cpu(x))
        tables = self._tables(x.shape[1], x.shape[2], x.dtype)
        out = kernels_cpu.encoder_attention_cpu(q, k, v, None, self.scale, *tables)
        return self.proj.forward_cpu(out.view(x.shape))  # type: ignore[return-value]

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor) -> Tensor:
        self._check(x)
        # The vendor's library is the faster one for products of many rows.
        q, k, v = self._heads(self.qkv.forward_native(x))
        height, width = x.shape[1:3]
        for_rows, for_columns = self._tables(height, width, x.dtype)
        if for_rows is None or for_columns is None:
            out = self.rows.forward_cuda(q, k, v)
        else:
            grid = q.unflatten(1, (height, width)).float()
            by_row = torch.einsum("bijnd,ikd->bnijk", grid, _every(for_rows.float(), height))
            by_column = torch.einsum("bijnd,jkd->bnijk", grid, _every(for_columns.float(), width))
            parts = (t.flatten(2, 3).contiguous() for t in (by_row, by_column))
            out = kernels_triton.rel_pos_attention_triton(q, k, v, *parts, self.scale)
        return self.proj.forward_native(out.view(x.shape))  # type: ignore[return-value]

    forward_hip = forward_xpu = forward_cuda

    def _heads(self, qkv: Any) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, W, 3 C] -> q, k and v [B, H W, N, D], views."""
        batch, height, width, _ = qkv.shape
        q, k, v = qkv.view(batch, height * width, 3, self.num_heads, self.head_size).unbind(2)
        return q, k, v

    def _tables(self, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The tables for a grid of this size, [2 height - 1, D] and [2 width - 1, D]."""
        if not self.use_rel_pos:
            return None, None
        return _resized(self.rel_pos_h, height).to(dtype), _resized(self.rel_pos_w, width).to(dtype)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[3] != self.dim:
            raise ValueError(f"rel_pos_attention was built for [B, H, W, {self.dim}]; x has shape {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.num_heads} heads, use_rel_pos={self.use_rel_pos}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # B, H, W, heads, D, sizes of the tables
        real = [(1, 64, 64, 12, 64, (64, 64)), (25, 14, 14, 12, 64, (14, 14)), (1, 40, 40, 12, 64, (64, 64))]
        edges: list[tuple[int, int, int, int, int, tuple[int, int] | None]] = [
            (2, 14, 20, 2, 16, (14, 14)),
            (3, 3, 5, 4, 72, (3, 5)),
            (1, 7, 2, 2, 80, (4, 9)),
            (2, 6, 11, 2, 32, None),
            (1, 1, 1, 1, 5, (2, 1)),
            (0, 4, 4, 2, 16, (4, 4)),
        ]
        for b, h, w, n, d, tables in [*real, *edges]:
            made_for = "" if tables == (h, w) else " no tables" if tables is None else f" tables {tables[0]}x{tables[1]}"
            yield Case(
                name=f"B={b} {h}x{w} N={n} D={d}{made_for}",
                init={"dim": n * d, "num_heads": n, "use_rel_pos": tables is not None, "input_size": tables},
                args=lambda i, b=b, h=h, w=w, c=n * d: (i.randn(b, h, w, c),),
                dims={"B": b, "T": h * w, "N": n, "D": d, "entries": 2 * (h + w) - 2},
                bench=(b, h, w, n, d, tables) in real,
                prepare=_random_parameters,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        c = case.dims
        width = c["N"] * c["D"]
        products = 4 * width * width + 2 * c["T"] * width + c["entries"] * width
        size = 2 * c["B"] * c["T"] * width + 4 * width * width + c["entries"] * c["D"]
        return Cost(size_bytes=dtype.itemsize * size, flops=2 * c["B"] * c["T"] * products)


def _resized(table: Tensor, size: int) -> Tensor:
    """A table for ``size`` places: [2 size - 1, D], in fp32 or wider."""
    wide = table if table.dtype == torch.float64 else table.float()
    length, wanted = table.shape[0], 2 * size - 1
    if length == wanted or size == 0:
        return wide
    # By hand, not F.interpolate: that rounds the places themselves to fp32, and differently where it is compiled.
    places = (torch.arange(wanted, dtype=torch.float64, device=table.device) + 0.5) * length / wanted - 0.5
    places = places.clamp(0, length - 1)
    before = places.floor().long()
    share = (places - before).to(wide.dtype).unsqueeze(1)
    return wide[before] * (1 - share) + wide[(before + 1).clamp(max=length - 1)] * share


def _from(table: Tensor, place: int, size: int) -> Tensor:
    """The entries for keys 0 .. size - 1 as seen from ``place``: [size, D]."""
    return table[place : place + size].flip(0)


def _every(table: Tensor, size: int) -> Tensor:
    """``_from`` for every place: [size, size, D]."""
    places = torch.arange(size, device=table.device)
    return table[places.unsqueeze(1) - places + size - 1]


def _random_parameters(op: RelPosAttention, inputs: Inputs) -> None:
    for name, parameter in op.named_parameters():
        scale = 0.1 if name.startswith("rel_pos") or parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data = inputs.randn(*parameter.shape, scale=scale)
