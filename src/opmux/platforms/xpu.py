"""Intel GPUs: the same Triton kernels."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..core.decide import Facts
from .interface import Platform, triton_missing


class XpuPlatform(Platform):
    """Present where torch sees an XPU device."""

    name: ClassVar[str] = "xpu"
    kind: ClassVar[str] = "xpu"
    device_type: ClassVar[str] = "xpu"

    @classmethod
    def detect(cls) -> str | None:
        if not torch.xpu.is_available():
            return None
        return f"torch {torch.__version__} sees {torch.xpu.device_count()} XPU device(s)"

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        triton = triton_missing() if present else None
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape, triton=triton)
