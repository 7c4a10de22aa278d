"""The rotation itself, shared by the definitions of the rope ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.numerics import wide


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Turn the pairs of x's last dimension in fp32; ``cos`` and ``sin`` hold one entry a pair and broadcast."""
    values = wide(x)
    cos, sin = cos.to(values.dtype), sin.to(values.dtype)
    if is_neox_style:
        u, v = values.chunk(2, dim=-1)
        return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)
    u, v = values.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2).to(x.dtype)
