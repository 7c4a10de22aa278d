"""Convolution on the CPU where it is a matrix product: patches that touch and do not overlap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import kernels
from opmux.ops.linear.kernels_cpu import linear_cpu


def _grid(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """The number of whole patches in each dimension."""
    return tuple(n // k for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))


@opaque(fake=lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0], *_grid(x, weight))))
def patch_conv_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution whose stride is its kernel's size, without padding, dilation or groups.

    Args:
        x: [B, C, H, W] or [B, C, T, H, W], fp32, bf16 or fp16, any strides.
        weight: [out, C, *kernel], x's dtype; bias: [out], x's dtype, or None.

    Returns: [B, out, *grid] in x's dtype, contiguous. Sums are fp32, the bias is added to them; rounded once.
    """
    grid = _grid(x, weight)
    shape = (x.shape[0], weight.shape[0], *grid)
    y = linear_cpu(_patches(x, weight.shape[2:], grid), weight.flatten(1), bias)
    if math.prod(grid) == 1:
        return y.view(shape)
    y = y.view(shape[0], math.prod(grid), shape[1])
    out = torch.empty((shape[0], shape[1], math.prod(grid)), dtype=x.dtype, device="cpu")
    for image, product in zip(out, y, strict=True):  # torch transposes one matrix much faster than a batch of them
        image.copy_(product.T)
    return out.view(shape)


def _patches(x: Tensor, kernel: torch.Size, grid: tuple[int, ...]) -> Tensor:
    """[B * prod(grid), C * prod(kernel)], a view where x holds one patch each."""
    batch, channels = x.shape[:2]
    if x.shape[2:] == kernel and x.is_contiguous():
        return x.flatten(1)
    if x.stride(-1) != 1:
        x = x.contiguous()
    images = x if x.dim() == 5 else x.unsqueeze(2)
    one = (1,) * (5 - x.dim())
    out = torch.empty((batch * math.prod(grid), channels * math.prod(kernel)), dtype=x.dtype, device="cpu")
    kernels.patches(
        x.data_ptr(), *images.stride()[:4], out.data_ptr(), batch, channels, *one, *grid, *one, *kernel, x.itemsize
    )
    return out
