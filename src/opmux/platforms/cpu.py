"""The CPU: kernels in C++, compiled at install for several instruction sets."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..core.decide import Facts
from .interface import Platform


class CpuPlatform(Platform):
    """Always present."""

    name: ClassVar[str] = "cpu"
    kind: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"

    @classmethod
    def detect(cls) -> str | None:
        return "no accelerator was found, and a CPU is always there"

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        from ..native import library

        missing = None if library.available else library.reason
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape, isa=library.isa, native_library=missing)
