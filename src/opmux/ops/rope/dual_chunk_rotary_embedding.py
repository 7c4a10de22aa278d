"""Rotary embedding of dual chunk attention: five rotations of each query."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu, scaling
from .rotary_embedding import RotaryEmbedding

__all__ = ["DualChunkRotaryEmbedding"]

kernels_triton = lazy_module("opmux.ops.rope.kernels_triton")


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(RotaryEmbedding):
    """Turns each query by five angles and each key by one, so that no distance exceeds what the model was trained on.

    A sequence is cut into chunks of ``n = chunk_size - local_size`` positions. With j = position mod n, a key turns as
    ``rotary_embedding`` does at j, and a query at

    - ``q``: j, towards keys of its own chunk;
    - ``q_succ``: min(j + n, c), c the chunk size, towards the chunk before;
    - ``q_inter``: min(2n - 1, c) whatever j, towards all earlier chunks;
    - ``q_succ_critical``: j + n; ``q_inter_critical``: j + c, both unclamped, by which important keys are picked.

    The five stand side by side in the last dimension of the query's result.

    Shapes:  positions [T] (or any shape of T entries), offsets the same or one number that is added to them; query
             [T, N*D], [1, T, N*D] or [T, N, D]; key the same with its own K heads, or None -> query [T, 5*N*D],
             key [T, K*D]: a leading dimension of 1 goes unless it is the token's.
    Dtypes:  fp32, fp16, bf16; table, products and sums are fp32, rounded once to the query's dtype. Features past
             ``rotary_dim`` pass through bit for bit, five times.
    State:   ``cos_sin_cache`` [n + c, R] fp32, cosines then sines; casting the module leaves it in fp32.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for an odd ``rotary_dim`` or one past the head, and for a ``local_size`` that leaves no
             positions to a chunk. A position that is not in 0 .. ``max_position_embeddings`` - 1, offset included:
             IndexError in eager code on the CPU; on other devices and in compiled code the token's heads become NaN.
    Source:  An et al. 2024, arXiv 2402.17463; Qwen2.5-1M, arXiv 2501.15383.

    Args:
        head_size: D.
        rotary_dim: R, even, at most D.
        max_position_embeddings: what positions stay below.
        base: of the frequencies.
        is_neox_style: the pairing, as of ``RotaryEmbedding``.
        dtype: accepted for the order of the parameters; the table is always fp32.
        chunk_size: c.
        local_size: how many positions neighbouring chunks share.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None,
        chunk_size: int,
        local_size: int,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=False,
            enforce_enable=enforce_enable,
        )  # fmt: skip
        if not 0 <= local_size < chunk_size:
            raise ValueError(
                f"local_size is {local_size}; it must lie in 0..{chunk_size - 1}, so that a chunk of {chunk_size} keeps "
                "positions of its own."
            )
        self.chunk_size = chunk_size
        self.local_size = local_size
        self.chunk = chunk_size - local_size
        self.set_table(scaling.plain(rotary_dim, base), rows=self.chunk + chunk_size)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = self._moved(positions, offsets)
        bad = self._outside(positions).unsqueeze(-1)
        n, c = self.chunk, self.chunk_size
        j = positions % n
        last = torch.full_like(j, min(2 * n - 1, c))

        def turned(rows: Tensor, x: Tensor) -> Tensor:
            cos, sin = torch.where(bad, float("nan"), self.cos_sin_cache[rows]).chunk(2, -1)
            return self._turn(cos, sin, self._apart(positions, x)).flatten(1)

        queries = [turned(rows, query) for rows in (j, (j + n).clamp(max=c), last, j + n, j + c)]
        return torch.cat(queries, dim=-1), None if key is None else turned(j, key)

    def _moved(self, positions: Tensor, offsets: Tensor | int | None) -> Tensor:
        """[T], offsets added."""
        return (positions if offsets is None else positions + offsets).flatten()

    def _outside(self, positions: Tensor) -> Tensor:
        """Which positions are none, [T]; in eager code on the CPU an IndexError."""
        limit = self.max_position_embeddings
        bad = (positions < 0) | (positions >= limit)
        if positions.is_cpu and not torch.compiler.is_compiling() and bool(bad.any()):
            raise IndexError(
                f"dual_chunk_rotary_embedding: position {int(positions[bad][0])} is outside 0..{limit - 1}; build the op "
                "with a larger max_position_embeddings."
            )
        return bad

    def _apart(self, positions: Tensor, x: Tensor) -> Tensor:
        """x as [T, heads, D]."""
        tokens = positions.shape[0]
        rows = x[0] if x.dim() == 3 and x.shape[0] == 1 and x.shape[1] == tokens else x
        return rows.reshape(tokens, math.prod(rows.shape[1:]) // self.head_size, self.head_size)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = self._moved(positions, offsets)
        if positions.dtype not in (torch.int32, torch.int64):
            positions = positions.long()
        out = kernels_cpu.dual_chunk_rotary_embedding_cpu(
            positions, self.cos_sin_cache, self._apart(positions, query),
            None if key is None else self._apart(positions, key), self.rotary_dim, not self.is_neox_style,
            self.max_position_embeddings, self.chunk, self.chunk_size,
        )  # fmt: skip
        return out[0].flatten(1), None if key is None else out[1].flatten(1)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = self._moved(positions, offsets)
        out = kernels_triton.dual_chunk_rotary_embedding_triton(
            positions, self.cos_sin_cache, self._apart(positions, query),
            None if key is None else self._apart(positions, key), self.is_neox_style,
            self.max_position_embeddings, self.chunk, self.chunk_size,
        )  # fmt: skip
        return out[0].flatten(1), None if key is None else out[1].flatten(1)

    forward_hip = forward_xpu = forward_cuda

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}, local_size={self.local_size}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # Heads of Qwen2.5-7B-Instruct-1M; its chunks are 262144 - 8192 positions, whose table alone is 264 MB.
        sizes = [(t, 28, 4, 128, 128, True, 8192, 1024) for t in (1, 64, 1024, 4096)]
        edges = [
            (0, 2, 1, 64, 64, True, 64, 8), (5, 3, 1, 80, 32, True, 64, 8), (5, 3, 1, 256, 64, False, 64, 40),
            (7, 1, 1, 6, 2, False, 8, 0), (9, 2, 1, 16, 16, True, 2, 1),
        ]  # fmt: skip
        for t, n, k, d, r, neox, chunk_size, local_size in [*sizes, *edges]:
            yield Case(
                name=f"T={t} {n}+{k} heads x{d} R={r} {'neox' if neox else 'gptj'} chunks of {chunk_size}-{local_size}",
                init={
                    "head_size": d,
                    "rotary_dim": r,
                    "max_position_embeddings": 32768,
                    "base": 10000.0,
                    "is_neox_style": neox,
                    "dtype": None,
                    "chunk_size": chunk_size,
                    "local_size": local_size,
                },
                args=lambda i, t=t, n=n, k=k, d=d: (
                    i.integers(0, 32768 - 5, t), i.randn(t, n * d), i.randn(t, k * d), i.integers(0, 5, t),
                ),
                dims={"T": t, "heads": 6 * n + 2 * k, "D": d, "R": r},
                bench=t in (1, 64, 1024, 4096),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        d = case.dims
        return Cost(size_bytes=d["T"] * (d["heads"] * d["D"] * dtype.itemsize + 5 * d["R"] * 4 + 8))
