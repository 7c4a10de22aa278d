"""Frequencies of the rope scaling kinds: each turns ``theta^(-2i/R)`` into what its model was trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def plain(rotary_dim: int, base: float) -> Tensor:
    """``base^(-2i/R)`` for i in 0..R/2-1, fp32 [R/2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(rotary_dim, 1)
    return 1.0 / base**exponents


def ntk(rotary_dim: int, base: float, factor: float, mixed_b: float | None) -> Tensor:
    """NTK-aware: a larger base and a shared division, or a division that grows with i (``mixed_b``)."""
    if mixed_b is None:
        return plain(rotary_dim, base * factor) / factor ** (2 / rotary_dim)
    a = math.log(factor) / (rotary_dim / 2) ** mixed_b
    steps = torch.arange(1, rotary_dim // 2 + 1, dtype=torch.float32)
    return plain(rotary_dim, base) / torch.exp(a * steps**mixed_b)


def dynamic_base(rotary_dim: int, base: float, factor: float, length: int, trained_length: int) -> float:
    """The base that dynamic NTK uses for ``length`` positions."""
    return base * (factor * length / trained_length - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))


def llama3(
    rotary_dim: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    frequencies = plain(rotary_dim, base)
    wavelength = 2 * math.pi / frequencies
    if low_freq_factor == high_freq_factor:
        blend = torch.zeros_like(frequencies)
    else:
        blend = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > original_length / low_freq_factor, frequencies / factor, blended)
    return torch.where(wavelength < original_length / high_freq_factor, frequencies, scaled)


def yarn(
    rotary_dim: int,
    base: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn often are kept, those that turn seldom divided by the factor."""

    def pair_of(rotations: float) -> float:
        return rotary_dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain(rotary_dim, base)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor: ``0.1 mscale ln(factor) + 1``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope(rotary_dim: int, base: float, factors: Sequence[float]) -> Tensor:
    """LongRoPE (arXiv 2402.13753): every pair has a divisor of its own."""
    if len(factors) != rotary_dim // 2:
        raise ValueError(f"longrope needs one factor a pair, {rotary_dim // 2}; it got {len(factors)}.")
    return plain(rotary_dim, base) / torch.tensor(factors, dtype=torch.float32)


def longrope_magnitude(length: int, original_length: int) -> float:
    """LongRoPE's attention factor for a model stretched from ``original_length`` to ``length``."""
    if length <= original_length:
        return 1.0
    return math.sqrt(1 + math.log(length / original_length) / math.log(original_length))
