"""Parameters of ops."""

from __future__ import annotations

from torch import Tensor, nn


def frozen(data: Tensor) -> nn.Parameter:
    """A parameter that asks for no gradient: ops serve inference, and a call that needs a gradient runs native.

    ``op.requires_grad_()`` makes an op trainable.
    """
    return nn.Parameter(data, requires_grad=False)
