"""Rotary position embedding of queries and keys from a table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu, scaling
from .rotate import rotate

__all__ = ["RotaryEmbedding"]

kernels_triton = lazy_module("opmux.ops.rope.kernels_triton")


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Rotates the first ``rotary_dim`` features of every head by an angle that grows with the token's position.

    Pair i of R/2 has frequency ``base^(-2i/R)`` and angle ``position * frequency``; ``(u, v)`` becomes
    ``(u cos - v sin, v cos + u sin)``. NeoX pairs feature i with i + R/2, GPT-J pairs 2i with 2i + 1.

    Shapes:  positions [T] (or any shape of T entries); query [T, N*D] or [T, N, D]; key the same with its own heads, or
             None -> (query, key) of the same shapes.
    Dtypes:  fp32, fp16, bf16; table, products and sums are fp32, rounded once to the query's dtype. Features past
             ``rotary_dim`` pass through bit for bit.
    State:   ``cos_sin_cache`` [P, R] fp32, cosines then sines; casting the module leaves it in fp32.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for an odd ``rotary_dim`` or one past the head. A position outside the table: IndexError in
             eager code on
             the CPU; on other devices and in compiled code, where raising would wait for the device, the token's heads
             become NaN. Never a wrong number, and nothing is read outside the table.
    Source:  Su et al. 2021, arXiv 2104.09864; used by Llama, GPT-NeoX (NeoX pairing), GPT-J (GPT-J pairing).

    Args:
        head_size: D.
        rotary_dim: R, even, at most D.
        max_position_embeddings: P, rows of the table.
        base: of the frequencies.
        is_neox_style: the pairing.
        dtype: accepted for the order of the parameters; the table is always fp32.
        init_cache: build the table now; without it the caller calls ``set_table``.
    """

    tolerance = Tolerance(ulp=1.0, fp32=4.0, scale=1.0)
    lead = 1

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
        init_cache: bool = True,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if rotary_dim % 2 or not 0 <= rotary_dim <= head_size:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and lie in 0..{head_size} (head_size).")
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.register_buffer("cos_sin_cache", None, persistent=False)
        if init_cache:
            self.set_table(scaling.plain(rotary_dim, base))

    def set_table(self, inverse_frequencies: Tensor, magnitude: float = 1.0, rows: int | None = None) -> None:
        """Build the table from frequencies [R/2] other than ``base`` gives, times ``magnitude``; for every position, or
        ``rows`` of it."""
        positions = torch.arange(self.max_position_embeddings if rows is None else rows, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # .half() and .to(bfloat16) would keep 769 distinct positions of 4096: the table moves, but stays fp32.
        table = self.cos_sin_cache
        super()._apply(fn, recurse)
        if table is not None and self.cos_sin_cache.dtype != table.dtype:
            self.cos_sin_cache = table.to(self.cos_sin_cache.device)
        return self

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = self._rows(positions.flatten()).chunk(2, -1)
        return self._turn(cos, sin, query), None if key is None else self._turn(cos, sin, key)

    def _rows(self, positions: Tensor) -> Tensor:
        """The table's rows at positions of any shape; outside the table an IndexError, or rows of NaN (see Errors)."""
        size = self.cos_sin_cache.shape[0]
        if positions.is_cpu and not torch.compiler.is_compiling():
            low, high = (int(v) for v in positions.aminmax()) if positions.numel() else (0, 0)
            if low < 0 or high >= size:
                raise IndexError(
                    f"rotary_embedding: position {low if low < 0 else high} is outside the table of {size} positions; "
                    "build the op with a larger max_position_embeddings."
                )
            return self.cos_sin_cache[positions]
        inside = (positions >= 0) & (positions < size)
        return torch.where(inside.unsqueeze(-1), self.cos_sin_cache[positions.clamp(0, size - 1)], float("nan"))

    def _turn(self, cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
        """Rotate x by one row [R/2] of cosines and sines a token."""
        tokens = cos.shape[0]
        heads = x.reshape(tokens, x.numel() // (tokens * self.head_size or 1), self.head_size)
        if x.dtype == torch.float64:
            cos, sin = cos.double(), sin.double()
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = rotate(heads[..., : self.rotary_dim], cos, sin, self.is_neox_style)
        tail = heads[..., self.rotary_dim :]
        if self.rotary_dim and tail.shape[-1]:
            tail = torch.where(cos[..., :1].isnan(), float("nan"), tail)
        return torch.cat((turned, tail), dim=-1).reshape(x.shape)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._turn_cpu(positions.flatten(), self.cos_sin_cache, query, key)

    def _turn_cpu(
        self, positions: Tensor, table: Tensor, query: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if positions.numel() == 0:
            return torch.empty_like(query), None if key is None else torch.empty_like(key)
        heads = [t.reshape(positions.numel(), -1, self.head_size) for t in (query, key) if t is not None]
        if positions.dtype not in (torch.int32, torch.int64):
            positions = positions.long()
        turned = kernels_cpu.rotary_embedding_cpu(
            positions, table, heads[0], heads[1] if len(heads) > 1 else None, self.rotary_dim, not self.is_neox_style,
            False, False,
        )  # fmt: skip
        return turned[0].view(query.shape), None if key is None else turned[1].view(key.shape)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return kernels_triton.rotary_embedding(
            positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style
        )

    forward_hip = forward_xpu = forward_cuda

    def extra_repr(self) -> str:
        return f"{self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, neox={self.is_neox_style}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, 32, 8, 128, 128, True) for t in (1, 64, 1024, 16384)] + [(t, 9, 3, 64, 64, True) for t in (1, 512)]
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
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        d = case.dims
        return Cost(size_bytes=d["T"] * (2 * d["heads"] * d["D"] * dtype.itemsize + d["R"] * 4 + 8))
