"""What the gated activations share: the check of their input, their cases and their cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.cases import Case, Cost


def check_gated(op: str, x: Tensor) -> None:
    """A gated activation takes a floating tensor whose last dimension holds two halves."""
    if not x.is_floating_point():
        raise TypeError(f"{op} takes floating-point tensors; x is {x.dtype}.")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{op} splits the last dimension in two halves; x has shape {tuple(x.shape)}, which is odd there."
        )


def gated_cases(variants: Sequence[dict[str, Any]] = ({},)) -> Iterator[Case]:
    """Widths of real models at several token counts, and the edges, for each of the constructor's ``variants``."""
    sizes = [(t, d) for d in (1536, 14336) for t in (1, 64, 1024, 16384)]
    edges = [(0, 64), (7, 0), (7, 1), (7, 3), (7, 65), (3, 769), (2, 65537)]
    for init, (tokens, width) in itertools.product(variants, [*sizes, *edges]):
        yield Case(
            name=" ".join([f"T={tokens} d={width}", *(f"{k}={v}" for k, v in init.items())]),
            init=dict(init),
            args=lambda i, t=tokens, d=width: (i.randn(t, 2 * d, scale=2.0),),
            dims={"T": tokens, "d": width},
            bench=(tokens, width) in sizes,
        )


def gated_cost(case: Case, dtype: torch.dtype) -> Cost:
    """Two halves read, one written."""
    return Cost(size_bytes=3 * case.dims["T"] * case.dims["d"] * dtype.itemsize)
