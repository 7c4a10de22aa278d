"""Packed sequences: where each begins and ends."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def boundaries(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """``cu_seqlens`` as numbers; ValueError unless they rise from 0 to ``tokens``."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] == 0 and bounds[-1] == tokens and all(a <= b for a, b in pairwise(bounds)):
        return bounds
    shown = ", ".join(map(str, bounds[:6])) + (", ..." if len(bounds) > 6 else "")
    raise ValueError(
        f"cu_seqlens is [{shown}] for {tokens} tokens. It holds where each segment begins and where the last one ends: it "
        f"starts with 0, never falls, and ends with {tokens}."
    )
