"""The 8-bit formats and the shapes of the groups that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = ["GroupShape"]


class _Shape(NamedTuple):
    row: int
    col: int


class GroupShape(_Shape):
    """Rows and columns that share one scale; -1 means all of them."""

    __slots__ = ()

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    @property
    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    @property
    def is_per_token(self) -> bool:
        return self == (1, -1)

    @property
    def is_per_channel(self) -> bool:
        return self == (-1, 1)

    @property
    def is_per_group(self) -> bool:
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True)
class Fp8Format:
    """A storage format and the range that is used of it.

    The fnuz format reaches 240, but 224 is what its hardware's scaled products expect.
    """

    dtype: torch.dtype
    max: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Fp8Format:
        formats = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
        if dtype not in formats:
            raise ValueError(f"quant_fp8 knows {', '.join(str(d) for d in formats)}; dtype is {dtype}.")
        return cls(dtype, formats[dtype])

    @property
    def least_scale(self) -> float:
        """The floor of every dynamic scale."""
        return 1.0 / (self.max * 512.0)

    def scale_of(self, amax: Tensor) -> Tensor:
        """The dynamic scale for a largest absolute value.

        The divisor is a tensor: by a number, torch multiplies with its reciprocal on CUDA, and the last bit of the
        scale would depend on the device.
        """
        return (amax / torch.full_like(amax, self.max)).clamp(min=self.least_scale)

    def cast(self, values: Tensor) -> Tensor:
        """Saturate, then round. The cast alone is not relied on: what it does beyond the range differs by version."""
        return values.clamp(-self.max, self.max).to(self.dtype)


def power_of_two_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below each scale, exactly: by mantissas, not by logarithms."""
    mantissa = torch.frexp(scale).mantissa
    return torch.where(torch.isfinite(scale) & (mantissa != 0.5), scale / mantissa, scale)
