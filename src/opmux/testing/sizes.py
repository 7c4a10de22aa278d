"""How large a case is, and what fits here."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..core.cases import Case, Inputs
from .tensors import tensors

QUICK = 400_000  # elements, or products / 64: a few milliseconds on one core
INTERPRETED = 30_000  # Triton's interpreter runs a kernel's lines one by one in Python
_COPIES = 6  # of a case's elements in float64: inputs, outputs, and what the definition makes on the way


def elements(cls: Any, case: Case) -> int:
    """Elements that a case touches or holds, or its products / 64, whichever is more."""
    needs = cls.cost(case, torch.float32)
    with torch.device("meta"):
        op = cls(**case.init)
    held = sum(p.numel() for p in op.parameters())  # an embedding reads few of its rows, and still has them all
    return max(needs.size_bytes // 4, needs.flops // 64, held)


def fitting(device: str) -> int:
    """The most elements for which the definition in float64 fits into the memory that is free."""
    return free_bytes(device) // (8 * _COPIES)


def free_bytes(device: str) -> int:
    """Memory that is free now."""
    if device == "cpu":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # not on this system
            return 4 << 30
    free, _ = torch.get_device_module(device).mem_get_info()
    return int(free)


def small_cases(cls: Any, limit: int = QUICK) -> list[Case]:
    """The cases of an op up to ``limit`` elements, in the op's order."""
    return [case for case in cls.cases() if elements(cls, case) <= limit]


def has_elements(case: Case) -> bool:
    """Whether no argument is empty."""
    return all(t.numel() for t in tensors(case.args(Inputs(torch.float32))))


def typical_case(cls: Any, limit: int = QUICK) -> Case | None:
    """A small case with elements, neither the smallest nor the largest, for checks that need one case only."""
    cases = [case for case in small_cases(cls, limit) if has_elements(case)]
    cases.sort(key=lambda case: elements(cls, case))
    return cases[len(cases) // 2] if cases else None
