"""Tensors of a call: finding them, comparing their bits, laying them out in memory in other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Layout = Callable[[Tensor], Tensor]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a result or of arguments, in order; modules' parameters are left out."""
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def all_tensors(value: Any) -> list[Tensor]:
    """Every tensor of arguments or of a module, parameters and buffers included."""
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in all_tensors(v)]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return tensors(value)


def mapped(value: Any, change: Layout) -> Any:
    """``value`` with every tensor changed; modules stay as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(v, change) for v in value)
    return change(value) if isinstance(value, Tensor) else value


def in_float64(value: Any) -> Any:
    """``value`` with every floating tensor, also those of modules, in float64."""
    if isinstance(value, nn.Module):
        return value.double()
    if isinstance(value, (tuple, list)):
        return type(value)(in_float64(v) for v in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree: NaN equals NaN, and 0.0 differs from -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.numel() == 0:
        return True
    return torch.equal(_bytes(one), _bytes(other))


def first_difference(one: Tensor, other: Tensor) -> tuple[int, ...]:
    """The index of the first element whose bits differ; both have one shape."""
    return unravelled(int((_bytes(one) != _bytes(other)).any(1).nonzero()[0]), one.shape)


def _bytes(x: Tensor) -> Tensor:
    """[elements, bytes of one]."""
    # A tensor of one element counts as contiguous whatever its strides, and view() looks at them.
    dense = x.detach().contiguous().as_strided((x.numel(),), (1,))
    return dense.view(torch.uint8).view(-1, x.element_size())


def unravelled(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The index in ``shape`` of an element by its number."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


# -- layouts: the same values, elsewhere in memory, with junk between and around them ----------------------------------


def offset(x: Tensor) -> Tensor:
    """At an address that is a multiple of the element size only."""
    return torch.cat([_junk(x, 1), x.flatten(), _junk(x, 1)])[1:-1].view(x.shape)


def strided(x: Tensor) -> Tensor:
    """In rows with junk between them."""
    if x.dim() == 0:
        return x
    wide = _junk(x, *x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    """With a last stride that is not 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


LAYOUTS: dict[str, Layout] = {"offset": offset, "strided": strided, "transposed": transposed}


def _junk(x: Tensor, *shape: int) -> Tensor:
    """NaN, or for integers the largest one: an index that no table has."""
    if x.dtype == torch.bool:
        return x.new_full(shape, True)
    return x.new_full(shape, float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)
