"""What the element-wise activations share: the check of their input, their cases and their cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import Case, Cost


def check_floating(op: str, x: Tensor) -> None:
    """An activation takes a floating tensor."""
    if not x.is_floating_point():
        raise TypeError(f"{op} takes floating-point tensors; x is {x.dtype}.")


def elementwise_cases() -> Iterator[Case]:
    """Widths of real models at several token counts, and the edges."""
    sizes = [(t, d) for d in (1536, 14336) for t in (1, 64, 1024, 16384)]
    edges = [(0, 64), (7, 1), (7, 3), (3, 769), (2, 65537)]
    for tokens, width in [*sizes, *edges]:
        yield Case(
            name=f"T={tokens} d={width}",
            init={},
            args=lambda i, t=tokens, d=width: (i.randn(t, d, scale=3.0),),
            dims={"T": tokens, "d": width},
            bench=(tokens, width) in sizes,
        )


def elementwise_cost(case: Case, dtype: torch.dtype) -> Cost:
    """Read once, written once."""
    return Cost(size_bytes=2 * case.dims["T"] * case.dims["d"] * dtype.itemsize)
