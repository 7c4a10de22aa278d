"""The rotation itself, shared by the definitions of the rope ops."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Turn the pairs of x's last dimension; ``cos`` and ``sin`` hold one entry a pair and broadcast. fp32, rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide), sin.to(wide)
    if is_neox_style:
        u, v = x.to(wide).chunk(2, dim=-1)
        return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)
    u, v = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2).to(x.dtype)
