"""Named inputs of an op. One list feeds its tests, ``verify``, ``bench``, ``tune`` and its docs page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """Makes a case's tensors: random ones from a seed, on one device, in one dtype."""

    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0

    def randn(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal values in the case's dtype. Drawn on the CPU, so that a seed means the same numbers everywhere."""
        generator = torch.Generator().manual_seed(self.seed + sum(shape) + len(shape))
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * scale + shift
        return values.to(device=self.device, dtype=self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers in ``[low, high)``."""
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randint(low, high, shape, generator=generator).to(self.device)


@dataclass(frozen=True)
class Case:
    """One named input: how to build the op, and its arguments.

    Attributes:
        name: what reports call it.
        init: constructor arguments.
        args: makes the arguments of one call.
        dims: the sizes that ``cost`` reads, by their letters (T tokens, H hidden, ...).
        bench: worth timing (edges are not).
        prepare: fills the op's parameters after construction.
    """

    name: str
    init: dict[str, Any]
    args: Callable[[Inputs], tuple[Any, ...]]
    dims: dict[str, int] = field(default_factory=dict)
    bench: bool = False
    prepare: Callable[[Any, Inputs], None] | None = None

    def build(self, cls: type, inputs: Inputs) -> Any:
        """The op on the inputs' device, its floating parameters in the inputs' dtype."""
        op = cls(**self.init).to(device=inputs.device)
        for parameter in op.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(inputs.dtype)
        if self.prepare is not None:
            self.prepare(op, inputs)
        return op


@dataclass(frozen=True)
class Cost:
    """What a case must move and compute at the least."""

    size_bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel may be from native in float64, in units in the last place (ulp) of the output's dtype.

    Attributes:
        ulp: for fp16 and bf16, whose rounding hides the fp32 arithmetic behind it.
        fp32: for fp32, where the arithmetic's own error shows: it grows with the length of a sum.
        scale: a fraction of the reference's root mean square. A smaller value's error is measured in ulp of that scale: what
            cancelled to almost nothing has no digits left to compare.
        inside: for fp32 outputs of an op that rounds to fp16 or bf16 on the way to them (the scales of a fused
            quantization), in ulp of that dtype.
    """

    ulp: float
    fp32: float
    scale: float = 0.0
    inside: float = 0.0

    def bound(self, dtype: torch.dtype, inputs: torch.dtype | None = None) -> float:
        """The bound for an output of ``dtype``, in ulp of it; ``inputs`` is the dtype that the op was given."""
        if dtype != torch.float32:
            return self.ulp
        if inputs is None or inputs == torch.float32 or not self.inside:
            return self.fp32
        return self.inside * torch.finfo(inputs).eps / torch.finfo(dtype).eps

    def worst(self, out: Tensor, ref: Tensor) -> float:
        """The worst error in ulp. NaN and infinity must stand where they stand in ``ref``, or the error is infinite."""
        if out.shape != ref.shape:
            return float("inf")
        return float(self.errors(out, ref).max()) if out.numel() else 0.0

    def errors(self, out: Tensor, ref: Tensor) -> Tensor:
        """The error of every element in ulp, in float64; infinite where NaN or infinity stands on one side only.

        Integers are right or infinitely wrong.
        """
        if not out.dtype.is_floating_point:
            return torch.where(out == ref, 0.0, float("inf")).double()
        ref, got = ref.double(), out.double()
        rounded = ref.to(out.dtype).double()  # the reference may overflow in the narrower dtype
        finite = torch.isfinite(rounded)
        same = torch.where(rounded.isnan(), got.isnan(), got == rounded)
        info = torch.finfo(out.dtype)
        known = ref.masked_fill(~finite, 0.0)
        mean_square = float(known.square().sum() / finite.sum().clamp(min=1))
        floor = max(info.smallest_normal, self.scale * mean_square**0.5)
        # By frexp, not log2, which on some devices falls short of the exponent of a power of two.
        size = known.abs().clamp(min=floor)
        unit = size / torch.frexp(size).mantissa * (0.5 * info.eps)
        errors = torch.where(finite, (got - ref).abs() / unit, torch.where(same, 0.0, float("inf")))
        return torch.where(errors.isnan(), float("inf"), errors)  # NaN where the reference is finite
