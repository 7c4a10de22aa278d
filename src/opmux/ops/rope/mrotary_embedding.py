"""Rotary embedding by positions of time, height and width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case
from ...core.lazy import lazy_module
from ...core.requires import requires
from .rotary_embedding import RotaryEmbedding

__all__ = ["MRotaryEmbedding"]

kernels_triton = lazy_module("opmux.ops.rope.kernels_triton")


class MRotaryEmbedding(RotaryEmbedding):
    """``RotaryEmbedding`` whose pairs read one of three positions each; it follows ``rotary_embedding``'s directives.

    Sectioned: the first ``mrope_section[0]`` pairs read time, the next ``[1]`` height, the rest width. Interleaved:
               pair i reads
    height if ``i % 3 == 1`` and ``i < 3 * section[1]``, width if ``i % 3 == 2`` and ``i < 3 * section[2]``, else time.

    Shapes:  positions [3, T], or [T] for text (all three equal); query [T, N*D] or [T, N, D]; key the same, or None.
    Errors:  as of ``RotaryEmbedding``; ValueError if the section does not add up to R/2, or positions are neither [T]
             nor [3, T].
    Source:  Wang et al. 2024 (Qwen2-VL), arXiv 2409.12191; interleaved in Qwen3-VL.
    """

    _axis: Tensor

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
        mrope_section: Sequence[int],
        mrope_interleaved: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            dtype,
            init_cache,
            enforce_enable=enforce_enable,
        )
        if len(mrope_section) != 3 or sum(mrope_section) != rotary_dim // 2:
            raise ValueError(
                f"mrope_section is {list(mrope_section)}; it must be three sizes that add up to {rotary_dim // 2}."
            )
        self.mrope_section = list(mrope_section)
        self.mrope_interleaved = mrope_interleaved
        self.register_buffer("_axis", self._axis_of_pairs(), persistent=False)

    def _axis_of_pairs(self) -> Tensor:
        """Which of the three positions each pair reads, [R/2]."""
        time, height, width = self.mrope_section
        if not self.mrope_interleaved:
            return torch.repeat_interleave(torch.arange(3), torch.tensor([time, height, width]))
        pairs = torch.arange(self.rotary_dim // 2)
        axis = torch.where((pairs % 3 == 1) & (pairs < 3 * height), 1, 0)
        return torch.where((pairs % 3 == 2) & (pairs < 3 * width), 2, axis)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if positions.dim() == 1:
            return super().forward_native(positions, query, key)
        cos, sin = self._chosen_rows(positions)
        return self._turn(cos, sin, query), None if key is None else self._turn(cos, sin, key)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if positions.dim() == 1:
            return super().forward_cpu(positions, query, key)
        # The chosen rows make a table of their own, with one row a token.
        table = torch.cat(self._chosen_rows(positions), dim=-1)
        own = torch.arange(positions.shape[1])
        return self._turn_cpu(own, table, query, key)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if positions.dim() == 1:
            return super().forward_cuda(positions, query, key)
        table = torch.cat(self._chosen_rows(positions), dim=-1)
        own = torch.arange(positions.shape[1], device=positions.device)
        return kernels_triton.rotary_embedding(own, query, key, self.head_size, table, self.is_neox_style)

    forward_hip = forward_xpu = forward_cuda

    def _chosen_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, R/2] of every token, each pair's taken at the position that it reads."""
        if positions.dim() != 2 or positions.shape[0] != 3:
            raise ValueError(f"positions have shape {tuple(positions.shape)}; a multimodal rope takes [T] or [3, T].")
        rows = self._rows(positions)  # [3, T, R]
        pairs = torch.arange(self.rotary_dim // 2, device=positions.device)
        return rows[self._axis, :, pairs].T, rows[self._axis, :, pairs + self.rotary_dim // 2].T

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for interleaved in (False, True):
            for t in (0, 5, 1024):
                yield Case(
                    name=f"T={t} 4+2 heads x64{' interleaved' if interleaved else ''}",
                    init={
                        "head_size": 64,
                        "rotary_dim": 64,
                        "max_position_embeddings": 4096,
                        "base": 10000.0,
                        "is_neox_style": True,
                        "mrope_section": [16, 8, 8],
                        "mrope_interleaved": interleaved,
                    },
                    args=lambda i, t=t: (i.integers(0, 4096, 3, t), i.randn(t, 256), i.randn(t, 128)),
                    dims={"T": t, "heads": 6, "D": 64, "R": 64},
                )
