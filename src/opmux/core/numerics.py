"""The dtype that definitions compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or as it is in float64, in which a definition is its own reference."""
    return x if x.dtype == torch.float64 else x.float()
