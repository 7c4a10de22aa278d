"""Parameters of ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def frozen(data: Tensor) -> nn.Parameter:
    """A parameter that asks for no gradient: ops serve inference, and a call that needs a gradient runs native.

    ``op.requires_grad_()`` makes an op trainable.
    """
    return nn.Parameter(data, requires_grad=False)


def copy_checked(into: Tensor, source: Tensor, what: str) -> None:
    """Copy a checkpoint's part into a parameter's part; ValueError with both shapes if they differ."""
    if source.dim() == 0:
        source = source.reshape(1)
    if into.shape != source.shape:
        raise ValueError(
            f"{what} of the checkpoint is {tuple(source.shape)}; this rank's place for it is {tuple(into.shape)}."
        )
    with torch.no_grad():
        into.copy_(source)
